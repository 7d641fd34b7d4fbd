"""Stand-ins for adapt(), to test the harness itself; coverage imports them by name."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polysilicon.adapt.report import Report, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Answer:
    """What the harness reads of adapt()'s answer."""

    report: Report


def _answer(model: PreTrainedModel, *rows: Row) -> Answer:
    name, dtype = type(model).__name__, str(model.dtype)
    return Answer(Report(architecture=name, dtype=dtype, rows=rows, paged="a stand-in"))


def identity(model: PreTrainedModel) -> Answer:
    """Replaces nothing and says that nothing was there to replace."""
    return _answer(model)


def keeps(model: PreTrainedModel) -> Answer:
    """Says that one norm in every layer stayed, and one that no text reaches."""
    reason = "a reason"
    paths = (
        "model.image_tower.norm",
        "model.layers.0.input_layernorm",
        "model.layers.1.input_layernorm",
    )
    rows = [Row(path=path, kind="norm", status="kept", reason=reason) for path in paths]
    return _answer(model, *rows)


def off_by_little(model: PreTrainedModel) -> Answer:
    """Changes the output layer's weight by two parts in ten thousand."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.0002)
    return _answer(model)


def off_in_bfloat16(model: PreTrainedModel) -> Answer:
    """Changes the output layer's weight, in bfloat16 only, by five times the dtype's unit."""
    if model.dtype == torch.bfloat16:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1 + 5 * 2**-7)
    return _answer(model)


def prints(model: PreTrainedModel) -> Answer:
    """Talks, as some models' own code does."""
    print("hello")
    return _answer(model)


def raises(model: PreTrainedModel) -> Answer:
    """Has a bug."""
    raise RuntimeError("a bug of ours")


def dies_or_hangs(model: PreTrainedModel) -> Answer:
    """Takes the whole process with it on GPT-2, never comes back on OPT."""
    if model.config.model_type == "gpt2":
        os.abort()
    if model.config.model_type == "opt":
        time.sleep(3600)
    return _answer(model)
