"""Linear on a weight in tiles of 4 × 8; `calls` counts them."""

from __future__ import annotations

from torch.nn import functional as F

from polysilicon.api import Tiled

TILED = Tiled(dims=("N", "K"), tiles={"N": 4, "K": 8})
calls = {"few": 0, "many": 0}


def pack(logical):
    return TILED.pack(logical)


def unpack(physical, shape):
    return TILED.unpack(physical, shape)


def pack_turned(logical):
    return logical.t().contiguous()


def unpack_turned(physical):
    return physical.t().contiguous()


def few(x, weight, bias, weight_shape):
    return _linear("few", x, weight, bias, weight_shape)


def many(x, weight, bias, *, weight_shape):
    return _linear("many", x, weight, bias, weight_shape)


def _linear(name, x, weight, bias, weight_shape):
    calls[name] += 1
    out, width = weight_shape
    padded = F.pad(x, (0, weight.shape[1] * 8 - width))
    rows = weight.permute(0, 2, 1, 3).reshape(weight.shape[0] * 4, -1)
    y = F.linear(padded, rows)[..., :out].contiguous()
    return y if bias is None else y + bias


def fake(x, weight, bias, weight_shape):
    return x.new_empty(*x.shape[:-1], weight_shape[0])
