"""LayoutSuite: what a plugin packs, it unpacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.testing.layout_checks import LayoutCase, check_layout, layout_cases
from polysilicon.testing.suite import Suite

if TYPE_CHECKING:
    from polysilicon.testing.findings import Finding
    from polysilicon.testing.subject import Subject


class LayoutSuite(Suite):
    """Each layout in each dtype over odd sizes, on the CPU: packing is arithmetic on indices."""

    @classmethod
    def why_not(cls, found: Subject) -> str:
        return found.why_not if found.device is None else ""

    @classmethod
    def cases(cls, found: Subject) -> list[LayoutCase]:
        return layout_cases(found.layouts)

    @classmethod
    def look(cls, found: Subject, case: LayoutCase) -> tuple[Finding, ...]:
        return check_layout(case, "cpu")

    @classmethod
    def own_names(cls, found: Subject) -> set[str]:
        return {layout.name for layout in found.layouts}

    def test_unpack_gives_back_what_was_packed(self, case: LayoutCase) -> None:
        """For every size. An unpack that takes a second argument is told the logical shape."""
        self.settle(case, "round trip")

    def test_packed_tensors_have_the_declared_dims(self, case: LayoutCase) -> None:
        """As many dims as `Layout.dims`, those written as numbers of that size, and a dim of
        the tile's size for each `N/64`."""
        self.settle(case, "declared shape")

    def test_padding_holds_zeros(self, case: LayoutCase) -> None:
        """Sums over a padded dim stay right."""
        self.settle(case, "padding")
