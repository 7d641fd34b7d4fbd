"""Our layers as one of Transformers' quantisers, so that its loader fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from polysilicon.loading.quantized_model import Replacements

#: `quant_method` of a model whose quantised weights lie in our layers.
METHOD = "polysilicon"


class LayersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What a loaded model's config says: written out, it is what the checkpoint said.

    Args:
        settings: `quantization_config` of the checkpoint.
        replacements: the layers, until the model holds them.
    """

    def __init__(self, settings: Mapping[str, Any], replacements: Replacements | None) -> None:
        self.quant_method: Any = METHOD
        self.settings, self.replacements = settings, replacements
        self.stacked = replacements is not None and replacements.stacked

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own `quantization_config`."""
        return dict(self.settings)


class LayersQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the layers into the model before its weights are read."""

    quantization_config: LayersConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        assert self.quantization_config.replacements is not None
        self.quantization_config.replacements.put_into(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        assert self.quantization_config.replacements is not None
        self.quantization_config.replacements.loaded()
        self.quantization_config.replacements = None

    def is_serializable(self) -> bool:
        """Whether the layers' tensors have the checkpoint's names; stacked experts don't."""
        return not self.quantization_config.stacked

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False


def quantization_config(
    settings: Mapping[str, Any], replacements: Replacements
) -> QuantizationConfigMixin:
    """What `from_pretrained` takes as `quantization_config`, for our quantiser."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(LayersQuantizer)
    return LayersConfig(settings, replacements)
