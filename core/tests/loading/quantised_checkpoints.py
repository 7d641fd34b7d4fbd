"""Writes tiny quantised checkpoints in the layouts that the formats' own projects document.

Independent of our encoding code: numpy shifts for what is packed, and beside every stored weight
the numbers that it stands for. Sources: GPTQModel and AutoAWQ (`qweight`, `qzeros`, `scales`),
compressed-tensors (`weight_packed`, `weight_scale`), DeepSeek-V3's README_WEIGHTS.md
(`weight_scale_inv`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Written:
    """One linear layer: its tensors by their names in the checkpoint, and what they stand for."""

    tensors: dict[str, Tensor]
    dense: Tensor


def _packed(codes: np.ndarray, bits: int, axis: int) -> Tensor:
    """Codes along `axis` into int32 words, the first of a word in its lowest bits."""
    per_word = 32 // bits
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    places = moved.reshape(*moved.shape[:-1], -1, per_word)
    words = np.zeros(places.shape[:-1], dtype=np.uint32)
    for place in range(per_word):
        words |= places[..., place] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def _rounded(
    weight: np.ndarray, groups: np.ndarray, bits: int, sym: bool, scale_dtype: torch.dtype
) -> tuple[np.ndarray, Tensor, np.ndarray, Tensor]:
    """Codes [N, K], scales [N, G], zero points [N, G] and the dense weight, of weight [N, K]."""
    most = 2**bits - 1
    count = int(groups.max()) + 1
    low = np.stack([weight[:, groups == g].min(1) for g in range(count)], 1).clip(max=0)
    high = np.stack([weight[:, groups == g].max(1) for g in range(count)], 1).clip(min=0)
    size = 2 * np.maximum(high, -low) if sym else high - low
    scales = torch.from_numpy(size / most).to(scale_dtype)
    wide = scales.float().numpy()
    zeros = np.full_like(low, 2 ** (bits - 1)) if sym else np.rint(-low / wide).clip(1, most)
    codes = (np.rint(weight / wide[:, groups]) + zeros[:, groups]).clip(0, most)
    dense = (codes - zeros[:, groups]).astype(np.float32) * wide[:, groups]
    return codes.astype(np.int64), scales, zeros.astype(np.int64), torch.from_numpy(dense)


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    desc_act: bool = False,
    checkpoint_format: str = "gptq",
    seed: int = 3,
) -> Written:
    """qweight [K/p, N], qzeros [G, N/p] (first form: one less), scales [G, N], g_idx [K]."""
    columns = weight.shape[1]
    size = columns if group_size == -1 else group_size
    order = np.arange(columns)
    if desc_act:
        order = np.random.default_rng(seed).permutation(columns)
    groups = order // size
    codes, scales, zeros, dense = _rounded(weight.numpy(), groups, bits, sym, torch.float16)
    stored = zeros - 1 if checkpoint_format == "gptq" else zeros
    tensors = {
        "qweight": _packed(codes.T, bits, 0),
        "qzeros": _packed(stored.T, bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Written(tensors, dense)


def awq(weight: Tensor, *, group_size: int = 32) -> Written:
    """qweight [K, N/8], qzeros [G, N/8], scales [G, N]; a word holds columns 0 2 4 6 1 3 5 7."""
    groups = np.arange(weight.shape[1]) // group_size
    codes, scales, zeros, dense = _rounded(weight.numpy(), groups, 4, False, torch.float16)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

    def words(values: np.ndarray) -> Tensor:
        eights = values.reshape(values.shape[0], -1, 8)[:, :, order]
        return _packed(eights.reshape(values.shape), 4, 1)

    tensors = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": scales.T.contiguous(),
    }
    return Written(tensors, dense)


def pack_quantized(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> Written:
    """weight_packed [N, K/p], weight_scale [N, G], weight_zero_point [N/p, G], weight_shape."""
    rows, columns = weight.shape
    order = np.arange(columns)
    if act_order:
        order = np.random.default_rng(3).permutation(columns)
    groups = order // (group_size or columns)
    codes, scales, zeros, dense = _rounded(weight.numpy(), groups, bits, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": _packed(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _packed(zeros, bits, 0)
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return Written(tensors, dense)


def int8_channel(weight: Tensor) -> Written:
    """weight int8 [N, K] with a scale [N, 1]."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    stored = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return Written({"weight": stored, "weight_scale": scale}, stored.float() * scale.float())


