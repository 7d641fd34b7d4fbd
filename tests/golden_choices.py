"""What Polysilicon makes of a chip that is not here: its device record, layouts and kernels.

`python tests/golden_choices.py --update` writes tests/golden/<chip>.json anew, in an environment
with core and all plugins (`nox -s golden`). A difference is a decision:
somebody's change moved what a chip runs, and the diff shows which chips.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from polysilicon.api import Layout, Problem
from polysilicon.devices import as_dict, find
from polysilicon.explaining import explain, span_text
from polysilicon.selection import current_table

FOLDER = Path(__file__).parent / "golden"

#: As POLYSILICON_DEVICE names them.
CHIPS = (
    *(f"nvidia:{chip}" for chip in ("a100", "l40s", "h100", "h200", "b200", "rtx5090")),
    *(f"amd:{chip}" for chip in ("mi300x", "mi355x", "rx7900xtx", "strixhalo", "rx9070xt")),
    *("spyre", "tpu:v5e", "tpu:v6e", "tpu:v7x", "cpu"),
)

_NORM = {"hidden": 4096, "eps": 1e-5, "offset": 0.0, "weight": True}
_HEADS = {"heads": 32, "kv_heads": 8, "head_size": 128, "v_head_size": 128}
_ATTENTION = {**_HEADS, "window": 0, "softcap": 0.0, "sinks": False, "causal": True}
_CACHE = {"kv_heads": 8, "head_size": 128, "v_head_size": 128, "block_size": 16}

#: The shapes of Llama-3-8B and of Qwen3-30B-A3B's experts, and what differs in other models: a
#: small head, a window, an odd size.
#: Each is asked for all token counts, so that decode and prefill show as ranges of tokens.
PROBLEMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rms_norm", _NORM),
    ("rms_norm", {**_NORM, "hidden": 1152, "eps": 1e-6, "offset": 1.0}),
    ("add_rms_norm", _NORM),
    ("layer_norm", {"hidden": 4096}),
    ("rotary_embedding", {"head_size": 128, "rotary": 128, "interleaved": False}),
    ("silu_and_mul", {"width": 14336}),
    ("gelu_and_mul", {"width": 6912}),
    ("linear", {"in": 4096, "out": 6144, "bias": False}),
    ("linear", {"in": 4096, "out": 28672, "bias": False}),
    ("linear", {"in": 576, "out": 1537, "bias": True}),
    ("embedding", {"vocabulary": 128256, "hidden": 4096}),
    ("lm_head", {"vocabulary": 128256, "hidden": 4096}),
    ("moe_router", {"experts": 128, "top_k": 8, "scoring": "softmax"}),
    ("experts", {"experts": 128, "top_k": 8, "hidden": 2048, "width": 768}),
    ("kv_store", _CACHE),
    ("paged_attention", {**_ATTENTION, "block_size": 16}),
    ("paged_attention", {**_ATTENTION, "head_size": 64, "v_head_size": 64, "block_size": 16}),
    ("paged_attention", {**_ATTENTION, "head_size": 256, "v_head_size": 256, "block_size": 16}),
    ("paged_attention", {**_ATTENTION, "window": 4096, "block_size": 16}),
    ("attention", _ATTENTION),
    ("latent_store", {"rank": 512, "rope": 64, "block_size": 16}),
    ("latent_attention", {"heads": 16, "rank": 512, "rope": 64, "block_size": 16}),
    ("rms_norm_quant", {**_NORM, "format": "fp8_e4m3fn/group:128/float32"}),
    ("rms_norm_quant", {**_NORM, "format": "int8/token/float32"}),
    ("silu_and_mul_quant", {"width": 14336, "format": "fp8_e4m3fn/group:128/float32"}),
    ("gated_delta_rule", {"key_heads": 16, "value_heads": 32, "head_size": 128}),
    ("sampling", {}),
)
DTYPES = ("bfloat16", "float16", "float32")


def file_of(chip: str) -> Path:
    """The golden file of a chip."""
    return FOLDER / f"{chip.replace(':', '-')}.json"


def describe(chip: str) -> dict[str, Any]:
    """Everything that a change must not move unseen, for one chip, as JSON data."""
    device = find(chip)
    record = as_dict(device)
    if chip == "cpu":
        # Of whatever machine this is: its memory, cores and instruction sets.
        del record["memory_bytes"], record["facts"]
    layouts = [provided.record for provided in current_table().layouts[device.name]]
    return {
        "device": record
        | {
            "compile_default": device.compile_default,
            "compile_backend": device.compile_backend,
            "token_buckets": list(device.token_buckets),
            "graph_capture": device.graph_capture,
            "activate": device.activate,
        },
        # The first of a role is the device's default.
        "layouts": {
            role: [_layout_text(one) for one in layouts if one.role == role]
            for role in sorted({one.role for one in layouts})
        },
        "kernels": {
            f"{op} {dtype}{''.join(f' {key}={value}' for key, value in facts.items())}": _chosen(
                Problem(op=op, dtype=dtype, facts=facts), chip
            )
            for op, facts in PROBLEMS
            for dtype in DTYPES
        },
    }


def _layout_text(layout: Layout) -> str:
    facts = "".join(f" {key}={value}" for key, value in layout.facts.items())
    return f"{layout.name} [{', '.join(layout.dims)}]{facts}"


def _chosen(problem: Problem, chip: str) -> str:
    """The kernel and the layouts in which it takes arguments; each with its token counts."""
    spans = [
        (span, candidate.provided.record)
        for candidate in explain(problem, device=chip).candidates
        for span in candidate.chosen
    ]
    return "; ".join(
        f"{span_text(span)} tokens: {kernel.name}"
        + "".join(f", {name} in {layout}" for name, layout in sorted(kernel.layouts.items()))
        for span, kernel in sorted(spans, key=lambda entry: entry[0])
    )


def text_of(described: dict[str, Any]) -> str:
    """The data as the golden files hold it: a line a kernel, so that a diff reads as one."""
    return json.dumps(described, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Writes what the installed plugins choose."""
    if sys.argv[1:] != ["--update"]:
        raise SystemExit(f"usage: {Path(__file__).name} --update")
    FOLDER.mkdir(exist_ok=True)
    for chip in CHIPS:
        file_of(chip).write_text(text_of(describe(chip)), encoding="utf-8")
        print(f"wrote {file_of(chip)}")


if __name__ == "__main__":
    main()
