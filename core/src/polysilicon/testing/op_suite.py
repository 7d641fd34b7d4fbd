"""OpSuite: every kernel of the plugin, on every sample of its op, against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polysilicon.testing.op_checks import CLAIM, OpCase, check_kernel, op_cases
from polysilicon.testing.suite import Suite
from polysilicon.testing.tie_checks import TIES, check_ties

if TYPE_CHECKING:
    from polysilicon.testing.findings import Finding
    from polysilicon.testing.subject import Subject


class OpSuite(Suite):
    """Each kernel in each dtype, alone, on the device or in its language's interpreter.

    Samples outside of what the kernel claims by `tokens` and `supports` are skipped. Read the
    failures in the order of the tests here: later ones often follow from earlier ones.
    """

    @classmethod
    def cases(cls, found: Subject) -> list[OpCase]:
        return op_cases(found.kernels)

    @classmethod
    def look(cls, found: Subject, case: OpCase) -> tuple[Finding, ...]:
        return (
            *check_kernel(case, found.torch_device, cls.problems, found.offered),
            check_ties(case, found, cls.problems),
        )

    @classmethod
    def untested(cls, found: Subject) -> str:
        names = {kernel.name for kernel in found.all_kernels}
        if not names or found.device is None:
            return ""
        none = f"plugin {found.row.name} has kernels ({len(names)}), and none was tested"
        if found.kernels:
            return f"{none}: none has an op of this core and a dtype of that op"
        device, wanted = found.device, {kernel.device for kernel in found.all_kernels}
        return (
            f"{none}: they are for {', '.join(sorted(wanted))}, and the device under test is "
            f"{device.name} (kind {device.kind}, arch {device.arch or 'none'}). Mend "
            "Kernel.device, or name the device that they are for (device = '…')"
        )

    @classmethod
    def own_names(cls, found: Subject) -> set[str]:
        kernels = found.kernels
        return {kernel.name for kernel in kernels} | {kernel.op for kernel in kernels}

    def test_kernel_claims_some_sample(self, case: OpCase) -> None:
        """`tokens` and `supports` leave at least one call to be judged by. Where a kernel serves
        only a model's own shapes, state them in `problems`."""
        self.settle(case, CLAIM)

    def test_no_other_kernel_goes_first_as_well(self, case: OpCase) -> None:
        """Selection fails where two kernels tie. Give them other ranks, tokens or `supports`."""
        self.settle(case, TIES)

    def test_kernel_runs_on_every_sample_it_claims(self, case: OpCase) -> None:
        """It raised. Sizes 0 and 1 and odd memory forms are usual: handle them or narrow
        `supports`, which then also keeps such calls away from it in models."""
        self.settle(case, "runs")

    def test_results_have_the_declared_form(self, case: OpCase) -> None:
        """Number, shape and dtype of the results, and contiguity where all arguments are."""
        self.settle(case, "form")

    def test_every_element_is_written(self, case: OpCase) -> None:
        """Memory that the launcher allocated holds NaN before the kernel runs; look at the last
        partial tile, and at rows without work."""
        self.settle(case, "written")

    def test_values_agree_with_the_reference(self, case: OpCase) -> None:
        """The reference is float64; the bound is that of the dtype and the length of the sums.
        Look at masks and strides, then at sums kept in a narrow dtype."""
        self.settle(case, "values")

    def test_arguments_keep_their_bits(self, case: OpCase) -> None:
        """A kernel writes to the arguments that its op lists as mutated, rightly, and to no
        other."""
        self.settle(case, "arguments")

    def test_the_same_input_gives_the_same_bits(self, case: OpCase) -> None:
        """Twice in one process. Atomics break it: say `deterministic=False` in the record."""
        self.settle(case, "determinism")

    def test_shape_function_agrees_with_the_kernel(self, case: OpCase) -> None:
        """`Kernel.fake` is what the compiler believes: shapes, dtypes, strides."""
        self.settle(case, "shape function")
