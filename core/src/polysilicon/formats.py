"""The formats of quantised weights and activations: named, read from text, and what they store.

A format is data (`polysilicon.api.Format`); its text is what ops take and problems state:

    code[.packing]/granularity[/scale dtype][/zeros]
    fp8_e4m3fn/block:128x128/float32     int4.gptq/group:128/float16/zeros     mxfp4/group:32/…

| code | stored as | a weight [N, K] is |
| --- | --- | --- |
| `fp8_e4m3fn`, `fp8_e4m3fnuz` | float8 [N, K] | q · s |
| `int8` | int8 [N, K] | q · s |
| `int4.gptq`, `int8.gptq` | int32 [K/p, N]; zeros [G, N/p] stored minus one | (q - z) · s |
| `int4.gptq_v2`, `int8.gptq_v2` | the same; zeros stored as they are | (q - z) · s |
| `int4.awq` | int32 [K, N/8] in the order 0 2 4 6 1 3 5 7; zeros [G, N/8] | (q - z) · s |
| `int4.compressed_tensors`, `int8.…` | int32 [N, K/p]; zeros [N/p, G] or none | (q - z) · s |
| `mxfp4` | uint8 [N, K/32, 16], low half first; scales [N, K/32] | e2m1(q) · 2^(s - 127) |

p is the number of codes a word, the lowest bits first; without zeros z is 2^(bits - 1). q, z and s
are taken to float32; q - z and its product with s are float32 operations. Scales lie as [], [N, 1],
[N, G] or [N/r, K/c] (GPTQ, AWQ: [G, N]); experts put a dim E in front of everything.
Importing this module imports no torch; `polysilicon.codes` reads and writes the numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polysilicon.errors import RecordError
from polysilicon.records import Format

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Code:
    """One way to store numbers.

    Attributes:
        dtype: storage dtype.
        bits: of one code.
        scale_dtype: of the scales where a text names none.
        granularities: kinds of granularity with which it exists.
        zeros: whether zero points are stored: `never`, `always`, `maybe`.
        names: argument of the ops → names of the checkpoint's tensors, the usual first.
    """

    dtype: str
    bits: int
    scale_dtype: str
    granularities: tuple[str, ...]
    zeros: str
    names: Mapping[str, tuple[str, ...]]


_PLAIN_NAMES = {
    "weight": ("weight",),
    "scale": ("weight_scale", "weight_scale_inv"),
    "input_scale": ("input_scale", "activation_scale"),
}
_GPTQ_NAMES = {
    "weight": ("qweight",),
    "scale": ("scales",),
    "zeros": ("qzeros",),
    "g_idx": ("g_idx",),
}
_PACKED_NAMES = {
    "weight": ("weight_packed",),
    "scale": ("weight_scale",),
    "zeros": ("weight_zero_point",),
    "g_idx": ("weight_g_idx",),
    "shape": ("weight_shape",),
    "input_scale": ("input_scale",),
}
_MX_NAMES = {"weight": ("weight_blocks", "blocks"), "scale": ("weight_scales", "scales")}
_ANY = ("tensor", "channel", "token", "group", "block")


def _plain(dtype: str) -> Code:
    return Code(
        dtype=dtype,
        bits=8,
        scale_dtype="float32",
        granularities=_ANY,
        zeros="never",
        names=_PLAIN_NAMES,
    )


def _words(bits: int, zeros: str, names: Mapping[str, tuple[str, ...]]) -> Code:
    return Code(
        dtype="int32",
        bits=bits,
        scale_dtype="float16",
        granularities=("channel", "group"),
        zeros=zeros,
        names=names,
    )


#: `code` or `code.packing` → what it stores.
CODES: dict[str, Code] = {
    "fp8_e4m3fn": _plain("float8_e4m3fn"),
    "fp8_e4m3fnuz": _plain("float8_e4m3fnuz"),
    "int8": _plain("int8"),
    "int4.gptq": _words(4, "always", _GPTQ_NAMES),
    "int4.gptq_v2": _words(4, "always", _GPTQ_NAMES),
    "int8.gptq": _words(8, "always", _GPTQ_NAMES),
    "int8.gptq_v2": _words(8, "always", _GPTQ_NAMES),
    "int4.awq": _words(4, "always", {k: v for k, v in _GPTQ_NAMES.items() if k != "g_idx"}),
    "int4.compressed_tensors": _words(4, "maybe", _PACKED_NAMES),
    "int8.compressed_tensors": _words(8, "maybe", _PACKED_NAMES),
    "mxfp4": Code(
        dtype="uint8",
        bits=4,
        scale_dtype="float8_e8m0fnu",
        granularities=("group",),
        zeros="never",
        names=_MX_NAMES,
    ),
}

_GRANULARITY = re.compile(r"^(tensor|channel|token|group:[1-9]\d*|block:[1-9]\d*x[1-9]\d*)$")
_AMBIGUOUS = {
    "fp8": ("fp8_e4m3fn", "fp8_e4m3fnuz"),
    "int4": tuple(name for name in CODES if name.startswith("int4")),
}


def parse(text: str) -> Format:
    """The format of a text, e.g. `int4.awq/group:128`; what is left out has its usual value.

    Raises:
        RecordError: no such code (`fp8` alone could be two), granularity, or combination.
    """
    name, *rest = text.split("/")
    if name in _AMBIGUOUS:
        raise RecordError(
            f"format {text!r} is ambiguous: write one of {', '.join(_AMBIGUOUS[name])}"
        )
    if name not in CODES:
        raise RecordError(f"format {text!r} has code {name!r}: one of {', '.join(CODES)}")
    code = CODES[name]
    zeros = bool(rest) and rest[-1] == "zeros"
    rest = rest[:-1] if zeros else rest
    if not 1 <= len(rest) <= 2:
        raise RecordError(
            f"format {text!r}: expected code/granularity[/scale dtype][/zeros], e.g. "
            f"{name}/{code.granularities[-1]}{_SIZES.get(code.granularities[-1], '')}"
        )
    logical, _, packing = name.partition(".")
    return checked(
        Format(
            dtype=code.dtype,
            logical=logical,
            packing=packing,
            granularity=rest[0],
            scale_dtype=rest[1] if len(rest) == 2 else code.scale_dtype,
            zero_points=zeros or code.zeros == "always",
        )
    )


_SIZES = {"group": ":128", "block": ":128x128"}


def checked(stored: Format) -> Format:
    """The same format, if it is one that the ops know.

    Raises:
        RecordError: what about it is not known.
    """
    code = code_of(stored)
    given = stored.granularity or ""
    if not _GRANULARITY.match(given) or given.partition(":")[0] not in code.granularities:
        raise RecordError(
            f"format {stored} has granularity {given!r}: expected one of "
            + ", ".join(kind + _SIZES.get(kind, "") for kind in code.granularities)
        )
    if stored.dtype != code.dtype:
        raise RecordError(f"format {stored} is stored as {code.dtype}, not {stored.dtype}")
    scales = _SCALES
    if stored.logical == "mxfp4":
        scales = (_POWERS,)
    elif given.startswith("block"):
        scales = (*_SCALES, _POWERS)
    if stored.scale_dtype not in scales:
        raise RecordError(
            f"format {stored} has scales of {stored.scale_dtype}: expected {', '.join(scales)}"
        )
    if stored.logical == "mxfp4" and given != "group:32":
        raise RecordError(f"format {stored} has granularity {given!r}: mxfp4 has group:32 only")
    if stored.zero_points != (code.zeros == "always") and code.zeros != "maybe":
        raise RecordError(f"format {stored}: {_name(stored)} {code.zeros} stores zero points")
    return stored


_SCALES: tuple[str, ...] = ("float32", "float16", "bfloat16")
#: Exponents alone: of MXFP4, and of fp8 in blocks (`scale_fmt: ue8m0`).
_POWERS = "float8_e8m0fnu"


def _name(stored: Format) -> str:
    return f"{stored.logical}.{stored.packing}" if stored.packing else stored.logical


def code_of(stored: Format) -> Code:
    """What the code of a format stores.

    Raises:
        RecordError: the ops know no such code.
    """
    name = _name(stored)
    if name not in CODES:
        raise RecordError(f"format {stored} has code {name!r}: one of {', '.join(CODES)}")
    return CODES[name]


def block_of(stored: Format) -> tuple[int, int]:
    """(rows, columns) of a weight that share a scale; 0 means all of them."""
    kind, _, size = (stored.granularity or "tensor").partition(":")
    if kind == "block":
        rows, _, columns = size.partition("x")
        return int(rows), int(columns)
    return (0, 0) if kind == "tensor" else (1, int(size or 0))


def activation(text: str) -> Format:
    """The format in which an activation is multiplied, e.g. `int8/token`, `fp8_e4m3fn/group:128`.

    `tensor` takes one static scale from the checkpoint; the others find their scales in each call.

    Raises:
        RecordError: it is no format of activations.
    """
    stored = parse(text)
    kind = block_of(stored)
    good = stored.granularity in ("tensor", "token") or str(stored.granularity).startswith("group")
    if stored.packing or stored.logical == "mxfp4" or kind[0] > 1 or not good:
        raise RecordError(
            f"format {stored} is no format of activations: expected fp8_e4m3fn, fp8_e4m3fnuz or "
            "int8 with tensor, token or group:N"
        )
    if stored.scale_dtype != "float32":
        raise RecordError(f"format {stored}: scales of activations are float32")
    return stored


FP8_TENSOR = parse("fp8_e4m3fn/tensor")
FP8_CHANNEL = parse("fp8_e4m3fn/channel")
FP8_BLOCK = parse("fp8_e4m3fn/block:128x128")
FP8_TOKEN = activation("fp8_e4m3fn/token")
FP8_GROUP = activation("fp8_e4m3fn/group:128")
INT8_CHANNEL = parse("int8/channel")
INT8_TOKEN = activation("int8/token")
GPTQ = parse("int4.gptq/group:128")
GPTQ_V2 = parse("int4.gptq_v2/group:128")
AWQ = parse("int4.awq/group:128")
COMPRESSED_TENSORS = parse("int4.compressed_tensors/group:128/bfloat16")
MXFP4 = parse("mxfp4/group:32")


def shapes(stored: Format, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Argument → the shapes that its tensor may have for a weight [rows, columns], usual first."""
    per_word = 32 // code_of(stored).bits
    high, wide = block_of(stored)
    groups = -(-columns // wide) if wide else 1
    words, order = -(-columns // per_word), {"g_idx": ((columns,), (0,)), "shape": ((2,),)}
    if stored.packing == "awq":
        return {
            "weight": ((columns, rows // 8),),
            "scale": ((groups, rows),),
            "zeros": ((groups, rows // 8),),
        }
    if stored.packing.startswith("gptq"):
        return order | {
            "weight": ((columns // per_word, rows),),
            "scale": ((groups, rows),),
            "zeros": ((groups, rows // per_word),),
        }
    if stored.packing:
        zeros = (-(-rows // per_word), groups)
        scale = ((rows, groups),) + (((rows,),) if groups == 1 else ())
        return order | {"weight": ((rows, words),), "scale": scale, "zeros": (zeros,)}
    if stored.logical == "mxfp4":
        return {"weight": ((rows, columns // 32, 16),), "scale": ((rows, columns // 32),)}
    scales: dict[str, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (1,), (1, 1)),
        "channel": ((rows, 1), (rows,)),
        "token": ((rows, 1), (rows,)),
    }
    blocks = ((-(-rows // (high or rows)), groups),)
    return {
        "weight": ((rows, columns),),
        "scale": scales.get(str(stored.granularity), blocks),
        "input_scale": ((), (1,)),
    }
