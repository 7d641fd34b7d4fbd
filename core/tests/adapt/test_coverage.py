"""The harness, on stand-ins for adapt(), and a diverse sample of architectures through it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
import typer
from packaging.version import Version
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from typer.testing import CliRunner

from polysilicon.adapt import coverage, coverage_page, coverage_probes, tiny
from polysilicon.commands.coverage import register

since_5_24 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="holds for this architecture as Transformers 5.24 has it",
)


@pytest.fixture(autouse=True)
def stand_ins_importable(monkeypatch, request):
    """Makes stand_ins.py importable, here and in the worker processes."""
    folder = str(request.path.parent)
    monkeypatch.syspath_prepend(folder)


def judge(name: str, stand_in: str) -> coverage.Row:
    return coverage.judge(name, f"stand_ins:{stand_in}")


def test_every_causal_lm_of_transformers_is_listed():
    assert len(tiny.names()) > 150
    assert {"llama", "gpt2", "gemma3_text", "mamba2"} <= set(tiny.names())


def test_same_weights_in_both_dtypes_and_every_run():
    config = tiny.tiny_config("llama")
    exact, again = (tiny.tiny_model(config, dtype=torch.float32, seed=3) for _ in range(2))
    rounded = tiny.tiny_model(config, dtype=torch.bfloat16, seed=3)
    for name, weight in exact.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
        assert torch.equal(weight, rounded.state_dict()[name].float()), name


def test_norms_and_biases_are_random():
    model = tiny.tiny_model(tiny.tiny_config("qwen2"), dtype=torch.float32)
    layer = model.model.layers[0]
    assert layer.input_layernorm.weight.std() > 0.05
    assert layer.self_attn.q_proj.bias.std() > 0.05


def test_every_kind_of_layer_of_a_schedule_is_kept():
    config = tiny.tiny_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window < coverage_probes.TOKENS - coverage_probes.PADDED


def test_sizes_of_single_layers_stay_apart():
    config = tiny.tiny_config("gemma4_text")
    sizes = {config.per_layer_config[i].head_dim for i in range(config.num_hidden_layers)}
    assert len(sizes) == 2


def test_no_change_is_adapted_with_no_difference():
    row = judge("llama", "identity")
    assert (row.status, row.float32, row.bfloat16) == ("adapted", 0.0, 1.0)


def test_kept_modules_make_it_partly_and_are_listed_once():
    row = judge("llama", "keeps")
    assert row.status == "partly"
    assert row.kept == ("norm model.layers.*.input_layernorm: a reason",)


def test_small_float32_difference_is_wrong():
    row = judge("llama", "off_by_little")
    assert row.status == "wrong"
    assert row.reason.startswith("float32 logits differ by 2.0e-04")


def test_bfloat16_error_beyond_transformers_own_is_wrong():
    row = judge("llama", "off_in_bfloat16")
    assert row.status == "wrong"
    assert row.reason.startswith("bfloat16 error is")


def float32_difference_where(name: str, moved: tuple[int, int]) -> float:
    """The verdict on logits that are Transformers' own but at one token."""
    config = tiny.tiny_config(name)
    theirs = coverage_probes.plain(tiny.tiny_model(config, dtype=torch.float32))
    ours = theirs.clone()
    ours[moved] *= 2
    found = coverage_probes.float32_difference({"plain": ours}, {"plain": theirs}, config)
    return found[0]


@since_5_24
def test_only_tokens_where_transformers_own_model_jumps_are_left_out():
    # Doge attends to the eight keys that score best; two nearly tie for token 9 of sequence 7.
    assert float32_difference_where("doge", (7, 9)) == 0.0
    assert float32_difference_where("doge", (0, 9)) > 0.1
    assert float32_difference_where("llama", (7, 9)) > 0.1


def test_bug_of_ours_is_failed_and_told_apart():
    row = judge("llama", "raises")
    assert row.status == "failed"
    assert row.reason == "our code raised: adapt(): RuntimeError: a bug of ours"


@since_5_24
def test_model_that_needs_more_than_ids_is_failed_and_told_apart():
    row = judge("gemma4_unified_assistant", "identity")
    assert row.status == "failed"
    assert row.reason.startswith("Transformers' own model does not run on token ids alone")


def test_crash_and_hang_cost_only_their_own_row():
    names = ["llama", "gpt2", "opt", "mistral"]
    rows = coverage.coverage(names, jobs=2, adapt="stand_ins:dies_or_hangs", timeout=4)
    assert [row.name for row in rows] == names
    assert [row.status for row in rows] == ["adapted", "failed", "failed", "adapted"]
    assert "died with exit code -6" in rows[1].reason
    assert "no result within 4 s" in rows[2].reason


def test_what_foreign_code_prints_stays_out_of_standard_output(capfd):
    rows = coverage.coverage(["llama"], adapt="stand_ins:prints")
    assert rows[0].status == "adapted"
    assert capfd.readouterr().out == ""


