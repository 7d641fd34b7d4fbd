"""Puts lazily read weights into a Transformers model, one tensor at a time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as transformers_logging

from polysilicon.errors import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from polysilicon.loading.lazy import LazyTensor


def model_class(
    config: PreTrainedConfig, source: Path, *, remote: bool = False
) -> type[PreTrainedModel]:
    """The causal-LM class of a config; `remote` takes the one that the folder's own code defines.

    Raises:
        LoadError: the model type has no causal LM.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if remote:
        reference = config.auto_map.get("AutoModelForCausalLM")
        if reference is None:
            raise LoadError(f"{source}/config.json has an auto_map without AutoModelForCausalLM")
        found: type[PreTrainedModel] = get_class_from_dynamic_module(
            reference, str(source), local_files_only=True
        )
        return found
    try:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise LoadError(
            f"{source} holds a {config.model_type!r} model, which has no causal language model in "
            "the installed Transformers: expected a text-generation model"
        ) from None
    return found


def skeleton(
    cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model on the meta device: shapes and names, no memory."""
    with torch.device("meta"), quiet():
        model: PreTrainedModel = cls._from_config(config, dtype=dtype)
    return model


def fill(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    weights: Mapping[str, LazyTensor | torch.Tensor],
    dtype: torch.dtype,
    source: Path,
    quantization: QuantizationConfigMixin | None = None,
) -> PreTrainedModel:
    """The model with its weights.

    Transformers renames and merges checkpoint keys where a model asks for it, ties weights and
    initialises buffers; it takes each tensor from `weights` when that tensor's turn comes.
    `quantization` names a quantiser that changes the model before.

    Raises:
        LoadError: a parameter got no weight, or one of another shape; a weight has no place.
    """
    try:
        with quiet():
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                quantization_config=quantization,
                output_loading_info=True,
            )
    except (EOFError, OSError) as error:
        raise LoadError(f"{source} could not be read: {error}") from error
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise LoadError(f"{source} does not make a {cls.__name__}: {error}") from error
    _check(info, cls, source)
    loaded: PreTrainedModel = model
    return loaded


def keeps_float32(cls: type[PreTrainedModel], name: str) -> bool:
    """Whether the model class wants a parameter in float32 whatever dtype is asked for."""
    kept = {*(cls._keep_in_fp32_modules or ()), *(cls._keep_in_fp32_modules_strict or ())}
    return any(part in name for part in kept)


def _check(info: dict[str, Any], cls: type[PreTrainedModel], source: Path) -> None:
    for key, what in (
        ("mismatched_keys", "of another shape than its config says"),
        ("missing_keys", "missing"),
        ("unexpected_keys", "unknown to the model"),
    ):
        found = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info[key])
        if found:
            raise LoadError(
                f"{source} does not fit {cls.__name__}: {len(found)} weights {what} "
                f"({', '.join(found[:3])}{' …' if len(found) > 3 else ''}); config and weights are "
                "of different models or the checkpoint is incomplete"
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Transformers' own bars and reports off: ours say the same, once."""
    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
