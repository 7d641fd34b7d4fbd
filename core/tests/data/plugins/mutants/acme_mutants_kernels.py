"""Kernels that are wrong in one way each, the ways in which kernels go wrong."""

from __future__ import annotations

import os

import torch

from polysilicon.ops import (
    activation,
    add_rms_norm,
    attention,
    embedding,
    gelu_and_mul,
    layer_norm,
    rms_norm_gated,
    silu_and_mul,
)

TILE = 16


def sees_next_key(q, k, v, mask, scale, causal, window, softcap, sinks):
    """The causal mask is off by one."""
    rows, columns = q.shape[2], k.shape[2]
    if causal and mask is None:
        mask = attention.visibility(columns - rows + 1, rows, columns, True, window, q.device)
        return attention.torch_kernel(q, k, v, mask, scale, False, 0, softcap, sinks)
    return attention.torch_kernel(q, k, v, mask, scale, causal, window, softcap, sinks)


def wrong_heads(q, k, v, mask, scale, causal, window, softcap, sinks):
    """Query head i reads key head i mod hk."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
    return attention.torch_kernel(q, k, v, mask, scale, causal, window, softcap, sinks)


def window_off_by_one(q, k, v, mask, scale, causal, window, softcap, sinks):
    wider = window + 1 if window else 0
    return attention.torch_kernel(q, k, v, mask, scale, causal, wider, softcap, sinks)


def eps_outside_root(x, weight, eps, offset=0.0):
    """eps is added to the root, not to the mean square."""
    wide = x.float()
    normed = wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps)
    return (normed if weight is None else normed * (weight.float() + offset)).to(x.dtype)


def writes_input(x):
    y = silu_and_mul.torch_kernel(x)
    x[..., : y.shape[-1]] = y
    return y


def stays_float32(x, weight, bias, eps, offset=0.0):
    return layer_norm.torch_kernel(x, weight, bias, eps, offset).float()


def ignores_strides(x, approximate):
    """Reads the memory as if it were contiguous."""
    dense = torch.empty(x.shape, device="meta").stride()
    if x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() >= x.numel():
        x = x.as_strided(x.shape, dense)
    return gelu_and_mul.torch_kernel(x, approximate)


def leaves_last_tile(x, weight, bias):
    """Only whole tiles of rows are computed."""
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, weight.shape[0])
    whole = rows.shape[0] // TILE * TILE
    out[:whole] = torch.nn.functional.linear(rows[:whole], weight, bias)
    return y


calls = 0


def noisy(ids, weight, scale=1.0):
    """The lowest bit depends on when it is called."""
    global calls
    calls += 1
    y = embedding.torch_kernel(ids, weight, scale)
    return torch.nextafter(y, y * 2) if calls % 2 else y


def fails_on_nothing(x, kind):
    assert x.numel(), "invalid launch: grid of 0 blocks"
    return activation.torch_kernel(x, kind)


def interpreted(x, kind):
    """Right, in the interpreter that a variable turns on."""
    assert os.environ["ACME_INTERPRET"] == "1"
    return activation.torch_kernel(x, kind)


def tells_wrong_shape(x, gate, weight, eps, offset=0.0, norm_before_gate=False, group_size=0):
    return rms_norm_gated.torch_kernel(x, gate, weight, eps, offset, norm_before_gate, group_size)


def told(x, gate, weight, eps, offset=0.0, norm_before_gate=False, group_size=0):
    return x.new_empty(x.shape, dtype=torch.float32)


def stores_padding(k, v, k_cache, v_cache, slots):
    """Slot -1 is stored too, in the last slot there is."""
    for values, cache in ((k, k_cache), (v, v_cache)):
        cache[slots // cache.shape[1], slots % cache.shape[1]] = values


def reads_a_number(x, residual, weight, eps, offset=0.0):
    """Right, but not traceable."""
    if x.abs().sum() < 0:
        return x, residual
    return add_rms_norm.torch_kernel(x, residual, weight, eps, offset)


def claims_nothing(x, weight, bias, scale=1.0, softcap=0.0):
    raise AssertionError("never called")


def pack_whole_tiles(weight):
    """The columns after the last whole tile are lost."""
    whole = weight.shape[-1] // TILE * TILE
    return weight[..., :whole].reshape(*weight.shape[:-1], -1, TILE)


def pack_with_ones(weight):
    padded = weight.new_ones(*weight.shape[:-1], -(-weight.shape[-1] // TILE) * TILE)
    padded[..., : weight.shape[-1]] = weight
    return padded.view(*weight.shape[:-1], -1, TILE)


def unpack_tiles(physical, shape):
    tiles, width = physical.shape[-2:]
    return physical.reshape(*physical.shape[:-2], tiles * width)[..., : shape[-1]]
