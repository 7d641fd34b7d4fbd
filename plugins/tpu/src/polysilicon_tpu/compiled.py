"""What the real TPU compiler makes of a kernel, on any machine that has libtpu, without a TPU.

The compiler runs in a process of its own: it can hang on a program that is far too large, and it
writes to the terminal. What it answers is read here. This proves that a kernel compiles and fits
vector memory; not its numbers, its races or its speed.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polysilicon.api import Compiled, DeviceError, PolysiliconError
from polysilicon_tpu.chips import CHIPS, chip_of
from polysilicon_tpu.layout import ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from polysilicon.api import Device

#: What makes libtpu compile at once where there is no TPU: no wait for the cloud's metadata
#: server, no lock against a second process, no hundreds of log files.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
#: A kernel compiles in a tenth of a second; one that takes this long is wrong in size.
LIMIT_SECONDS = 60.0
_SLOW_SECONDS = 20.0
#: Vector memory, in the numbers of XLA's memory spaces.
_VMEM = "1"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program for the compiler.

    Attributes:
        variant: what it is compiled for; names it in the results.
        builder: `module:function` that makes it, called in the compiler's process with
            `parameters`; returns a JAX function, and shape and dtype of each argument.
    """

    variant: str
    builder: str
    parameters: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


def compile_programs(
    kernel: str,
    programs: Sequence[Program],
    device: Device,
    *,
    limit: float = LIMIT_SECONDS,
) -> list[Compiled]:
    """Compiles each program for the TPU that `device` names.

    Args:
        kernel: name of the kernel that the programs are made of.
        programs: what to compile.
        device: a TPU, present or not.
        limit: seconds after which a program is given up.

    Raises:
        PolysiliconError: jax or libtpu is missing, or the compiler could not be started.
        DeviceError: the device is no TPU that the compiler has.
    """
    if missing := [name for name in ("jax", "libtpu") if not find_spec(name)]:
        raise PolysiliconError(
            f"the TPU compiler is not here ({' and '.join(missing)} not installed): "
            "pip install 'polysilicon-tpu[aot]'"
        )
    chip = chip_of(device.arch)
    if chip is None:
        names = ", ".join(chip.arch for chip in CHIPS)
        raise DeviceError(f"{device.name} is no TPU to compile for: expected one of {names}")
    answers: list[Compiled] = []
    while waiting := programs[len(answers) :]:
        begin = time.monotonic()
        lines, against_next = _run(chip.topology, waiting, limit)
        done = [_judged(kernel, json.loads(line)) for line in lines]
        answers += done
        if against_next:
            seconds = time.monotonic() - begin - sum(one.seconds for one in done)
            answers.append(
                Compiled(
                    kernel=kernel,
                    variant=waiting[len(lines)].variant,
                    seconds=seconds,
                    problems=(against_next,),
                )
            )
    return answers


def _run(topology: str, programs: Sequence[Program], limit: float) -> tuple[list[bytes], str]:
    """The answers of one process, a line each, and what the program after them did to it, if so."""
    asked = {"topology": topology, "programs": [asdict(program) for program in programs]}
    found = os.pathsep.join(filter(None, sys.path))
    lines: list[bytes] = []
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "polysilicon_tpu.compiler_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": found},
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(asked).encode())
            process.stdin.close()
            for line in _lines(process.stdout.fileno(), limit):
                if line is None:
                    process.kill()
                    return lines, f"still compiling after {limit:.0f} s: its blocks are too large"
                lines.append(line)
        said.seek(0)
        last = (said.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    if len(lines) == len(programs):
        return lines, ""
    if process.returncode < 0:
        return lines, f"the compiler ended by signal {-process.returncode}: {last}"
    raise PolysiliconError(
        f"the TPU compiler's process failed: exit status {process.returncode}: {last}"
    )


def _lines(descriptor: int, limit: float) -> Iterator[bytes | None]:
    """Lines as they come; None where none came for `limit` seconds."""
    rest = b""
    while select.select([descriptor], [], [], limit)[0]:
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield None


def _judged(kernel: str, answer: Mapping[str, Any]) -> Compiled:
    """The record of one answer of the compiler's process."""
    facts: dict[str, Any] = {"toolchain": f"libtpu {version('libtpu')}"}
    if refusal := answer.get("error"):
        problems = [f"the compiler refuses it: {refusal}"]
    else:
        facts |= {**answer["memory"], **read(answer["hlo"])}
        problems = against(facts, answer["call"])
    if answer["seconds"] > _SLOW_SECONDS:
        problems.append(f"compiling took {answer['seconds']:.0f} s, at most {_SLOW_SECONDS:.0f}")
    return Compiled(
        kernel=kernel,
        variant=answer["variant"],
        seconds=answer["seconds"],
        facts=facts,
        problems=tuple(problems),
    )


def read(hlo: str) -> dict[str, str | int]:
    """What an optimised program says of its kernels.

    `custom_calls`: names of the kernels in it; `vmem_bytes`: the most vector memory that one of
    them uses, 0 where all that it touches lies there already; `copied_bytes`: size of the arrays
    that are only moved to another layout; `layout`: how arguments and results lie.
    """
    calls, vmem = [], 0
    for line in hlo.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        calls.append(re.sub(r"[.\d]*$", "", line.split("%", 1)[1].split(" ", 1)[0]))
        used = line.partition('"used_scoped_memory_configs":')[2].partition("]")[0]
        sizes = re.findall(rf'"memory_space":"{_VMEM}","offset":"\d+","size":"(\d+)"', used)
        vmem = max(vmem, sum(map(int, sizes)))
    layout = re.search(r"entry_computation_layout=\{(.*?)\}(?:, \w+=|$)", hlo, re.MULTILINE)
    return {
        "custom_calls": ",".join(sorted(set(calls))),
        "vmem_bytes": vmem,
        "copied_bytes": sum(map(_bytes, re.findall(r"= (\S+) (?:copy|transpose)\(", hlo))),
        "layout": re.sub(r"/\*index=\d+\*/", "", layout[1]) if layout else "",
    }


def _bytes(array: str) -> int:
    """Size of an array in XLA's notation, e.g. `bf16[3,100]{1,0:T(4,128)(2,1)}`, unpadded."""
    name, _, rest = array.partition("[")
    bits = next((bits for xla, bits in ELEMENTS.values() if xla == name), 32)
    return math.prod(int(size) for size in rest.partition("]")[0].split(",") if size) * bits // 8


def against(facts: Mapping[str, Any], call: str) -> list[str]:
    """What the gates have against a program in which the kernel `call` is to be."""
    problems = []
    if call not in str(facts["custom_calls"]).split(","):
        held = facts["custom_calls"] or "none"
        problems.append(f"the kernel {call} is not in the compiled program: it holds {held}")
    # A vector that is moved costs nothing; activations or a cache double the kernel's traffic.
    if facts["copied_bytes"] > facts["argument_bytes"] // 16:
        problems.append(
            f"{facts['copied_bytes']:,} bytes are copied to another layout around the kernel"
        )
    return problems
