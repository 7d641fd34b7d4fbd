"""Core's own plugin: the cpu device and all portable kernels, through the same hooks, last.

The records are data; a kernel's module (and torch) is imported when the kernel is bound.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from polysilicon import ops
from polysilicon.api import hookimpl
from polysilicon.errors import RecordError
from polysilicon.formats import activation, parse
from polysilicon.kernels import compiled
from polysilicon.records import Device, Kernel, Layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polysilicon.records import Problem

#: Feature flags worth knowing for matmuls, as the operating system spells them.
_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


@hookimpl
def polysilicon_devices() -> Iterable[Device]:
    """The processor of this machine."""
    return [
        Device(
            name="cpu",
            kind="cpu",
            arch=_arch(),
            torch_device="cpu",
            memory_bytes=_memory_bytes(),
            compile_default=False,
            facts={"cores": len(os.sched_getaffinity(0)), "features": " ".join(_features())},
        )
    ]


def _arch() -> str:
    return platform.machine().lower().replace("amd64", "x86_64") or "unknown"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not known on this operating system
        return None


def _features() -> list[str]:
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return []
    # "flags" on x86, "Features" on arm; the first processor speaks for all.
    for line in listing.read_text(errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            found = set(line.partition(":")[2].split())
            return [name for name in _FEATURES if name in found]
    return []


@hookimpl
def polysilicon_layouts(device: Device) -> Iterable[Layout]:
    """Plain tensors, on any device that has nothing better."""
    del device
    return [
        Layout(name="plain", role="linear_weight", dims=("N", "K")),
        Layout(name="plain.experts", role="expert_weight", dims=("E", "N", "K")),
        Layout(name="plain.embedding", role="embedding", dims=("V", "H")),
        Layout(name="plain.activation", role="activation", dims=("T", "H")),
        Layout(
            name="kv.blocks_tokens_heads",
            role="kv_block",
            dims=("blocks", "tokens", "heads", "head_size"),
            facts={"block_size": 16},
        ),
    ]


#: Ops whose portable kernel reads sizes from tensors, which the compiler can't trace.
_OPAQUE = (
    "experts",
    "causal_conv1d",
    "ssd",
    "selective_scan",
    "gated_delta_rule",
    "kv_store",
    "paged_attention",
    "latent_store",
    "latent_attention",
    "sampling",
    "quantized_linear",
    "quantized_grouped_linear",
    "moe_permute",
)


def _portable(op: str) -> Kernel:
    return Kernel(
        op=op,
        name=f"{op}.torch",
        target=f"polysilicon.ops.{op}:torch_kernel",
        form="opaque" if op in _OPAQUE else "traceable",
        fake=f"polysilicon.ops.{op}:{op}_fake" if op in _OPAQUE else None,
        supports=_SUPPORTS.get(op),
        note=_NOTES.get(op, ""),
    )


def _known_formats(problem: Problem) -> str | None:
    try:
        for key, read in (("format", parse), ("activation", activation)):
            if text := problem.fact(key):
                read(str(text))
    except RecordError as error:
        return str(error)
    return None


def _weight_only(problem: Problem) -> str | None:
    if given := problem.fact("activation"):
        return f"it multiplies activations as they are, not in {given}"
    return _known_formats(problem)


def _quantized_activations(problem: Problem) -> str | None:
    if not problem.fact("activation"):
        return "it multiplies quantised activations, and these are as they are"
    return _known_formats(problem)


_SUPPORTS = {
    "quantize": _known_formats,
    "dequantize": _known_formats,
    "rms_norm_quant": _known_formats,
    "silu_and_mul_quant": _known_formats,
    "quantized_linear": _weight_only,
    "quantized_grouped_linear": _weight_only,
}

#: What is worth knowing of a portable kernel.
_NOTES = {
    "quantized_linear": "the weight is made dense in each call",
    "quantized_grouped_linear": "weights of experts that have tokens are made dense in each call",
}


def _emulated(op: str) -> Kernel:
    return Kernel(
        op=op,
        name=f"{op}.torch_emulated",
        target=f"polysilicon.ops.{op}:torch_kernel",
        fake=f"polysilicon.ops.{op}:{op}_fake",
        form="opaque",
        supports=_quantized_activations,
        note="emulated: what the codes of both sides mean, multiplied in float32",
    )


def _int8() -> Kernel:
    return Kernel(
        op="quantized_linear",
        name="quantized_linear.torch_int8",
        target="polysilicon.ops.quantized_linear:torch_int8_kernel",
        fake="polysilicon.ops.quantized_linear:quantized_linear_fake",
        form="opaque",
        device="cpu",
        supports=_int8_only,
        rank=10,
        note="native: int8 by int8 with int32 sums",
    )


def _int8_only(problem: Problem) -> str | None:
    stored, given = problem.fact("format"), str(problem.fact("activation") or "")
    if not str(stored).startswith(("int8/tensor", "int8/channel")):
        return f"it multiplies int8 with a scale by tensor or channel, not {stored}"
    if not given.startswith(("int8/token", "int8/tensor")):
        return f"it multiplies int8 activations by token or tensor, not {given or 'dense ones'}"
    return _known_formats(problem)


def _w8a16() -> Kernel:
    return Kernel(
        op="quantized_linear",
        name="quantized_linear.torch_w8a16",
        target="polysilicon.ops.quantized_linear:torch_w8a16_kernel",
        fake="polysilicon.ops.quantized_linear:quantized_linear_fake",
        form="opaque",
        device="cpu:x86_64",
        dtypes=frozenset({"bfloat16"}),
        supports=_w8a16_only,
        rank=10,
        tokens=(1, 16),
        note="1 token 0.08 ms, made dense 0.57; 16 0.65, 3.4 (1536×576, one core, AVX2)",
    )


def _w8a16_only(problem: Problem) -> str | None:
    if reason := _weight_only(problem):
        return reason
    stored = str(problem.fact("format"))
    if stored not in ("int8/channel/bfloat16", "int8.compressed_tensors/channel/bfloat16"):
        return f"it multiplies int8 with a bfloat16 scale a row and no zero points, not {stored}"
    columns = problem.fact("in")
    if columns is None or int(columns) % 16:
        return f"it takes inputs in sixteens, not {columns}"
    return None


def _skinny(op: str) -> Kernel:
    return Kernel(
        op=op,
        name=f"{op}.torch_skinny",
        target=f"polysilicon.ops.{op}:torch_skinny_kernel",
        device="cpu:x86_64",
        dtypes=frozenset({"float32"}),
        rank=20,
        tokens=(1, 4),
        note="1 token 47 µs, F.linear 138 (960×576, 2 Zen 5 cores)",
    )


def _skinny_experts() -> Kernel:
    return Kernel(
        op="experts",
        name="experts.torch_skinny",
        target="polysilicon.ops.experts:torch_skinny_kernel",
        fake="polysilicon.ops.experts:experts_fake",
        form="opaque",
        device="cpu:x86_64",
        dtypes=frozenset({"float32"}),
        rank=20,
        note="8 tokens to 2 of 8 experts 9.7 ms, F.linear 19.1 (1024 to 1792, 2 Zen 3 cores)",
    )


def _onednn_skinny(op: str) -> Kernel:
    return Kernel(
        op=op,
        name=f"{op}.onednn_skinny",
        target=f"polysilicon.kernels.onednn.{op}:skinny_{op}",
        device="cpu:x86_64",
        dtypes=frozenset({"float32"}),
        supports=_without_onednn,
        rank=20,
        tokens=(5, 24),
        note="8 tokens 97 µs, F.linear 209 (960×576, 2 Zen 5 cores)",
    )


def _onednn(op: str) -> Kernel:
    return Kernel(
        op=op,
        name=f"{op}.onednn",
        target=f"polysilicon.kernels.onednn.{op}:{op}",
        device="cpu:x86_64",
        dtypes=frozenset({"float32"}),
        supports=_without_onednn,
        rank=10,
        note="512 tokens 9.3 ms, F.linear 18.2 (3072×576, one Zen 5 core)",
    )


def _without_onednn(problem: Problem) -> str | None:
    import torch

    del problem
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return None if available else "this PyTorch has no oneDNN"


#: Every portable kernel. A further form of an op is one more line.
KERNELS: tuple[Kernel, ...] = (
    *(_portable(op) for op in ops.NAMES),
    *(_skinny(op) for op in ("linear", "lm_head")),
    _skinny_experts(),
    *(_onednn(op) for op in ("linear", "lm_head")),
    *(_onednn_skinny(op) for op in ("linear", "lm_head")),
    *(_emulated(op) for op in ("quantized_linear", "quantized_grouped_linear")),
    _int8(),
    _w8a16(),
)


@hookimpl
def polysilicon_kernels(device: Device) -> Iterable[Kernel]:
    """The portable kernels; `Kernel.device` says where each of them serves."""
    return (*KERNELS, *compiled.kernels(device))
