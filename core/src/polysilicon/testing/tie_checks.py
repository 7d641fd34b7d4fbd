"""Kernels that tie: both go first for the same call, so that selection raises in a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polysilicon import choosing, ops
from polysilicon.testing.facts import problem_of
from polysilicon.testing.findings import Finding
from polysilicon.testing.op_checks import judged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polysilicon.records import Problem
    from polysilicon.testing.op_checks import OpCase
    from polysilicon.testing.subject import Subject

TIES = "ties"


def check_ties(case: OpCase, found: Subject, problems: Sequence[Problem] = ()) -> Finding:
    """Asks for each sample's problem what precedence puts first; imports no kernel."""
    op = ops.get(case.kernel.op)
    asked = tuple(problem for problem in problems if problem.op == op.name)
    text = ""
    for sample, _ in judged(op.name, case.dtype, torch.device(found.torch_device), asked):
        if rivals := _rivals(case, found, problem_of(op, sample, case.dtype)):
            text = (
                f"ties with {' and '.join(rivals)} on {sample.name!r}: give them different ranks, "
                "or apart tokens or supports"
            )
            break
    return Finding(names=(case.kernel.name, op.name), details=(case.dtype,), check=TIES, text=text)


def _rivals(case: OpCase, found: Subject, problem: Problem) -> list[str]:
    """The other kernels that go first for a problem, where this one does."""
    assert found.device is not None  # the suite is skipped without one
    state = choosing.candidates(problem, found.device, found.table)
    fitting = {entry.record.name: state.order(entry) for entry in state.fitting(problem.tokens)}
    first = max(fitting.values(), default=None)
    names = [name for name, order in fitting.items() if order == first]
    return [n for n in names if n != case.kernel.name] if case.kernel.name in names else []
