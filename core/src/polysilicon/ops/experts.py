"""experts: every token through the MLPs of its experts, the results weighted and summed.

T tokens of width H, E experts of inner width I, k experts a token. No token is ever dropped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polysilicon.ops import activation as activations
from polysilicon.ops import linear, moe_permute
from polysilicon.ops.contract import Op, Sample
from polysilicon.ops.samples import TOKENS, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from polysilicon.records import Problem


def torch_kernel(
    x: Tensor,  # [T, H]
    indices: Tensor,  # int64 [T, k], 0 to E - 1; E: no expert (it lies on another rank)
    weights: Tensor,  # [T, k]
    up: Tensor,  # [E, 2 · I, H] gate and up, or [E, I, H] without a gate
    up_bias: Tensor | None,  # [E, 2 · I] or [E, I]
    down: Tensor,  # [E, H, I]
    down_bias: Tensor | None,  # [E, H]
    activation: str,
    gated: bool,
    interleaved: bool,  # gate and up alternate, else the gate is the first half
    alpha: float,  # 0: activation(gate) · up, else gate · sigmoid(alpha · gate) · (up + 1)
    limit: float,  # 0: none, else gate ≤ limit and -limit ≤ up ≤ limit
) -> Tensor:  # [T, H]
    """Tokens sorted by expert, two products for each expert that has any, summed in float32."""
    between = partial(_between, rule=(activation, gated, interleaved, alpha, limit))
    return _sorted(x, indices, weights, (up, up_bias), (down, down_bias), between, F.linear)


def torch_skinny_kernel(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    """The same, with products that read a weight with all cores where an expert has few tokens."""
    between = partial(_between, rule=(activation, gated, interleaved, alpha, limit))
    return _sorted(x, indices, weights, (up, up_bias), (down, down_bias), between, _few_rows)


#: Stacked weights [E, out, in] and biases [E, out] of one product.
_Stack = tuple[Tensor, "Tensor | None"]


def _sorted(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: _Stack,
    down: _Stack,
    between: Callable[[Tensor], Tensor],
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    order, ends = moe_permute.torch_kernel(indices, len(up[0]))
    tokens = order // max(1, indices.shape[1])
    factors = weights.reshape(-1)[order].float()[:, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if start == end:
            continue
        rows = slice(start, end)
        inner = between(product(x[tokens[rows]], up[0][expert], _row(up[1], expert)))
        y = product(inner, down[0][expert], _row(down[1], expert))
        out.index_add_(0, tokens[rows], y.float() * factors[rows])
        start = end
    return out.to(x.dtype)


def _between(x: Tensor, rule: tuple[str, bool, bool, float, float]) -> Tensor:
    return activated(x, *rule)


def _few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Transposed stacks have no rows to group.
    if x.shape[0] <= FEW and weight.is_contiguous():
        return linear.torch_skinny_kernel(x, weight, bias)
    return F.linear(x, weight, bias)


#: Tokens of an expert up to which PyTorch's product would run at a fraction of the memory's speed.
FEW = 4


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def activated(
    x: Tensor, kind: str, gated: bool, interleaved: bool, alpha: float, limit: float
) -> Tensor:
    """What lies between the two products: the activation, gated and clamped as it is asked."""
    if not gated:
        return activations.torch_kernel(x, kind)
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if alpha:
        return (up + 1) * (gate * torch.sigmoid(alpha * gate))
    return activations.torch_kernel(gate, kind) * up


def experts_fake(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    """Shape function of every kernel of this op."""
    return x.new_empty(x.shape)


def reference(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> Tensor:
    """The definition in float64, one token and one of its experts at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (chosen, factors) in enumerate(zip(indices.tolist(), weights, strict=True)):
        for expert, factor in zip(chosen, factors.double(), strict=True):
            if expert == len(up):
                continue
            inner = up[expert].double() @ x[token].double()
            inner = inner if up_bias is None else inner + up_bias[expert].double()
            y = down[expert].double() @ _gate(inner, activation, gated, interleaved, alpha, limit)
            y = y if down_bias is None else y + down_bias[expert].double()
            out[token] += factor * y
    return out


