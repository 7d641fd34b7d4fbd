"""The compiled engine: the whole forward in one graph a shape, and nothing compiled in service."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, GREEDY, Case

from polysilicon.engine import Engine
from polysilicon.engine import model as engine_model


def check(engine: Engine, case: Case) -> None:
    shapes = engine._runner.shapes
    # fullgraph=True: a break would have raised. One graph a shape, all of them in warm-up.
    assert len(engine._model.graphs) == len(shapes)
    outputs = engine.generate(case.prompts, GREEDY)
    assert [output.error for output in outputs] == [None] * len(case.prompts)
    assert [output.token_ids for output in outputs] == case.expected
    report = engine.report()
    assert (report.compiled_graphs, report.compiled_while_serving) == (len(shapes), ())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_one_graph_a_shape_and_none_while_serving(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tracing is what may break; compiling what was traced takes minutes for seven models.
    monkeypatch.setattr(engine_model, "_backend", lambda _: lambda graph, inputs: graph.forward)
    case = Case(name)
    check(case.engine(compile=True, max_batch=4, max_tokens_per_step=64), case)


def test_inductor_gives_the_same_tokens() -> None:
    case = Case("llama")
    check(case.engine(compile=True, max_batch=1, max_tokens_per_step=16), case)


def test_what_compiles_while_serving_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_model, "_backend", lambda _: lambda graph, inputs: graph.forward)
    case = Case("llama")
    engine = case.engine(compile=True, max_batch=2, max_tokens_per_step=16)
    monkeypatch.setattr(engine._runner, "_buckets", None)  # steps as they come, not padded
    with torch.inference_mode():
        engine.generate(case.prompts[2:3], GREEDY)
    (late,) = engine.report().compiled_while_serving
    assert late.startswith("graph 4, tokens [1, 5]")
