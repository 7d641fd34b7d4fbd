"""What AMD's compiler made of a Triton kernel, read from its assembly and held against the chip."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from polysilicon.api import Compiled, compile_triton
from polysilicon_amd.chips import ARCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from polysilicon.api import CompiledTriton, Device
    from polysilicon_amd.chips import Arch

#: Beyond it something is emulated, or unrolled without bound: what is right stays far below.
MOST_CODE_BYTES = 64 * 1024
#: SIMDs that share an arch's `lds_pool_bytes`.
_SIMDS = 4

_MATRIX = re.compile(r"^\s+(v_(?:s?mfma|smfmac|s?wmma|swmmac)\w*)", re.MULTILINE)
_STORE = re.compile(r"^\s+(?:global|buffer|flat)_(?:store|atomic)_", re.MULTILINE)


def triton(
    device: Device, kernel: str, variant: str, launch: Callable[[], object]
) -> Iterator[Compiled]:
    """Each Triton kernel that `launch` launches, none of which multiplies matrices: core's."""
    arch = ARCHES[device.arch]
    return compiled_records(kernel, variant, launch, arch, matrix=lambda name: False)


def compiled_records(
    kernel: str,
    variant: str,
    launch: Callable[[], object],
    arch: Arch,
    *,
    matrix: Callable[[str], bool],
) -> Iterator[Compiled]:
    """One record a Triton kernel that `launch` launches.

    Args:
        kernel: name of the Kernel record.
        variant: what is compiled, e.g. `bfloat16, 16 tokens`.
        launch: calls the host wrapper on meta tensors.
        arch: what it is compiled for.
        matrix: whether the Triton kernel of that name must use the matrix unit.
    """
    found = compile_triton(launch, backend="hip", arch=arch.name, warp_size=arch.wave_size)
    for one in found:
        facts = asm_facts(one, arch) if not one.error else {}
        yield Compiled(
            kernel=kernel,
            variant=f"{variant}: {one.name}",
            seconds=one.seconds,
            facts=facts,
            problems=tuple(problems(one, facts, arch, matrix=matrix(one.name))),
        )


def matrix_instructions(one: CompiledTriton) -> Counter[str]:
    """How often each matrix instruction stands in the code."""
    return Counter(_MATRIX.findall(_asm(one)))


def asm_facts(one: CompiledTriton, arch: Arch) -> dict[str, Any]:
    """Registers, spills, memory, occupancy, code and matrix instructions of one kernel."""
    asm, matrix = _asm(one), matrix_instructions(one)
    return {
        "registers": _number(asm, r"\.vgpr_count:\s+(\d+)"),
        # Of the registers, those that only matrix instructions and moves can use; none on RDNA.
        "accumulators": _number(asm, r"\.agpr_count:\s+(\d+)"),
        "scalar_registers": _number(asm, r"\.sgpr_count:\s+(\d+)"),
        "spills": _number(asm, r"\.vgpr_spill_count:\s+(\d+)"),
        "scalar_spills": _number(asm, r"\.sgpr_spill_count:\s+(\d+)"),
        "scratch_bytes": _number(asm, r"\.private_segment_fixed_size:\s+(\d+)"),
        "shared_bytes": one.shared_bytes,
        "occupancy": occupancy(
            _number(asm, r"; Occupancy:\s+(\d+)"), one.shared_bytes, one.num_warps, arch
        ),
        "code_bytes": _number(asm, r"; codeLenInByte = (\d+)"),
        "stores": len(_STORE.findall(asm)),
        "matrix_instruction": " ".join(f"{name}×{n}" for name, n in sorted(matrix.items())),
        "toolchain": one.toolchain,
    }


def occupancy(by_registers: int, shared_bytes: int, warps: int, arch: Arch) -> int:
    """Waves of a SIMD at a time: what the compiler says, and what LDS leaves room for.

    The compiler's own figure leaves LDS out, which Triton allocates at the launch.
    """
    if not shared_bytes:
        return by_registers
    workgroups = arch.lds_pool_bytes // shared_bytes
    return min(by_registers, workgroups * warps // _SIMDS)


def problems(
    one: CompiledTriton, facts: dict[str, Any], arch: Arch, *, matrix: bool
) -> Iterator[str]:
    """What is against using it; all of it passes the compiler without an error."""
    if one.error:
        yield f"the compiler refuses it: {one.error}"
        return
    if one.diagnostics:
        yield f"the compiler said: {one.diagnostics}"
    if not facts["stores"]:
        yield "it stores nothing"
    for fact in ("spills", "scalar_spills"):
        if facts[fact]:
            yield f"{facts[fact]} {fact.replace('_', ' ')}, {facts['scratch_bytes']} B of scratch"
    if facts["shared_bytes"] > arch.lds_bytes:
        yield f"{facts['shared_bytes']} B of LDS, {arch.name} has {arch.lds_bytes} a workgroup"
    if matrix and f"v_{arch.matrix_unit}" not in facts["matrix_instruction"]:
        yield f"no {arch.matrix_unit} instruction: {facts['matrix_instruction'] or 'none at all'}"
    if facts["code_bytes"] > MOST_CODE_BYTES:
        yield f"{facts['code_bytes']} B of code, expected at most {MOST_CODE_BYTES}"


def _asm(one: CompiledTriton) -> str:
    return str(one.asm["amdgcn"])


def _number(asm: str, pattern: str) -> int:
    """The largest number found; 0 where the assembly doesn't say, as of AGPRs on RDNA."""
    return max(map(int, re.findall(pattern, asm)), default=0)
