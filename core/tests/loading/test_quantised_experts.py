"""Quantised checkpoints of mixtures: experts are stacked as they are, and give their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import quantised_checkpoints as checkpoints
import torch
from loading_models import logits, tiny_model
from test_load_folder import edit_config
from test_quantised_checkpoints import CASES, Case

import polysilicon
from polysilicon.engine import Engine, SamplingParams
from polysilicon.errors import LoadError
from polysilicon.layers import QuantizedExperts
from polysilicon.layers.quantized_weight import unrounded
from polysilicon.loading import load
from polysilicon.ops.verify import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXPERTS = 4
QWEN = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "head_dim": 32,
}
GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}


@dataclass(frozen=True)
class Mixture:
    """One kind of checkpoint: the model, and the case that writes one expert's weight."""

    case: Case | None
    model_type: str = "qwen3_moe"


MIXTURES = {
    "gpt_oss": Mixture(None, "gpt_oss"),
    "mixtral gptq": Mixture(CASES["gptq group 64"], "mixtral"),
    **{
        f"qwen3_moe {name}": Mixture(CASES[name])
        for name in (
            "gptq",
            "gptq_v2",
            "awq",
            "W4A16 zeros",
            "W8A16",
            "W8A8",
            "float-quantized",
            "fp8 blocks",
            "fp8 tensor",
            "fp8 channel",
        )
    },
}