def _gate(
    x: Tensor, kind: str, gated: bool, interleaved: bool, alpha: float, limit: float
) -> Tensor:
    if not gated:
        return activations.reference(x, kind)
    gate, up = (x[::2], x[1::2]) if interleaved else (x[: len(x) // 2], x[len(x) // 2 :])
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha:
        return (up + 1) * gate / (1 + (-alpha * gate).exp())
    return activations.reference(gate, kind) * up


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)

    def sample(
        name: str,
        tokens: int = 7,
        experts: int = 5,
        top_k: int = 2,
        hidden: int = 32,
        width: int = 24,
        *,
        bias: bool = False,
        **given: Any,
    ) -> Sample:
        rows = 2 * width if given.get("gated", True) else width
        usual: dict[str, Any] = {
            "x": source.normal(tokens, hidden),
            "indices": source.integers(experts, tokens, top_k),
            "weights": source.normal(tokens, top_k).abs(),
            "up": source.normal(experts, rows, hidden, magnitude=hidden**-0.5),
            "up_bias": source.normal(experts, rows) if bias else None,
            "down": source.normal(experts, hidden, width, magnitude=width**-0.5),
            "down_bias": source.normal(experts, hidden) if bias else None,
            "activation": "silu",
            "gated": True,
            "interleaved": False,
            "alpha": 0.0,
            "limit": 0.0,
        }
        return Sample(name=name, kwargs=usual | given)

    for tokens in TOKENS:
        yield sample(f"tokens {tokens}", tokens)
    for experts, top_k in ((1, 1), (3, 3), (64, 6)):
        yield sample(f"{top_k} of {experts}", experts=experts, top_k=top_k)
    yield sample("odd sizes", hidden=33, width=17, bias=True)
    yield sample("without a gate", gated=False, activation="relu2", bias=True)
    yield sample("interleaved and clamped", interleaved=True, alpha=1.702, limit=0.5, bias=True)
    yield sample("clamped", limit=0.5)
    yield sample("all to one", indices=torch.full((7, 1), 3, device=device), top_k=1)
    yield sample("one twice", indices=torch.ones(7, 2, dtype=torch.int64, device=device))
    yield sample("no expert", indices=torch.tensor([[0, 5]] * 7, device=device))
    turned = source.normal(5, 32, 48, magnitude=0.2).transpose(1, 2)
    yield sample("weights transposed", up=turned)


def _inputs(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """A call with the problem's shapes; every token goes to experts of its own choice."""
    source = Source(dtype, device)

    def size(key: str, usual: int) -> int:
        return int(problem.fact(key) or usual)

    number, hidden, width = size("experts", 8), size("hidden", 256), size("width", 128)
    gated, bias = bool(problem.fact("gated", True)), bool(problem.fact("bias", False))
    rows, top_k = (2 * width if gated else width), size("top_k", 2)
    return {
        "x": source.normal(tokens, hidden),
        "indices": source.integers(number, tokens, top_k),
        "weights": source.normal(tokens, top_k).abs(),
        "up": source.normal(number, rows, hidden, magnitude=hidden**-0.5),
        "up_bias": source.normal(number, rows) if bias else None,
        "down": source.normal(number, hidden, width, magnitude=width**-0.5),
        "down_bias": source.normal(number, hidden) if bias else None,
        "activation": str(problem.fact("activation") or "silu"),
        "gated": gated,
        "interleaved": False,
        "alpha": 0.0,
        "limit": 0.0,
    }


def _reduction(kwargs: Mapping[str, Any]) -> int:
    return 4 * int(kwargs["x"].shape[-1] + kwargs["down"].shape[-1])


OP = Op(
    name="experts",
    schema=(
        "(Tensor x, Tensor indices, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, "
        "Tensor? down_bias, str activation, bool gated, bool interleaved, float alpha, "
        "float limit) -> Tensor"
    ),
    keys=frozenset({"experts", "top_k", "hidden", "width", "activation", "gated", "bias"}),
    reference=reference,
    samples=_samples,
    reduction=_reduction,
    inputs=_inputs,
    source="https://arxiv.org/abs/1701.06538",
)
