"""Functions that turn q and k in a model's own attention code become ours, or are listed."""

from __future__ import annotations

import copy
import gc
import sys
from types import ModuleType

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.gpt_neox import modeling_gpt_neox

import polysilicon
from polysilicon.adapt.probe import Unverified
from polysilicon.adapt.rebinding import forget, rebind
from polysilicon.adapt.recording import ModuleCall
from polysilicon.adapt.rotation import recognise_rotation
from polysilicon.errors import AdaptError

from .models import tiny

IDS = torch.arange(3, 15)[None]
BEFORE_5_24 = Version(transformers.__version__) < Version("5.24")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def rotary_rows(adapted) -> list:
    return [row for row in adapted.report.rows if row.kind == "rotary" and ":" in row.path]


def halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def neox(q, k, cos, sin, axis=1):
    cos, sin = cos.unsqueeze(axis)[..., :4], sin.unsqueeze(axis)[..., :4]
    return halves(q, cos, sin), halves(k, cos, sin)


def one_at_a_time(x, cos, sin, axis=1):
    return neox(x, x, cos, sin, axis)[0]


def sines_first(x, sin, cos, axis=1):
    return one_at_a_time(x, cos, sin, axis)


def backward(q, k, cos, sin, axis=1):
    return neox(q, k, cos, -sin, axis)


def partial(q, k, cos, sin, axis=1):
    turned = neox(q[..., :8], k[..., :8], cos, sin, axis)
    return tuple(torch.cat((y, x[..., 8:]), -1) for y, x in zip(turned, (q, k), strict=True))


def interleaved(q, k, cos, sin, axis=1):
    parts = [torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k)]
    turned = neox(*parts, cos, sin, axis)
    return tuple(torch.stack(y.chunk(2, -1), -1).flatten(-2) for y in turned)


def leaves_as_halves(q, k, cos, sin, axis=1):
    parts = [torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k)]
    return neox(*parts, cos, sin, axis)


def in_complex(q, k, turn):
    pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k)]
    return tuple(torch.view_as_real(x * turn[:, None]).flatten(-2) for x in pairs)


def bent(q, k, cos, sin, axis=1):
    return tuple(y * 1.01 for y in neox(q, k, cos, sin, axis))


def calls(function, tensors: int, size: int = 8) -> list[ModuleCall]:
    """One call with q (and k) [2, heads, 5, size] and angles of eight numbers."""
    source = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, size, generator=source) for heads in (4, 2))
    angle = torch.randn(2, 5, 4, generator=source) * 3
    cos, sin = (x.repeat(1, 1, 2) for x in (angle.cos(), angle.sin()))
    if function is in_complex:
        args = (q, k, torch.polar(torch.ones_like(angle), angle))
    elif function is sines_first:
        args = (q, sin, cos)
    else:
        args = (q, k, cos, sin) if tensors == 4 else (q, cos, sin)
    return [ModuleCall(args, {}, function(*args))]


@pytest.mark.parametrize(
    ("function", "tensors", "size"),
    [
        (neox, 4, 8),
        (one_at_a_time, 3, 8),
        (sines_first, 3, 8),
        (backward, 4, 8),
        (partial, 4, 12),
        (interleaved, 4, 8),
        (leaves_as_halves, 4, 8),
        (in_complex, 3, 8),
    ],
)
def test_rotations_are_recognised_by_what_they_compute(function, tensors, size):
    seen = calls(function, tensors, size)
    layer, error = recognise_rotation(function, seen)
    assert error < 1e-6
    torch.testing.assert_close(layer(*seen[0].args), seen[0].output, rtol=1e-5, atol=1e-5)


def test_what_is_no_rotation_stays():
    with pytest.raises(Unverified, match="results differ"):
        recognise_rotation(bent, calls(bent, 4))


def test_other_settings_than_those_proved_are_refused():
    seen = calls(neox, 4)
    layer, _ = recognise_rotation(neox, seen)
    with pytest.raises(AdaptError, match="axis=2, but was proved for 1 only"):
        layer(*seen[0].args, axis=2)


@pytest.mark.parametrize("kind", ["gpt_neox", "gptj", "persimmon", "nanochat"])
def test_the_function_is_ours_and_listed(kind):
    if kind == "gptj" and BEFORE_5_24:
        pytest.skip("GPT-J's attention and rotation stay Transformers' before Transformers 5.24")
    model = tiny(kind, **({"rotary_dim": 8} if kind == "gptj" else {}))
    before = logits(model)
    adapted = polysilicon.adapt(model)
    assert adapted.report.missing == ()
    assert {row.replaced_by for row in rotary_rows(adapted)} == {"Rotation"}
    assert {row.op for row in rotary_rows(adapted)} == {"rotary_embedding"}
    assert (logits(model) - before).abs().max() <= 1e-5 * before.abs().max()
    prepared = polysilicon.prepare(model, "cpu")
    assert [row.uses for row in prepared.rows if row.op == "rotary_embedding"] == [2]


