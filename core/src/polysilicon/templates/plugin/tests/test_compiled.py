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

    from polysilicon_acme.chips import Chip


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_row_that_fits_the_scratchpad_compiles(tmp_path: Path, chip: Chip) -> None:
    (device,) = devices(f"acme:{chip.name}", tmp_path)
    fits = [4 * width <= chip.scratch_bytes for width in WIDTHS]
    assert [not made.problems for made in rms_norm(device)] == fits


def test_too_small_a_scratchpad_is_a_problem(tmp_path: Path) -> None:
    (device,) = devices(f"acme:{CHIPS[0].name}", tmp_path)
    small = replace(device, facts={"scratch_bytes": 4 * WIDTHS[0]})
    assert [len(made.problems) for made in rms_norm(small)] == [0, 1]
