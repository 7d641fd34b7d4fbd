"""What layers of one product share: their weight may lie packed in a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.errors import LayoutError
from polysilicon.layers.base import Layer, dtype_name, notice_moved
from polysilicon.layers.packed_weight import RefusedLayout
from polysilicon.notices import notice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from polysilicon.layers.packed_weight import PackedWeight
    from polysilicon.records import Layout


class Product(Layer):
    """A layer of the op linear, whose weight `prepare()` may pack."""

    linear: Callable[..., Any]
    #: The weight where it lies packed; None where it is plain.
    packed_weight: PackedWeight | None = None

    def _pack(self, layout: Layout) -> PackedWeight:
        raise NotImplementedError  # each of the two knows its matrix

    def _own(self) -> PackedWeight | None:
        """The packed weight that this layer's Parameters stand for; None where they are plain."""
        raise NotImplementedError

    def lay_out(self, attribute: str, layouts: Mapping[str, Layout]) -> None:
        wanted = layouts.get("weight")
        if self.packed_weight is not None:
            held = self.packed_weight.packed is not None
            if held and wanted == self.packed_weight.layout:
                return
            self.unpack()
        if wanted is not None:
            self.packed_weight = self._pack(wanted)

    def unpack(self) -> None:
        if self.packed_weight is not None:
            weight, self.packed_weight = self.packed_weight, None
            if weight.packed is not None:
                weight.release()
            self.bind_portable()

    def _made_plain(self) -> Callable[[], None]:
        """Makes the weight plain; what comes back packs it again, where it can still lie so."""
        if self.packed_weight is None:
            return lambda: None
        before, kernel = self.packed_weight, self.linear
        dtypes = self._kernel_dtypes.get("linear", frozenset())
        self.unpack()

        def again() -> None:
            (weight, *_) = self.weights("linear")["weight"]
            where = weight.dtype, weight.device
            if where == before.where:
                self._pack_again(before.layout, kernel, dtypes)
            else:
                notice_moved(where[1] if where[0] == before.dtype else dtype_name(where[0]))

        return again

    def _pack_again(
        self, layout: Layout, kernel: Callable[..., Any], dtypes: frozenset[str]
    ) -> None:
        try:
            self.packed_weight = self._pack(layout)
        except RefusedLayout as why:
            notice(
                f"a weight that was loaded stays plain and core's portable kernel serves it: {why}",
                LayoutError,
            )
        else:
            self.bind_kernel("linear", kernel, dtypes)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("packed_weight", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.packed_weight = self._own()
