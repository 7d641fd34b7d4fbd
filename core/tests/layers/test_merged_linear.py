"""MergedLinear keeps the parts' Parameters, names, ties and single storage through everything."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from polysilicon.layers.linear import MergedLinear


class Attention(nn.Module):
    """Three projections as a model has them, merged beside."""

    def __init__(self, biases: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 24, bias=biases[0])
        self.k_proj = nn.Linear(16, 8, bias=biases[1])
        self.v_proj = nn.Linear(16, 8, bias=biases[2])

    def merge(self) -> Attention:
        self.qkv = MergedLinear([self.q_proj, self.k_proj, self.v_proj])
        return self

    def parts(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]


def assert_whole(module: Attention) -> None:
    """One storage, and the merged product equals the parts' products."""
    merged = module.qkv
    assert merged.is_merged()
    pointer = merged.merged_weight.untyped_storage().data_ptr()
    assert {p.weight.untyped_storage().data_ptr() for p in module.parts()} == {pointer}
    x = torch.randn(3, 16).to(merged.merged_weight.dtype)
    with torch.no_grad():
        results = merged.split(merged(x))
        for part, y in zip(module.parts(), results, strict=True):
            torch.testing.assert_close(y, part(x))


def test_merging_changes_no_name_value_or_parameter_object() -> None:
    module = Attention((True, True, True))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    parameters = {k: id(v) for k, v in module.named_parameters()}
    module.merge()
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert {k: id(v) for k, v in module.named_parameters()} == parameters
    assert_whole(module)


@pytest.mark.parametrize("biases", [(True, True, True), (True, False, True)])
def test_biases_are_merged_where_some_parts_have_one(biases: tuple[bool, bool, bool]) -> None:
    assert_whole(Attention(biases).merge())


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.double().float(),
        lambda m: m.to("cpu"),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: copy.deepcopy(m.half()),
    ],
    ids=["to", "half", "twice", "device", "deepcopy", "pickle", "copy of half"],
)
def test_merge_survives(move: object) -> None:
    module = Attention((True, False, False)).merge()
    assert_whole(move(module))  # type: ignore[operator]


def test_merge_registered_before_its_parts_survives_a_cast() -> None:
    parts = Attention()
    merged = MergedLinear(parts.parts())
    outer = nn.Sequential(merged, parts).to(torch.bfloat16)
    assert merged.is_merged()
    assert outer[1].q_proj.weight.dtype == merged.merged_weight.dtype == torch.bfloat16


def test_torch_save_stores_the_weights_once() -> None:
    module = Attention().merge()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    plain = io.BytesIO()
    torch.save(Attention(), plain)
    assert buffer.tell() < plain.tell() + 8000
    buffer.seek(0)
    assert_whole(torch.load(buffer, weights_only=False))


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_reach_the_merged_product(assign: bool) -> None:
    module, other = Attention().merge(), Attention()
    module.load_state_dict(other.state_dict(), assign=assign)
    assert_whole(module)
    assert torch.equal(module.q_proj.weight, other.q_proj.weight)


def test_a_write_to_a_part_is_seen_at_once() -> None:
    module = Attention().merge()
    with torch.no_grad():
        module.k_proj.weight.fill_(0.5)
    assert_whole(module)


def test_tied_weights_stay_tied() -> None:
    module = Attention()
    holder = nn.Module()
    holder.inner, holder.tied = module, nn.Linear(16, 24, bias=False)
    holder.tied.weight = module.q_proj.weight
    module.merge()
    holder.to(torch.bfloat16)
    assert holder.tied.weight is module.q_proj.weight
    assert_whole(module)


def test_every_parameter_gets_its_gradient() -> None:
    module = Attention((True, False, True)).merge()
    module.qkv(torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_merging_again_copies_nothing() -> None:
    module = Attention().merge()
    pointer = module.qkv.merged_weight.data_ptr()
    again = MergedLinear(module.parts())
    assert again.merged_weight.data_ptr() == pointer


def test_compiles_without_a_break() -> None:
    module = Attention((True, False, True)).merge()
    compiled = torch.compile(module.qkv, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module.qkv(x))


def test_what_cannot_be_merged_is_refused() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(ValueError, match="got 1 parts"):
        MergedLinear([a])
    with pytest.raises(ValueError, match="takes 5 inputs, part 0 takes 4"):
        MergedLinear([a, nn.Linear(5, 4)])
    with pytest.raises(ValueError, match="share one Parameter"):
        MergedLinear([a, a])
    with pytest.raises(ValueError, match=r"has dtype torch.float16, part 0 has torch.float32"):
        MergedLinear([a, b.half()])