def test_unknown_name_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="no causal-LM architecture 'lama' in the installed"):
        coverage.coverage(["llama", "lama"])


def test_data_has_every_row_and_the_totals():
    rows = [judge("llama", "identity"), judge("llama", "keeps")]
    found = coverage.data(rows)
    assert found["schema"] == 1
    assert [row["status"] for row in found["architectures"]] == ["adapted", "partly"]
    assert found["totals"] == {"adapted": 1, "partly": 1, "failed": 0, "wrong": 0, "all": 2}


def test_page_names_versions_and_what_stays_most_often():
    text = coverage_page.page([judge("llama", "keeps")])
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "| norm | a reason | 1 |" in text
    assert "| partly | 1 | 100% |" in text


#: Architecture → its status and whether the engine runs it; each is here for what it alone has.
SAMPLE: dict[str, tuple[str, bool]] = {
    "bart": ("adapted", False),  # a decoder without its encoder, learned positions with an offset
    "bert": ("adapted", True),  # post-norm, token types
    "bitnet": ("adapted", True),  # norms inside attention and MLP
    "bloom": ("adapted", False),  # ALiBi in its own attention code
    "cohere2": ("adapted", True),  # interleaved rotary, mean-centred norm, logit scale
    "cwm": ("adapted", True),  # llama3 rotary scaling with windows
    "deepseek_v3": ("adapted", True),  # latent attention: value heads of another size
    "deepseek_v32": ("adapted", False),  # code that asks for the implementation's name
    "diffllama": ("adapted", False),  # two attentions in one layer, subtracted
    "exaone4": ("adapted", True),  # norms after the blocks, rotary in some layers only
    "falcon": ("adapted", True),  # one key head, its own attention code
    # Softcaps, windows, 1+w norms, scaled embedding. Where Transformers runs it by SDPA, that drops
    # the softcaps of attention, so attention stays theirs.
    "gemma2": ("partly", False) if Gemma2PreTrainedModel._supports_sdpa else ("adapted", True),
    "gemma3": ("adapted", True),  # composite: the image tower stays unreached
    "gemma3n_text": ("adapted", True),  # layers that share keys and values
    "gemma4_text": ("adapted", True),  # mixed head sizes
    "gemma4_unified_assistant": ("failed", False),  # needs another model's states
    "glm4": ("adapted", True),  # partial interleaved rotary, fused gate and up
    "gpt2": ("adapted", True),  # transposed weights, fused q, k, v
    "gpt_bigcode": ("adapted", True),  # one key head
    "gpt_neox": ("adapted", True),  # q, k, v interleaved by head, parallel residual
    "gpt_neo": ("adapted", True),  # its own attention code with its own window
    "gpt_oss": ("adapted", True),  # sinks, yarn, experts
    "granite": ("adapted", True),  # multipliers
    "granitemoehybrid": ("adapted", True),  # recurrent mixer and experts
    "llama": ("adapted", True),
    "mamba2": ("adapted", True),  # no attention
    "minicpm3": ("adapted", True),  # latent attention without experts
    "mixtral": ("adapted", True),  # experts
    "mpt": ("adapted", False),  # ALiBi, masks of truth values in its own attention code
    "nemotron": ("adapted", True),  # 1+w layer norm, squared ReLU
    "olmo2": ("adapted", True),  # q and k norms over the whole projection
    "opt": ("adapted", True),  # positions counted from the mask
    "phi3": ("adapted", True),  # fused projections, longrope
    "qwen3": ("adapted", True),  # q and k norms by head
    "qwen3_5_text": ("adapted", True),  # gated delta rule
    "xlnet": ("partly", False),  # relative positions
}


@pytest.fixture(scope="session")
def sample() -> dict[str, coverage.Row]:
    return {row.name: row for row in coverage.coverage(list(SAMPLE))}


@pytest.mark.parametrize(("name", "expected"), SAMPLE.items())
def test_architecture_has_its_expected_status(sample, name, expected):
    row = sample[name]
    assert (row.status, row.engine == "yes") == expected, row


def test_engine_never_gives_other_tokens(sample):
    assert not [row for row in sample.values() if "tokens differ" in row.engine]


def command() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_command_prints_one_json_object_and_nothing_else():
    result = CliRunner().invoke(command(), ["llama", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["architectures"][0]["name"] == "llama"


def test_command_refuses_an_unknown_name():
    result = CliRunner().invoke(command(), ["lama"])
    assert result.exit_code == 2
    assert "no causal-LM architecture" in result.stderr


def test_command_fails_outside_of_the_limits():
    limits = ["gemma4_unified_assistant", "--max-failed", "20", "--min-adapted", "40"]
    result = CliRunner().invoke(command(), limits)
    assert result.exit_code == 1
    assert "0.0 % are adapted, expected at least 40 %; 100.0 % failed" in result.stderr
