"""Each chip gets the device record, the layouts and the kernels that are committed for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from golden_choices import CHIPS, describe, file_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

VENDORS = sorted({chip.partition(":")[0] for chip in CHIPS} - {"cpu"})


def _committed(chip: str) -> str:
    return file_of(chip).read_text(encoding="utf-8")


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_gets_what_is_committed(chip: str) -> None:
    came = text_of(describe(chip))
    assert came == _committed(chip), "meant? run nox -s golden, and commit the difference"


def test_no_golden_file_is_without_its_chip() -> None:
    files = set(file_of(CHIPS[0]).parent.glob("*.json"))
    assert files == {file_of(chip) for chip in CHIPS}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendor_alone_chooses_as_among_the_others(
    vendor: str, without: Callable[..., None]
) -> None:
    """Without the other three plugins, not one choice for this vendor's chips differs."""
    without(*(other for other in VENDORS if other != vendor))
    own = [chip for chip in CHIPS if chip.partition(":")[0] in (vendor, "cpu")]
    assert [chip for chip in own if text_of(describe(chip)) != _committed(chip)] == []
