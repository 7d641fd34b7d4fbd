"""Calls with the shapes of a problem, for the ops on dense rows: what the proof before use runs.

A fact that the problem doesn't state takes the usual value; numbers are seeded, of scale one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.ops.samples import Source

if TYPE_CHECKING:
    import torch

    from polysilicon.records import Problem

    Arguments = dict[str, Any]


def _size(problem: Problem, key: str, usual: int) -> int:
    return int(problem.fact(key) or usual)


def _number(problem: Problem, key: str, usual: float) -> float:
    value = problem.fact(key)
    return usual if value is None else float(value)


def rms_norm(problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Arguments of rms_norm for `tokens` rows."""
    source, hidden = Source(dtype, device), _size(problem, "hidden", 1024)
    return {
        "x": source.normal(tokens, hidden),
        "weight": source.normal(hidden) if problem.fact("weight", True) else None,
        "eps": _number(problem, "eps", 1e-6),
        "offset": _number(problem, "offset", 0.0),
    }


def add_rms_norm(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Arguments of add_rms_norm for `tokens` rows."""
    arguments = rms_norm(problem, tokens, dtype, device)
    return arguments | {"residual": Source(dtype, device, 1).normal(*arguments["x"].shape)}


def rms_norm_gated(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Arguments of rms_norm_gated for `tokens` rows."""
    arguments = rms_norm(problem, tokens, dtype, device)
    return arguments | {
        "gate": Source(dtype, device, 1).normal(*arguments["x"].shape),
        "norm_before_gate": bool(problem.fact("norm_before_gate", False)),
        "group_size": int(problem.fact("group_size") or 0),
    }


def layer_norm(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Arguments of layer_norm for `tokens` rows."""
    arguments = rms_norm(problem, tokens, dtype, device)
    bias = Source(dtype, device, 1).normal(arguments["x"].shape[1])
    return arguments | {"bias": bias if problem.fact("bias", True) else None}


def silu_and_mul(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Arguments of silu_and_mul for `tokens` rows."""
    return {"x": Source(dtype, device).normal(tokens, 2 * _size(problem, "width", 1024))}


def gelu_and_mul(
    problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Arguments of gelu_and_mul for `tokens` rows."""
    approximate = str(problem.fact("approximate") or "tanh")
    return silu_and_mul(problem, tokens, dtype, device) | {"approximate": approximate}


def linear(problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Arguments of linear for `tokens` rows; the weight's scale keeps results at one."""
    return _product(problem, tokens, dtype, device, ("in", "out"))


def lm_head(problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Arguments of lm_head for `tokens` rows."""
    return _product(problem, tokens, dtype, device, ("hidden", "vocabulary")) | {
        "scale": _number(problem, "scale", 1.0),
        "softcap": _number(problem, "softcap", 0.0),
    }


def _product(
    problem: Problem,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    keys: tuple[str, str],
) -> Arguments:
    source = Source(dtype, device)
    width, out = (_size(problem, key, 1024) for key in keys)
    return {
        "x": source.normal(tokens, width),
        "weight": source.normal(out, width, magnitude=width**-0.5),
        "bias": source.normal(out) if problem.fact("bias", False) else None,
    }


def embedding(problem: Problem, tokens: int, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Arguments of embedding for `tokens` ids."""
    source, vocabulary = Source(dtype, device), _size(problem, "vocabulary", 4096)
    return {
        "ids": source.integers(vocabulary, tokens),
        "weight": source.normal(vocabulary, _size(problem, "hidden", 1024)),
        "scale": _number(problem, "scale", 1.0),
    }
