"""Quantised weights and activations: exact packings, known words, and products bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from polysilicon import codes, formats, ops
from polysilicon.calling import load_kernel
from polysilicon.defaults import KERNELS
from polysilicon.encoding import encode
from polysilicon.ops import (
    dequantize,
    quantize,
    quantized_linear,
    rms_norm,
    rms_norm_quant,
    silu_and_mul,
    silu_and_mul_quant,
)
from polysilicon.ops.quantized_samples import WEIGHTS, weight_sample
from polysilicon.ops.verify import as_results, same_bits
from polysilicon.testing.facts import problem_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polysilicon.records import Kernel

CPU = torch.device("cpu")
PACKED = [name for name, code in formats.CODES.items() if code.dtype in ("int32", "uint8")]
NAMES = [name for name, *_ in WEIGHTS]
QUANTIZED = [kernel.name for kernel in KERNELS if "quant" in kernel.op]


def _random(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    limits = torch.iinfo(dtype)
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max + 1, shape, generator=rng).to(dtype)


def _format(name: str) -> str:
    return f"{name}/group:32"


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(PACKED),
    rows=st.integers(1, 4),
    columns=st.integers(1, 3),
    experts=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 99),
)
def test_packing_what_was_unpacked_gives_the_same_bytes(
    name: str, rows: int, columns: int, experts: tuple[int, ...], seed: int
) -> None:
    stored = formats.parse(_format(name))
    n, k = 8 * rows, 32 * columns
    (shape, *_) = formats.shapes(stored, n, k)["weight"]
    words = _random(getattr(torch, stored.dtype), seed, *experts, *shape)
    numbers = codes.unpack_weight(stored, words, k)
    assert numbers.shape == (*experts, n, k)
    assert torch.equal(codes.pack_weight(stored, numbers), words)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from([name for name in PACKED if name != "mxfp4"]),
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_zero_points_packed_again_are_the_same_bytes(
    name: str, rows: int, groups: int, seed: int
) -> None:
    zeros = "/float16/zeros" if "compressed" in name else ""
    stored = formats.parse(_format(name) + zeros)
    (shape,) = formats.shapes(stored, 8 * rows, 32 * groups)["zeros"]
    words = _random(torch.int32, seed, *shape)
    numbers = codes.unpack_zeros(stored, words, 8 * rows)
    assert numbers.shape == (8 * rows, groups)
    assert torch.equal(codes.pack_zeros(stored, numbers), words)


@settings(max_examples=20, deadline=None)
@given(columns=st.integers(1, 40), bits=st.sampled_from([4, 8]), seed=st.integers(0, 99))
def test_codes_that_fill_no_word_come_back(columns: int, bits: int, seed: int) -> None:
    numbers = _random(torch.uint8, seed, 3, columns) & ((1 << bits) - 1)
    words = codes.pack_words(numbers, bits)
    assert torch.equal(codes.unpack_words(words, bits)[:, :columns], numbers)


def _word(text: int) -> int:
    return text - (1 << 32) if text >> 31 else text


@pytest.mark.parametrize(
    ("format", "word", "zeros", "first"),
    [
        # A word by hand: which weight its lowest, second … four bits are, less the zero point.
        ("int4.gptq/group:32", 0x76543210, 0x22222222, [-3, -2, -1, 0, 1, 2, 3, 4]),
        ("int4.gptq/group:32", 0xFEDCBA98, 0xFFFFFFFF, [-8, -7, -6, -5, -4, -3, -2, -1]),
        ("int4.gptq_v2/group:32", 0x76543210, 0x33333333, [-3, -2, -1, 0, 1, 2, 3, 4]),
        ("int4.awq/group:32", 0x75316420, 0x33333333, [-3, -2, -1, 0, 1, 2, 3, 4]),
        ("int4.compressed_tensors/group:32", 0x76543210, None, [-8, -7, -6, -5, -4, -3, -2, -1]),
        ("int8.gptq/group:32", 0x03020100, 0x02020202, [-3, -2, -1, 0]),
    ],
)
def test_a_word_by_hand_means_these_weights(
    format: str, word: int, zeros: int | None, first: list[int]
) -> None:
    stored = formats.parse(format)
    shapes = formats.shapes(stored, 8, 32)
    weight = torch.full(shapes["weight"][0], _word(word), dtype=torch.int32)
    offsets = None
    if zeros is not None:
        offsets = torch.full(shapes["zeros"][0], _word(zeros), dtype=torch.int32)
    scale = torch.full(shapes["scale"][0], 0.5, dtype=torch.float16)
    dense = codes.decode(stored, weight, scale, offsets, None, 32)
    along_rows = dense[:, 0] if "awq" in format else dense[0]
    assert (2 * along_rows[: len(first)]).tolist() == first


def test_every_code_and_scale_of_mxfp4_is_what_the_specification_says() -> None:
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    by_code = torch.tensor(numbers + [-x for x in numbers], dtype=torch.float64)
    octets = torch.arange(256, dtype=torch.uint8).reshape(16, 16).expand(256, 16, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    dense = codes.decode(formats.MXFP4, octets, scale, None, None, 512)
    low_first = torch.stack((by_code.repeat(16), by_code.repeat_interleave(16)), -1).reshape(-1)
    wanted = low_first * 2.0 ** (torch.arange(256, dtype=torch.float64)[:, None] - 127)
    assert torch.equal(dense[:255], wanted[:255].float())
    assert dense[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_every_code_of_fp8_is_what_torch_says(dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(dtype)[None]
    name = str(dtype).replace("torch.float8", "fp8")
    dense = codes.decode(formats.parse(f"{name}/tensor"), every, torch.ones(()), None, None, 256)
    assert torch.equal(dense.nan_to_num(7e7), every.float().nan_to_num(7e7))


@pytest.mark.parametrize(("name", "format", "shape", "act_order"), WEIGHTS, ids=NAMES)
def test_dense_weight_has_the_references_bits_also_made_in_pieces(
    name: str,
    format: str,
    shape: tuple[int, ...],
    act_order: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = weight_sample(format, shape, CPU, act_order=act_order)
    arguments = {**given, "in_features": shape[-1], "dtype": torch.float32}
    wanted = dequantize.reference(**arguments)
    assert torch.equal(dequantize.torch_kernel(**arguments).double(), wanted)
    monkeypatch.setattr(codes, "_CACHED", 1)
    stored = formats.parse(given.pop("format"))
    pieces = codes.decode_to(torch.float32, stored, *given.values(), shape[-1])
    assert torch.equal(pieces.double(), wanted)


@pytest.mark.parametrize(("name", "format", "shape", "act_order"), WEIGHTS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_only_product_is_that_of_the_dense_weight_bit_for_bit(
    name: str, format: str, shape: tuple[int, ...], act_order: bool, dtype: torch.dtype
) -> None:
    given = weight_sample(format, shape, CPU, act_order=act_order)
    dense = dequantize.torch_kernel(**given, in_features=shape[-1], dtype=dtype)
    bias = torch.randn(shape[0]).to(dtype)
    for tokens in (1, 5, 33):
        x = torch.randn(tokens, shape[-1]).to(dtype)
        y = quantized_linear.torch_kernel(
            x, *list(given.values())[:4], bias, None, given["format"], ""
        )
        assert torch.equal(y, F.linear(x, dense, bias))


@pytest.mark.parametrize(
    ("format", "step"),
    [
        # The distance of two codes, over what a scale reaches: rounding costs half of it.
        ("fp8_e4m3fn/channel", 2.0**-4),
        ("fp8_e4m3fn/block:128x128", 2.0**-4),
        ("int8/channel", 1 / 127),
        ("int4.gptq/group:32", 1 / 7),
        ("int4.awq/group:32", 1 / 7),
        ("int4.compressed_tensors/group:32/float32", 1 / 7),
        ("mxfp4/group:32", 1 / 4),
    ],
)
def test_encoding_is_off_by_no_more_than_a_step(format: str, step: float) -> None:
    dense = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    stored = formats.parse(format)
    tensors = encode(stored, dense)
    back = codes.decode(stored, tensors["weight"], tensors["scale"], tensors.get("zeros"), None, 96)
    assert float((back - dense).abs().max()) <= step * float(dense.abs().max())


@pytest.mark.parametrize(
    ("format", "shape", "message"),
    [
        ("int4.gptq/group:32", (8, 40), "not a multiple of the group 32"),
        ("int4.awq/group:32", (12, 32), "to be a multiple of 8"),
    ],
)
def test_weight_that_a_format_cannot_store_is_refused(
    format: str, shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        encode(formats.parse(format), torch.zeros(shape))


# --- activations -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [*quantize.FORMATS, "fp8_e4m3fnuz/token/float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_the_definitions_bit_for_bit(format: str, dtype: torch.dtype) -> None:
    # Codes' middles among them: 17 and 19 lie between 16, 18 and 20, which e4m3 has.
    ties = torch.tensor([448.0, 17.0, 19.0, -17.0, 0.0009765625, 1e-12, 0.0, 127.0, 126.5])
    x = torch.cat((ties, torch.randn(247) * 30)).to(dtype).reshape(2, 128)
    q, scale = quantize.torch_kernel(x, None, format)
    wanted_q, wanted_scale = quantize.reference(x, None, format)
    assert torch.equal(q.double(), wanted_q)
    assert torch.equal(scale.double(), wanted_scale)


@pytest.mark.parametrize("format", quantize.FORMATS)
def test_fused_ops_are_the_op_and_then_quantize(format: str) -> None:
    x, weight = torch.randn(5, 256).bfloat16(), torch.randn(256).bfloat16()
    normed = quantize.torch_kernel(rms_norm.torch_kernel(x, weight, 1e-6, 1.0), None, format)
    gated = quantize.torch_kernel(silu_and_mul.torch_kernel(x), None, format)
    for fused, apart in (
        (rms_norm_quant.torch_kernel(x, weight, 1e-6, 1.0, format), normed),
        (silu_and_mul_quant.torch_kernel(x, format), gated),
    ):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(fused, apart, strict=True))


def test_static_scale_clamps_what_it_does_not_reach() -> None:
    q, scale = quantize.torch_kernel(
        torch.tensor([[1.0, -9e9, float("inf")]]), torch.tensor([0.5]), "fp8_e4m3fn/tensor"
    )
    assert q.float().tolist() == [[2.0, -448.0, 448.0]]
    assert scale.shape == ()


def test_nan_is_not_lost() -> None:
    q, _ = quantize.torch_kernel(torch.tensor([[1.0, float("nan")]]), None, "fp8_e4m3fn/token")
    assert q.float().isnan().all()


def test_int8_products_are_exact_before_the_scales() -> None:
    width = 4099  # sums beyond what float32 counts exactly
    signs = torch.where(torch.arange(width) % 97 == 0, -127, 127).to(torch.int8)
    x, one = signs[None].float() / 127, torch.ones(())
    arguments = (None, None, None, None, "int8/tensor/float32", "int8/token/float32")
    y = quantized_linear.torch_int8_kernel(x, signs[None], one, *arguments)
    (scale,) = quantize.torch_kernel(x, None, "int8/token")[1]
    assert torch.equal(y[0], torch.tensor(width * 127 * 127).float() * scale)


# --- compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTIZED)
def test_kernel_compiles_without_a_break(name: str) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    call, arguments = load_kernel(kernel), _arguments(kernel)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = zip(as_results(compiled(**arguments)), as_results(call(**arguments)), strict=True)
    assert all(same_bits(one, other) for one, other in pairs)


def _arguments(kernel: Kernel) -> Mapping[str, Any]:
    """The first call with tokens that a kernel serves."""
    op, dtype = ops.get(kernel.op), next(iter(kernel.dtypes), "float32")
    assert kernel.supports is not None
    return next(
        sample.kwargs
        for sample in op.samples(getattr(torch, dtype), CPU)
        if tokens_of(op, sample) and kernel.supports(problem_of(op, sample, dtype)) is None
    )


def test_norm_and_quantize_fuse_under_inductor() -> None:
    x, weight = torch.randn(3, 256), torch.randn(256)
    arguments = (x, weight, 1e-6, 0.0, "fp8_e4m3fn/group:128")
    q, scale = torch.compile(rms_norm_quant.torch_kernel, fullgraph=True)(*arguments)
    wanted_q, wanted_scale = rms_norm_quant.torch_kernel(*arguments)
    torch.testing.assert_close(scale, wanted_scale)
    assert float((q.float() != wanted_q.float()).float().mean()) < 0.02
