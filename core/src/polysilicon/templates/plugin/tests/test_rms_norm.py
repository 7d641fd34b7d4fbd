"""What the conformance suite can't know of the kernel: which problems it leaves to others."""

from __future__ import annotations

import pytest
from polysilicon.api import Problem

from polysilicon_acme.chips import SMALLEST_SCRATCH
from polysilicon_acme.plugin import KERNELS

#: The widest row that stays in every chip's scratchpad, in float32.
WIDEST = SMALLEST_SCRATCH // 4


@pytest.mark.parametrize(("hidden", "serves"), [(1, True), (WIDEST, True), (WIDEST + 1, False)])
def test_row_must_fit_the_scratchpad(hidden: int, serves: bool) -> None:
    (kernel,) = (kernel for kernel in KERNELS if kernel.op == "rms_norm")
    assert kernel.supports is not None
    reason = kernel.supports(Problem(op="rms_norm", dtype="float32", facts={"hidden": hidden}))
    assert (reason is None) == serves