def test_the_kernel_that_prepare_binds_is_the_one_that_runs():
    model = tiny("gpt_neox")
    polysilicon.adapt(model)
    rotation = model.gpt_neox.layers[0].attention.polysilicon_rotary.apply_rotary_pos_emb
    seen = []

    def kernel(q, k, cos, sin, interleaved):
        seen.append(interleaved)
        return q, k

    rotation.bind_kernel("rotary_kernel", kernel)
    logits(model)
    assert seen == [False]


def test_the_model_compiles_whole():
    model = tiny("gpt_neox")
    polysilicon.adapt(model)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch._dynamo.explain(forward)(IDS)
        assert (found.graph_break_count, found.graph_count) == (0, 1), found.break_reasons
        torch._dynamo.reset()
        compiled = torch.compile(forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(IDS), forward(IDS), rtol=1e-5, atol=1e-5)


def test_generation_gives_the_same_tokens():
    model = tiny("gpt_neox")
    before = model.generate(IDS, max_new_tokens=8, do_sample=False)
    polysilicon.adapt(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), before)


def test_undo_restores_the_forward_and_the_file_was_never_touched():
    model, function = tiny("gpt_neox"), modeling_gpt_neox.apply_rotary_pos_emb
    before = logits(model)
    adapted = polysilicon.adapt(model)
    assert modeling_gpt_neox.apply_rotary_pos_emb is function
    adapted.undo()
    attention = model.gpt_neox.layers[0].attention
    assert "forward" not in vars(attention)
    assert "polysilicon_rotary" not in attention._modules
    assert torch.equal(logits(model), before)


def test_a_deep_copy_calls_its_own_layer():
    model = tiny("gpt_neox")
    polysilicon.adapt(model)
    twin = copy.deepcopy(model)
    attention = twin.gpt_neox.layers[0].attention
    rebound = attention.polysilicon_rotary
    assert attention.forward.__self__ is rebound
    assert rebound.owner is attention
    called = rebound.function.__globals__["apply_rotary_pos_emb"]
    assert called is rebound.apply_rotary_pos_emb
    assert called is not model.gpt_neox.layers[0].attention.polysilicon_rotary.apply_rotary_pos_emb
    torch.testing.assert_close(logits(twin), logits(model))


def test_the_modules_made_for_it_go_with_the_model():
    def made() -> int:
        return sum(name.startswith("polysilicon.adapt.rebound.") for name in sys.modules)

    torch._dynamo.reset()
    gc.collect()
    before = made()
    model = tiny("gpt_neox")
    polysilicon.adapt(model)
    assert made() == before + 2
    del model
    gc.collect()
    assert made() == before


def test_a_function_that_is_not_proved_is_listed_as_kept(monkeypatch):
    theirs = modeling_gpt_neox.apply_rotary_pos_emb

    def bent_function(q, k, cos, sin):
        q, k = theirs(q, k, cos, sin)
        return q * 1.01, k

    monkeypatch.setattr(modeling_gpt_neox, "apply_rotary_pos_emb", bent_function)
    model = tiny("gpt_neox")
    adapted = polysilicon.adapt(model)
    missing = {row.path: row.reason for row in adapted.report.missing}
    assert list(missing) == [
        f"gpt_neox.layers.{i}.attention:apply_rotary_pos_emb" for i in range(2)
    ]
    assert all("results differ" in reason for reason in missing.values())
    assert "forward" not in vars(model.gpt_neox.layers[0].attention)


def test_decorators_are_rebuilt_around_the_new_function(monkeypatch):
    module = ModuleType("somewhere_else")
    monkeypatch.setitem(sys.modules, "somewhere_else", module)
    source = """
import functools

def twice(function):
    @functools.wraps(function)
    def wrapper(x):
        return 2 * function(x)
    return wrapper

def hidden(function):
    @functools.wraps(function)
    def wrapper(x):
        return wrapper.__wrapped__(x)
    return wrapper

def inner(x):
    return x + 1

@twice
def shown(x):
    return inner(x)

@hidden
def unseen(x):
    return inner(x)
"""
    exec(source, vars(module))
    made, name = rebind(module.shown, {"inner": lambda x: x + 10})
    try:
        assert (made(1), module.shown(1)) == (22, 4)
        assert vars(sys.modules[name]) is made.__wrapped__.__globals__
    finally:
        forget(name)
    with pytest.raises(Unverified, match="does not show what it wraps"):
        rebind(module.unseen, {"inner": lambda x: x})
