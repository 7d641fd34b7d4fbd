"""What `polysilicon compile` is told of the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from polysilicon_acme.chips import CHIPS
from polysilicon_acme.compiled import WIDTHS, rms_norm
from polysilicon_acme.device import devices

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("chip", [chip.name for chip in CHIPS])
def test_every_width_compiles_for_every_chip(tmp_path: Path, chip: str) -> None:
    (device,) = devices(f"acme:{chip}", tmp_path)
    assert [made.problems for made in rms_norm(device)] == [()] * len(WIDTHS)


def test_too_small_a_scratchpad_is_a_problem(tmp_path: Path) -> None:
    (device,) = devices("acme:x1", tmp_path)
    small = replace(device, facts={"scratch_bytes": 4 * WIDTHS[0]})
    assert [len(made.problems) for made in rms_norm(small)] == [0, 1]
