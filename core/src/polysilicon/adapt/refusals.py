"""What adapt() refuses by name, before it touches anything."""

from __future__ import annotations

from typing import Any

from torch import nn

from polysilicon.errors import AdaptError
from polysilicon.loading.quantizer import LayersConfig


def refuse(model: nn.Module) -> None:
    """Raises for models whose weights or modules adapt() cannot stand for.

    Raises:
        AdaptError: says what was found and what to do instead.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise AdaptError(
            f"adapt() got {type(model).__name__}, expected a Transformers model: load one with "
            "AutoModelForCausalLM.from_pretrained or polysilicon.load"
        )
    _refuse_quantised(model)
    _refuse_parallel(model)
    _refuse_adapters(model)
    if getattr(model.config, "output_attentions", False):
        raise AdaptError(
            "the model's config asks for output_attentions, which our attention kernels never "
            "hold: set config.output_attentions = False, or run the model without adapt()"
        )
    if getattr(model.config, "output_router_logits", False):
        raise AdaptError(
            "the model's config asks for output_router_logits, which Transformers takes from its "
            "own router classes: set config.output_router_logits = False, or run the model without "
            "adapt()"
        )


def _refuse_quantised(model: nn.Module) -> None:
    config: Any = model.config
    settings = getattr(config, "quantization_config", None)
    quantiser: Any = getattr(model, "hf_quantizer", None)
    if settings is None and quantiser is not None:
        settings = quantiser.quantization_config
    if settings is None or isinstance(settings, LayersConfig):
        return
    fields = settings if isinstance(settings, dict) else vars(settings)
    method = fields.get("quant_method", "an unnamed method")
    raise AdaptError(
        f"the model is quantised with {getattr(method, 'value', method)} in layers that are not "
        "ours: load its folder with polysilicon.load(), which keeps the weights packed, or "
        "dequantise it first (model.dequantize() where the method has it)"
    )


def _refuse_parallel(model: nn.Module) -> None:
    size = getattr(model, "_tp_size", None)
    if size is not None and size > 1:
        raise AdaptError(
            f"the model is split over {size} ranks by a tensor-parallel plan: load it without "
            "tp_plan, adapt() works on whole weights"
        )


def _refuse_adapters(model: nn.Module) -> None:
    kind = getattr(model, "active_peft_config", None)
    if kind is not None and getattr(kind, "is_prompt_learning", False):
        raise AdaptError(
            f"the model is wrapped by PEFT's {type(kind).__name__}, which feeds learned prompts "
            "past the embedding: adapt the base model and leave the prompt to PEFT, or merge it"
        )
