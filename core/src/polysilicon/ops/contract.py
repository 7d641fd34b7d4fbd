"""What an op is: a schema, a reference, samples and a tolerance; every kernel is judged by it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from polysilicon.records import Problem


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of an op.

    Attributes:
        name: says what is special about this call, e.g. `tokens 17`.
        kwargs: the arguments by name.
    """

    name: str
    kwargs: Mapping[str, Any]


def rows(x: torch.Tensor) -> int:
    """Number of tokens of `[..., width]`: all dims but the last."""
    return x.numel() // x.shape[-1]


@dataclass(frozen=True, kw_only=True)
class Op:
    """The contract of one op.

    Attributes:
        name: as in `Kernel.op`.
        schema: torch.library schema without the name, e.g.
            `(Tensor x, Tensor? weight, float eps) -> Tensor`; argument names are the kernels'.
        keys: fact names that a Problem of this op may state.
        reference: same signature as the kernels; computes in float64 and returns float64.
        samples: `(dtype, device) -> iterator of Sample`; deterministic, seeded.
        reduction: sample kwargs → length of the longest sum, for the tolerance; 1 if elementwise.
        mutates: names of the arguments that a kernel writes to (also marked in the schema).
        tokens: first argument → number of tokens of the call; picks the kernel of a cut list, so
            it must be traceable.
        inputs: `(problem, tokens, dtype, device) -> keyword arguments` of one call with the
            problem's shapes, for the proof before use; None where the samples must do.
        results: dtype of each result: `input` (that of the sample), a torch dtype's name, or the
            name of an argument whose value is the text of a format: that format's storage dtype.
        contiguous: results are contiguous whenever all tensor arguments are.
        roles: argument → role of the layouts (`Layout.role`) in which a kernel may take it packed.
        source: paper, specification or documentation that defines the op.
        dtypes: of the activations with which kernels are tested.
    """

    name: str
    schema: str
    keys: frozenset[str]
    reference: Callable[..., Any]
    samples: Callable[[torch.dtype, torch.device], Iterator[Sample]]
    reduction: Callable[[Mapping[str, Any]], int] = lambda kwargs: 1
    mutates: tuple[str, ...] = ()
    tokens: Callable[[torch.Tensor], int] = rows
    inputs: Callable[[Problem, int, torch.dtype, torch.device], Mapping[str, Any]] | None = None
    results: tuple[str, ...] = ("input",)
    contiguous: bool = True
    roles: Mapping[str, str] = field(default_factory=dict, hash=False)
    source: str = ""
    dtypes: tuple[torch.dtype, ...] = field(default=(torch.float32, torch.bfloat16, torch.float16))

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments in the schema's order."""
        # The op's own schema, before any kernel extends it; torch's parser knows its grammar.
        parsed = torch._C.parse_schema(self.name + self.schema)
        return tuple(argument.name for argument in parsed.arguments)

    def physical_schema(self, packed: Iterable[str]) -> str:
        """The schema of a kernel that takes these arguments packed: with `<argument>_shape`."""
        shapes = "".join(f", int[] {name}_shape" for name in packed)
        arguments, arrow, results = self.schema.rpartition(") ->")
        return f"{arguments}{shapes}{arrow}{results}"


def tolerance(dtype: torch.dtype, reduction: int) -> tuple[float, float]:
    """(rtol, atol) for outputs of scale one in `dtype` after sums of `reduction` terms.

    Rounding of the result costs one unit in the last place; a sum of n terms accumulated in
    float32 grows like sqrt(n) float32 units (Higham, Accuracy and Stability of Numerical
    Algorithms, 4.2, the statistical bound). Four units leave room for two rounding steps.
    """
    unit = torch.finfo(dtype).eps
    accumulate = torch.finfo(torch.float32).eps * max(1, reduction) ** 0.5
    bound = 4 * max(unit, accumulate)
    return bound, bound
