"""LayerSuite: layers composed from the plugin's kernels, eager and in one compiled graph."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polysilicon.errors import PolysiliconError
from polysilicon.ops.contract import tolerance
from polysilicon.ops.samples import Source
from polysilicon.ops.verify import as_results
from polysilicon.prepare import bind_layers
from polysilicon.testing.findings import Finding
from polysilicon.testing.layer_cases import HIDDEN, LAYERS, LayerCall
from polysilicon.testing.suite import Suite

if TYPE_CHECKING:
    from polysilicon.layers import Layer
    from polysilicon.testing.subject import Subject

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """One layer in one dtype."""

    name: str
    dtype: str

    @property
    def id(self) -> str:
        return f"{self.name}-{self.dtype}"


class LayerSuite(Suite):
    """Each layer of core that some kernel of the plugin serves, as `prepare()` would bind it.

    Right is what the portable layer gives in float32; the bound allows twice the error that the
    portable layer itself has in the dtype, as rounding between a layer's ops is everyone's.
    """

    @classmethod
    def cases(cls, found: Subject) -> list[LayerCase]:
        return [LayerCase(name=n, dtype=d) for n, d in itertools.product(LAYERS, _DTYPES)]

    @classmethod
    def look(cls, found: Subject, case: LayerCase) -> tuple[Finding, ...]:
        skipped = ""
        texts: dict[str, str] = {}
        try:
            with torch.inference_mode():
                skipped, texts = _look(found, case)
        except PolysiliconError as error:  # no kernel can be chosen, so none runs in either way
            texts = {"eager": str(error), "compiled": str(error)}
        return tuple(
            Finding(
                names=(case.name,),
                details=(case.dtype,),
                check=check,
                text=texts.get(check, ""),
                skipped=skipped,
            )
            for check in ("eager", "compiled")
        )

    @classmethod
    def own_names(cls, found: Subject) -> set[str]:
        return set(LAYERS)

    def test_layer_agrees_with_the_portable_one(self, case: LayerCase) -> None:
        """Called eagerly. Where OpSuite passes, look at what selection bound: `explain`."""
        self.settle(case, "eager")

    def test_layer_compiles_to_one_graph_and_agrees(self, case: LayerCase) -> None:
        """torch.compile(fullgraph=True). A kernel that reads tensors in Python must be opaque;
        an opaque one needs a true shape function."""
        self.settle(case, "compiled")


def _look(found: Subject, case: LayerCase) -> tuple[str, dict[str, str]]:
    """(why it is skipped, check → what is wrong)."""
    device = torch.device(found.torch_device)
    dtype = getattr(torch, case.dtype)
    built = LAYERS[case.name](Source(dtype, device))
    # Marks and buffers follow the weights, which were drawn on the device.
    layer = built.layer.to(device)
    portable, exact, bound = (copy.deepcopy(layer) for _ in range(3))
    built.arrange(portable, dtype, device)
    built.arrange(exact.float(), torch.float32, device)
    built.arrange(bound, dtype, device)
    if not _bind(found, bound):
        return f"no kernel of {found.row.name} serves it in {case.dtype}", {}
    wide = [x.float() if x.is_floating_point() else x for x in built.arguments]
    wanted = as_results(built.call(exact, *wide))
    usual = as_results(built.call(portable, *built.arguments))
    texts = {}
    for check, call in (("eager", built.call), ("compiled", _compiled(built))):
        try:
            results = as_results(call(bound, *built.arguments))
        except Exception as error:
            line = str(error).strip().splitlines() or [""]
            texts[check] = f"it raised {type(error).__name__}: {line[0]}"
        else:
            texts[check] = _difference(results, usual, wanted, dtype)
    return "", texts


def _compiled(built: LayerCall) -> Any:
    torch.compiler.reset()
    # Traces kernels and shape functions as any backend would, and generates no code.
    return torch.compile(built.call, fullgraph=True, backend="aot_eager")


def _bind(found: Subject, layer: Layer) -> bool:
    """Binds every op slot for the device; whether one of the plugin's kernels is among them."""
    assert found.device is not None  # the suite is skipped without one
    bound = bind_layers(layer, found.device, found.table)
    return any(
        choice.provided.origin.plugin == found.row.name
        for one in bound
        for _, choice in one.binding.cuts
    )


def _difference(
    results: tuple[Tensor, ...],
    usual: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> str:
    for index, (ours, theirs, want) in enumerate(zip(results, usual, wanted, strict=True)):
        if ours.shape != want.shape or ours.dtype != theirs.dtype:
            return (
                f"result {index}: {ours.dtype} {tuple(ours.shape)}, the portable layer gives "
                f"{theirs.dtype} {tuple(want.shape)}"
            )
        scale = float(want.abs().max())
        allowed = 2 * float((theirs.float() - want).abs().max())
        allowed += scale * tolerance(dtype, HIDDEN)[0]
        error = float((ours.float() - want).abs().max())
        if not error <= allowed:
            return f"result {index}: differs by {error:.3g} from float32, allowed is {allowed:.3g}"
    return ""
