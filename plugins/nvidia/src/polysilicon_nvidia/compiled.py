"""Kernels compiled for a chip that need not be here, and held to that chip's limits.

Triton's wheel holds NVIDIA's assembler and `cuobjdump`, so this needs no CUDA and no driver. What
the compiler says is not how fast a kernel is; nothing here has run.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polysilicon.api import Compiled, compile_triton
from polysilicon_nvidia.chips import ARCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polysilicon.api import CompiledTriton, Device

#: Above this a kernel no longer fits the instruction cache by far: something was unrolled.
MOST_CODE_BYTES = 64 << 10

_MATRIX = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def paged_attention(device: Device) -> Iterator[Compiled]:
    """paged_attention.nvidia_triton: decode and prefill in bfloat16, heads of 64, 128 and 256."""
    import torch

    from polysilicon_nvidia.kernels import paged_attention as kernel

    chip = kernel.Chip(arch=device.arch, sms=int(device.facts["sms"] or 1))

    def call(size: int, queries: int, **rule: Any) -> Callable[[], object]:
        """A long context of 2 sequences, 16 query heads on 4 key heads, pages of 16 tokens."""

        def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        cache, integers = (1024, 16, 4, size), torch.int32
        sinks = meta(16) if rule.pop("sinks", False) else None
        arguments: dict[str, Any] = {
            "q": meta(2 * queries, 16, size),
            "k_cache": meta(*cache),
            "v_cache": meta(*cache),
            "block_tables": meta(2, 512, dtype=integers),
            "query_starts": meta(3, dtype=integers),
            "kv_lengths": meta(2, dtype=integers),
            "scale": size**-0.5,
            "window": 0,
            "softcap": 0.0,
            "sinks": sinks,
            "causal": True,
            "max_query": queries,
            "max_kv": 8192,
        }
        return lambda: kernel.launch(chip, **arguments | rule)

    widest = ARCHES[device.arch].matrix_unit
    for size in (64, 128, 256):
        yield from _attention(device, f"decode, head {size}", call(size, 1), "mma")
        yield from _attention(device, f"prefill, head {size}", call(size, 4096), widest)
    every_rule = call(128, 4096, window=1024, softcap=50.0, sinks=True)
    yield from _attention(device, "prefill, head 128, window, softcap, sinks", every_rule, widest)


def triton(
    device: Device, kernel: str, variant: str, launch: Callable[[], object]
) -> Iterator[Compiled]:
    """Each Triton kernel that `launch` launches, none of which multiplies matrices: core's."""
    return _compiled(device, kernel, variant, launch, lambda name: None)


def _attention(
    device: Device, variant: str, launch: Callable[[], object], matrix_unit: str
) -> Iterator[Compiled]:
    # What only adds up parts multiplies no matrices.
    wanted = {"attend": _MATRIX[matrix_unit]}.get
    name = "paged_attention.nvidia_triton"
    return _compiled(device, name, f"{variant}, bfloat16", launch, wanted)


def _compiled(
    device: Device,
    kernel: str,
    variant: str,
    launch: Callable[[], object],
    matrix: Callable[[str], str | None],
) -> Iterator[Compiled]:
    """Each Triton kernel that one call of the host wrapper launches.

    `matrix` names the matrix instruction that a kernel of that name must use.
    """
    arch = int(device.arch.removeprefix("sm"))
    for made in compile_triton(launch, backend="cuda", arch=arch, warp_size=32):
        facts = {} if made.error else _facts(made)
        yield Compiled(
            kernel=kernel,
            variant=f"{variant}: {made.name}",
            seconds=made.seconds,
            facts=facts,
            problems=tuple(gate(made, facts, matrix(made.name), device)),
        )


def _facts(made: CompiledTriton) -> dict[str, Any]:
    ptx, cubin = str(made.asm["ptx"]), made.asm["cubin"]
    assert isinstance(cubin, bytes)
    registers, stack, local = _usage(cubin)
    return {
        "toolchain": made.toolchain,
        "registers": registers,
        "spills": stack + local,
        "shared_bytes": made.shared_bytes,
        "warps": made.num_warps,
        "matrix_instruction": next((i for i in _MATRIX.values() if i in ptx), None),
        "code_bytes": _code_bytes(cubin),
        "stores": len(re.findall(r"\bst\.global", ptx)),
    }


def gate(
    made: CompiledTriton, facts: dict[str, Any], wanted: str | None, device: Device
) -> Iterator[str]:
    """What speaks against a kernel; the compiler itself lets all pass that is no error."""
    if made.error:
        yield f"does not compile: {made.error}"
        return
    limit = int(device.facts["shared_bytes"] or 0)
    if made.diagnostics:
        yield f"the compiler says: {made.diagnostics}"
    if not facts["stores"]:
        yield "stores nothing: its result was optimised away"
    if facts["spills"]:
        yield f"spills {facts['spills']} bytes of registers a thread: make its tile smaller"
    if facts["shared_bytes"] > limit:
        yield f"takes {facts['shared_bytes']} bytes of shared memory, {device.arch} has {limit}"
    if wanted != facts["matrix_instruction"]:
        yield f"multiplies by {facts['matrix_instruction']}, expected {wanted}"
    if facts["code_bytes"] > MOST_CODE_BYTES:
        yield f"has {facts['code_bytes']} bytes of code, expected at most {MOST_CODE_BYTES}"


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers of a thread, and its bytes of stack and of local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(said)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage told nothing of the kernel: {said!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def _code_bytes(cubin: bytes) -> int:
    """Size of the executable sections of an ELF64 file."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = (struct.unpack_from("<IIQQQQ", cubin, start + n * size) for n in range(count))
    executable = 0x4
    return sum(section[5] for section in sections if section[2] & executable)