def _written(folder: Path, mixture: Mixture) -> tuple[Any, dict[str, torch.Tensor]]:
    if mixture.case is None:
        model = tiny_model("gpt_oss", **GPT_OSS)
        return model, checkpoints.write_gpt_oss(folder, model)
    case = mixture.case
    if mixture.model_type == "qwen3_moe":
        model = tiny_model("qwen3_moe", **QWEN)
        state = checkpoints.write_mixture(
            folder, model, case.config, case.encode, inputs=case.inputs
        )
        return model, state
    model = tiny_model("mixtral", **MIXTRAL)
    state = checkpoints.write_mixture(
        folder,
        model,
        case.config,
        case.encode,
        names=("w1", "w3", "w2"),
        renamed=(".mlp.", ".block_sparse_moe."),
    )
    return model, state


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_gives_the_dequantised_models_logits(name: str, tmp_path: Path) -> None:
    reference, _ = _written(tmp_path, MIXTURES[name])
    model: Any = load(tmp_path).model
    ours = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    assert len(ours) == 2
    wanted, found = logits(reference), logits(model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_experts_multiply_their_inputs_as_they_are_while_others_are_proved(tmp_path: Path) -> None:
    mixture = MIXTURES["qwen3_moe W8A8"]
    _written(tmp_path / "rounded", mixture)
    model: Any = load(tmp_path / "rounded").model
    plain = tiny_model("qwen3_moe", **QWEN)
    assert mixture.case is not None
    checkpoints.write_mixture(tmp_path / "plain", plain, mixture.case.config, mixture.case.encode)
    rounded = logits(model)
    with unrounded(model):
        torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    assert torch.equal(logits(model), rounded)
    assert not torch.equal(logits(plain), rounded)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_engine_gives_the_dequantised_mixtures_greedy_tokens(name: str, tmp_path: Path) -> None:
    reference, _ = _written(tmp_path, MIXTURES[name])
    model: Any = load(tmp_path).model
    adapted = polysilicon.adapt(model)
    assert not [row for row in adapted.report.rows if row.status == "kept"]
    engine = Engine(adapted, max_batch=2, block_size=4, num_blocks=48, compile=False)
    prompts = [[3, 4, 5], [9, 8, 7, 6, 5, 40, 41, 42, 43, 44, 45, 46, 47]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        ids = torch.tensor([[*prompt, *output.token_ids]])
        with torch.inference_mode():
            found = reference(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        chosen = found.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Its own best at every step, unless two are closer than rounding.
        assert (found.amax(-1) - chosen).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe gptq", "qwen3_moe fp8 blocks"])
def test_an_adapted_mixture_is_one_graph(name: str, tmp_path: Path) -> None:
    _written(tmp_path, MIXTURES[name])
    model: Any = load(tmp_path).model
    polysilicon.adapt(model)
    ids = torch.arange(3, 15)[None]
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(lambda ids: model(input_ids=ids, use_cache=False).logits)(ids)
    assert (found.graph_break_count, found.graph_count) == (0, 1), found.break_reasons


@pytest.mark.parametrize("name", MIXTURES)
def test_the_bytes_of_every_expert_are_kept(name: str, tmp_path: Path) -> None:
    _, state = _written(tmp_path, MIXTURES[name])
    kept = load(tmp_path).model.state_dict()
    stored = {key: value for key, value in state.items() if ".experts." in key}
    assert stored
    for key, value in stored.items():
        found = _expert(kept, key.replace(".block_sparse_moe.", ".mlp."))
        if found is not None:
            assert same_bits(found.contiguous(), value.expand(found.shape).contiguous()), key


def _expert(kept: dict[str, torch.Tensor], key: str) -> torch.Tensor | None:
    """What the layer holds for one expert's tensor; None for those that it was only built from."""
    if key in kept:
        return kept[key]
    path, expert, own, name = key.rsplit(".", 3)
    gate, down = ("w1", "w2") if own.startswith("w") else ("gate_proj", "down_proj")
    if name == "weight_shape":
        return None
    stack = kept[f"{path}.{'down_proj' if own == down else 'gate_up_proj'}_{name}"]
    if name == "g_idx":
        return stack
    part = stack[int(expert)]
    if own == down:
        return part
    # GPTQ and AWQ store a weight's rows along the second dim.
    dim = 1 if name in ("qweight", "qzeros", "scales") else 0
    return part.chunk(2, dim)[0 if own == gate else 1]


def test_a_saved_mxfp4_model_is_the_same_checkpoint(tmp_path: Path) -> None:
    _, state = _written(tmp_path / "one", MIXTURES["gpt_oss"])
    model: Any = load(tmp_path / "one").model
    model.save_pretrained(tmp_path / "two")
    again: Any = load(tmp_path / "two").model
    assert torch.equal(logits(again), logits(model))
    kept = again.state_dict()
    assert all(same_bits(kept[key], tensor) for key, tensor in state.items())


def test_stacked_experts_are_not_saved_as_something_that_nobody_reads(tmp_path: Path) -> None:
    _written(tmp_path / "one", MIXTURES["qwen3_moe gptq"])
    model: Any = load(tmp_path / "one").model
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "two")


def _refused(folder: Path, case: Case, message: str, **sizes: int) -> None:
    model = tiny_model("qwen3_moe", **{**QWEN, **sizes})
    checkpoints.write_mixture(folder, model, case.config, case.encode)
    with pytest.raises(LoadError, match=message):
        load(folder)


def test_experts_with_an_order_each_are_refused(tmp_path: Path) -> None:
    orders = iter(range(1000))
    encode = partial(_ordered, orders)
    case = Case({**CASES["gptq act-order"].config}, encode, "")
    _refused(tmp_path, case, r"experts\.1\.down_proj\.g_idx has another order .*desc_act")


def _ordered(orders: Iterator[int], name: str, weight: torch.Tensor) -> checkpoints.Written:
    return checkpoints.gptq(weight, desc_act=True, sym=True, seed=next(orders))


def test_experts_with_one_order_are_loaded(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", **QWEN)
    case = CASES["gptq act-order"]
    checkpoints.write_mixture(tmp_path, model, case.config, case.encode)
    torch.testing.assert_close(logits(load(tmp_path).model), logits(model), rtol=0, atol=1e-5)


def test_static_scales_of_experts_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path, CASES["fp8 tensor, static"], r"static scale of its input .*activation_scale")


def test_blocks_that_gate_and_up_would_share_are_refused(tmp_path: Path) -> None:
    message = r"made of weights of \[96, 96\] rows and .* stores 128 rows together"
    _refused(tmp_path, CASES["fp8 blocks"], message, moe_intermediate_size=96)


def test_an_incomplete_mixture_is_refused(tmp_path: Path) -> None:
    _written(tmp_path, MIXTURES["qwen3_moe awq"])
    edit_config(tmp_path, num_local_experts=EXPERTS + 1)
    with pytest.raises(
        LoadError, match=r"4 quantised weights make .*down_proj, expected 1 of each of 5"
    ):
        load(tmp_path)


def test_experts_of_two_formats_are_refused(tmp_path: Path) -> None:
    config = CASES["gptq"].config | {"dynamic": {r"+:.*experts\.1\.": {"bits": 8}}}
    case = Case(config, _two_formats, "")
    _refused(tmp_path, case, "int4.gptq.* and .*experts.1.* int8.gptq.*differ in format")


def _two_formats(name: str, weight: torch.Tensor) -> checkpoints.Written:
    return checkpoints.gptq(weight, bits=8 if "experts.1." in name else 4)
