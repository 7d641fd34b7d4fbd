"""Formats: one text each, and what is ambiguous or unknown is refused with what there is."""

from __future__ import annotations

from typing import Any

import pytest

from polysilicon import formats
from polysilicon.api import Format, Problem
from polysilicon.defaults import KERNELS
from polysilicon.errors import RecordError
from polysilicon.explaining import explain


@pytest.mark.parametrize(
    ("short", "canonical"),
    [
        ("fp8_e4m3fn/tensor", "fp8_e4m3fn/tensor/float32"),
        ("fp8_e4m3fn/block:128x128", "fp8_e4m3fn/block:128x128/float32"),
        ("fp8_e4m3fnuz/channel", "fp8_e4m3fnuz/channel/float32"),
        ("fp8_e4m3fn/block:128x128/float8_e8m0fnu",) * 2,
        ("int8/channel/bfloat16", "int8/channel/bfloat16"),
        ("int4.gptq/group:128", "int4.gptq/group:128/float16/zeros"),
        ("int8.gptq_v2/channel", "int8.gptq_v2/channel/float16/zeros"),
        ("int4.awq/group:64", "int4.awq/group:64/float16/zeros"),
        ("int4.compressed_tensors/group:32", "int4.compressed_tensors/group:32/float16"),
        (
            "int4.compressed_tensors/group:32/bfloat16/zeros",
            "int4.compressed_tensors/group:32/bfloat16/zeros",
        ),
        ("mxfp4/group:32", "mxfp4/group:32/float8_e8m0fnu"),
    ],
)
def test_text_has_one_canonical_form_that_reads_back(short: str, canonical: str) -> None:
    assert str(formats.parse(short)) == canonical
    assert formats.parse(canonical) == formats.parse(short)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8/tensor", "ambiguous: write one of fp8_e4m3fn, fp8_e4m3fnuz"),
        ("fp8", "ambiguous: write one of fp8_e4m3fn, fp8_e4m3fnuz"),
        ("int4/group:128", "ambiguous: write one of int4.gptq, int4.gptq_v2, int4.awq"),
        ("nf4/group:64", "has code 'nf4': one of fp8_e4m3fn"),
        ("int8", "expected code/granularity"),
        ("int8/rows", "has granularity 'rows': expected one of tensor, channel"),
        ("int8/group:0", "has granularity 'group:0'"),
        ("int4.awq/block:8x8", "expected one of channel, group:128"),
        ("int8/channel/float8_e8m0fnu", "expected float32, float16, bfloat16"),
        ("int8/channel/float32/zeros", "int8 never stores zero points"),
        ("mxfp4/group:16", "mxfp4 has group:32 only"),
    ],
)
def test_text_that_names_no_one_format_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        formats.parse(text)


@pytest.mark.parametrize("text", ["int4.awq/group:128", "mxfp4/group:32", "int8/channel", "fp8"])
def test_what_is_no_format_of_activations_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"is no format of activations|ambiguous"):
        formats.activation(text)


def test_record_with_another_storage_dtype_is_refused() -> None:
    stored = Format(dtype="int8", logical="fp8_e4m3fn", scale_dtype="float32", granularity="tensor")
    with pytest.raises(RecordError, match="is stored as float8_e4m3fn, not int8"):
        formats.checked(stored)


@pytest.mark.parametrize(
    ("format", "activation", "kernel", "note"),
    [
        ("int4.awq/group:128", "", "torch", "made dense in each call"),
        ("int8/channel", "int8/token", "torch_int8", "native"),
        ("int8.compressed_tensors/channel", "", "torch", "made dense in each call"),
        ("fp8_e4m3fn/channel", "fp8_e4m3fn/token", "torch_emulated", "emulated"),
        ("mxfp4/group:32", "fp8_e4m3fn/group:32", "torch_emulated", "emulated"),
    ],
)
def test_explain_says_what_is_native_and_what_emulated(
    format: str, activation: str, kernel: str, note: str
) -> None:
    facts = {"format": format, "activation": activation}
    found = explain("quantized_linear", device="cpu", facts=facts)
    (chosen,) = [one for one in found.candidates if one.chosen]
    assert chosen.provided.record.name == f"quantized_linear.{kernel}"
    assert note in chosen.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "int8/channel/float32"}, "a bfloat16 scale a row and no zero points"),
        ({"format": "int8.compressed_tensors/channel/bfloat16/zeros"}, "no zero points, not"),
        ({"in": 24}, "takes inputs in sixteens, not 24"),
        ({"activation": "int8/token"}, "multiplies activations as they are"),
    ],
)
def test_w8a16_is_refused_where_it_would_be_wrong(changes: dict[str, Any], reason: str) -> None:
    facts = {"format": "int8/channel/bfloat16", "activation": "", "in": 32, "out": 8, **changes}
    problem = Problem(op="quantized_linear", dtype="bfloat16", facts=facts)
    (kernel,) = (one for one in KERNELS if one.name == "quantized_linear.torch_w8a16")
    assert kernel.supports is not None
    assert reason in str(kernel.supports(problem))


def test_explain_says_why_a_format_is_refused() -> None:
    facts = {"format": "fp8/tensor", "activation": ""}
    found = explain("quantized_linear", device="cpu", facts=facts)
    assert not any(one.chosen for one in found.candidates)
    assert any("write one of fp8_e4m3fn, fp8_e4m3fnuz" in one.reason for one in found.candidates)