def fp8_blocks(weight: Tensor, *, size: int = 128, ue8m0: bool = False) -> Written:
    """weight float8 [N, K] and weight_scale_inv [N/size, K/size]: what to multiply it with.

    `ue8m0` stores powers of two by their exponents alone.
    """
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // size), -(-columns // size))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    dense = torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = weight[block].abs().max() / 448
            if ue8m0:
                scale[i, j] = 2.0 ** math.ceil(math.log2(scale[i, j]))
            stored[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[block] = stored[block].float() * scale[i, j]
    kept = scale.to(torch.float8_e8m0fnu) if ue8m0 else scale
    return Written({"weight": stored, "weight_scale_inv": kept}, dense)


def fp8_tensor(weight: Tensor, *, name: str = "weight_scale", static: str = "") -> Written:
    """weight float8 [N, K] with one scale, and one for the input where it is static."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, name: scale}
    if static:
        tensors[static] = torch.tensor(0.05)
    return Written(tensors, stored.float() * scale)


def fp8_channel(weight: Tensor) -> Written:
    """weight float8 [N, K] with a scale [N, 1]."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return Written({"weight": stored, "weight_scale": scale}, stored.float() * scale)


def rounded_input(x: Tensor, kind: str) -> Tensor:
    """What a kernel multiplies in the place of x.

    `token`, `group` (of 128) or `static` codes in fp8, `int8` codes by token.
    """
    if kind == "int8":
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (x / scale).round().clamp(-127, 127) * scale
    if kind == "static":
        return (x / 0.05).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.05
    size = 128 if kind == "group" else x.shape[-1]
    parts = []
    for part in x.split(size, -1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, -1)


def mxfp4(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """blocks uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32] and what they stand for [E, N, K].

    OCP Microscaling Formats 1.0: e2m1 numbers, the first of a byte in its low half, times a power
    of two whose exponent is stored plus 127.
    """
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
    groups = stack.numpy().reshape(*stack.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    wide = np.exp2(exponent)[..., None].astype(np.float32)
    code = np.abs(np.abs(groups / wide)[..., None] - values).argmin(-1)
    dense = (np.sign(groups) * values[code] * wide).astype(np.float32)
    nibbles = (code + 8 * (groups < 0)).astype(np.uint8)
    blocks = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return (
        torch.from_numpy(blocks),
        torch.from_numpy((exponent + 127).astype(np.uint8)),
        torch.from_numpy(dense.reshape(stack.shape)),
    )


def write_gpt_oss(folder: Path, model: Any) -> dict[str, Tensor]:
    """Saves a GPT-OSS model as OpenAI does: experts in MXFP4, all else as it is."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        # Transformers holds [E, in, out], the checkpoint [E, out, in].
        blocks, scales, dense = mxfp4(state.pop(name).transpose(1, 2).contiguous())
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = dense.transpose(1, 2).contiguous()
    save(folder, model, state, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return state


def write_mixture(
    folder: Path,
    model: Any,
    quantization_config: dict[str, Any],
    encode: Callable[[str, Tensor], Written],
    *,
    inputs: str = "",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    renamed: tuple[str, str] = ("", ""),
) -> dict[str, Tensor]:
    """Saves a mixture with each expert's three weights quantised, under their own names."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for path, module in list(model.named_modules()):
        if not path.endswith(".experts"):
            continue
        up, down = state.pop(f"{path}.gate_up_proj"), state.pop(f"{path}.down_proj")
        for expert in range(up.shape[0]):
            weights = (*up[expert].chunk(2), down[expert])
            for own, weight in zip(names, weights, strict=True):
                written = encode(f"{path}.{expert}.{own}", weight.contiguous())
                state |= {
                    f"{path}.{expert}.{own}.{key}": tensor.clone()
                    for key, tensor in written.tensors.items()
                }
                weight.copy_(written.dense)
        module.gate_up_proj.data, module.down_proj.data = up, down
        if inputs:
            module.forward = partial(_experts, module, inputs)
    state = {name.replace(*renamed) if renamed[0] else name: t for name, t in state.items()}
    save(folder, model, state, quantization_config)
    return state


def _experts(module: Any, inputs: str, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """One token after the other, with the inputs of both products rounded."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            inner = module.gate_up_proj[expert] @ rounded_input(x[token], inputs)
            gate, up = inner.chunk(2)
            inner = rounded_input(nn.functional.silu(gate) * up, inputs)
            out[token] += weight * (module.down_proj[expert] @ inner)
    return out


def write(
    folder: Path,
    model: Any,
    quantization_config: dict[str, Any],
    encode: Callable[[str, Tensor], Written],
    *,
    inputs: str = "",
    plain: tuple[str, ...] = ("lm_head",),
) -> dict[str, Tensor]:
    """Saves `model` with its linear layers quantised; returns what was saved.

    The model itself becomes the dequantised one. Names that end in one of `plain` stay as they are;
    `inputs` says how the model rounds the inputs of the others, as the config asks for.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or name.endswith(plain):
            continue
        written = encode(name, state.pop(f"{name}.weight").float())
        state |= {f"{name}.{own}": tensor for own, tensor in written.tensors.items()}
        module.weight.data = written.dense
        if inputs:
            module.register_forward_pre_hook(lambda _, args: (rounded_input(args[0], inputs),))
    save(folder, model, state, quantization_config)
    return state


def save(
    folder: Path, model: Any, state: dict[str, Tensor], quantization_config: dict[str, Any]
) -> None:
    """The files of a checkpoint."""
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "architectures": [type(model).__name__],
        "quantization_config": quantization_config,
    }
    path.write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
