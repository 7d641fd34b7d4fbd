"""bind(): precedence, cuts, fallbacks, opaque ops, and what each error says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tables import ACME, CHIP, CORE, CPU, kernel, opaque, problem, table

from polysilicon.blame import kernel_failed
from polysilicon.errors import KernelError, PolysiliconWarning, SelectionError
from polysilicon.records import Kernel, Problem, Provided
from polysilicon.selection import bind, build_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from polysilicon.selection import Binding, Table

pytestmark = pytest.mark.usefixtures("fresh")


def _chosen(binding: Binding) -> list[tuple[int, str]]:
    return [(highest, choice.kernel.name) for highest, choice in binding.cuts]


def _bind(found: Table, asked: Problem | None = None, **more: Any) -> Binding:
    return bind(asked or problem(), device=found.devices[0], table=found, **more)


def _reasons(binding: Binding) -> dict[str, str]:
    return {one.provided.record.name: one.reason for one in binding.candidates}


# --- precedence ---


def test_one_traceable_kernel_is_bound_as_its_function_itself() -> None:
    from fake_kernels import right

    assert _bind(table(kernel("right"), portable=False)).fn is right


@pytest.mark.parametrize("device", ["acme", "acme:a1", "acme:x1"])
def test_more_specific_device_beats_any_rank(device: str) -> None:
    found = table(kernel("right", device=device), kernel("second", rank=99), device=CHIP)
    binding = _bind(found)
    assert _chosen(binding) == [(1 << 20, "silu_and_mul.right")]
    assert _reasons(binding)["silu_and_mul.right"] == f"most specific device ({device})"


def test_specificity_is_name_then_architecture_then_kind_then_any() -> None:
    kernels = [
        kernel("right", name=f"silu_and_mul.{i}", device=device)
        for i, device in enumerate(("acme:x1", "acme:a1", "acme", "*"))
    ]
    for skip in range(4):
        assert _chosen(_bind(table(*kernels[skip:], device=CHIP, portable=False))) == [
            (1 << 20, f"silu_and_mul.{skip}")
        ]


def test_higher_rank_wins_among_equally_specific() -> None:
    binding = _bind(table(kernel("right", rank=2), kernel("second", rank=3)))
    assert _chosen(binding) == [(1 << 20, "silu_and_mul.second")]
    assert _reasons(binding)["silu_and_mul.second"] == "highest rank (3)"
    assert "ranks higher" in _reasons(binding)["silu_and_mul.right"]


def test_order_of_registration_decides_nothing() -> None:
    one, other = kernel("right", rank=2), kernel("second", rank=3)
    assert _chosen(_bind(table(one, other))) == _chosen(_bind(table(other, one)))


def test_a_tie_is_an_error_that_names_both_with_their_origins() -> None:
    with pytest.raises(SelectionError) as caught:
        _bind(table(kernel("right", rank=1), kernel("second", rank=1)))
    text = str(caught.value)
    assert "silu_and_mul.right (polysilicon-acme 1.2, rank 1)" in text
    assert "silu_and_mul.second (polysilicon-acme 1.2, rank 1)" in text
    assert "POLYSILICON_DISABLE_KERNELS=" in text


def test_a_tie_below_the_winner_does_not_matter() -> None:
    found = table(kernel("right", rank=1), kernel("second", rank=1), kernel("slow", rank=2))
    assert _chosen(_bind(found)) == [(1 << 20, "silu_and_mul.slow")]


# --- reasons against ---


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"device": "other:z9"}, "is for other:z9, this is cpu"),
        ({"dtypes": frozenset({"bfloat16"})}, "takes bfloat16, not float32"),
        ({"supports": lambda problem: "width is odd"}, "width is odd"),
        ({"supports": lambda problem: 1 / 0}, "its supports() raised ZeroDivisionError"),
        ({"supports": lambda problem: True}, "its supports() answered True: expected None or the"),
        ({"supports": lambda problem: False}, "its supports() answered False: expected None or"),
        ({"supports": lambda problem: ""}, "its supports() answered '': expected None or the"),
    ],
)
def test_kernel_that_does_not_fit_keeps_its_reason(more: dict[str, Any], reason: str) -> None:
    binding = _bind(table(kernel("right", rank=9, **more)))
    assert _chosen(binding) == [(1 << 20, "silu_and_mul.torch")]
    assert reason in _reasons(binding)["silu_and_mul.right"]


def test_kernel_outside_its_tokens_is_no_candidate() -> None:
    binding = _bind(table(kernel("right", rank=9, tokens=(64, 128))), problem(1, 32))
    assert _reasons(binding)["silu_and_mul.right"] == "serves 64–128 tokens, not 1–32"


def test_nothing_fits_prints_every_candidate_with_its_reason() -> None:
    found = table(kernel("right", device="other"), kernel("second", tokens=(1, 4)), portable=False)
    with pytest.raises(SelectionError) as caught:
        _bind(found)
    text = str(caught.value)
    assert "no kernel serves silu_and_mul on cpu for ≥5 tokens" in text
    assert "is for other, this is cpu" in text
    assert "silu_and_mul.second" in text


def test_unknown_fact_lists_the_facts_of_the_op() -> None:
    with pytest.raises(ValueError, match="silu_and_mul has no fact 'widht': its facts are width"):
        _bind(table(), problem(widht=3))


def test_unknown_op_lists_the_ops() -> None:
    with pytest.raises(ValueError, match="there is no op 'rms_nrom': one of rms_norm"):
        _bind(table(), Problem(op="rms_nrom", dtype="float32"))


# --- the switch ---


def test_disabled_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSILICON_DISABLE_KERNELS", "silu_and_mul.right")
    binding = _bind(table(kernel("right", rank=9)))
    assert _chosen(binding) == [(1 << 20, "silu_and_mul.torch")]
    assert "POLYSILICON_DISABLE_KERNELS" in _reasons(binding)["silu_and_mul.right"]


def test_unknown_name_in_the_switch_warns_with_close_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYSILICON_DISABLE_KERNELS", "silu_and_mul.rihgt")
    with pytest.warns(PolysiliconWarning, match=r"'silu_and_mul.rihgt'.*Close: silu_and_mul.right"):
        table(kernel("right", rank=9))


def test_kernel_for_an_op_of_another_core_is_told_and_not_used() -> None:
    newer = Kernel(op="rms_norm_of_tomorrow", name="rms_norm_of_tomorrow.x", target="a:b")
    with pytest.warns(PolysiliconWarning, match="which this core does not have"):
        table(newer)


# --- imports that fail ---


def _broken(**more: Any) -> Kernel:
    return Kernel(op="silu_and_mul", name="silu_and_mul.gone", target="no_such_module:f", **more)


def test_automatic_choice_that_cannot_be_imported_falls_back_with_one_warning() -> None:
    with pytest.warns(PolysiliconWarning, match=r"silu_and_mul.gone .* could not be imported"):
        binding = _bind(table(_broken(rank=9)))
    assert _chosen(binding) == [(1 << 20, "silu_and_mul.torch")]
    assert "No module named 'no_such_module'" in _reasons(binding)["silu_and_mul.gone"]
    _bind(table(_broken(rank=9)))  # a second warning would be an error here


def test_choice_by_name_that_cannot_be_imported_fails() -> None:
    with pytest.raises(SelectionError, match=r"silu_and_mul\.gone could not be imported"):
        _bind(table(_broken()), kernel="silu_and_mul.gone")


def test_choice_by_name_beats_rank() -> None:
    found = table(kernel("right", rank=1), kernel("second", rank=2))
    assert _chosen(_bind(found, kernel="silu_and_mul.right")) == [(1 << 20, "silu_and_mul.right")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu_and_mul.right", "can't serve silu_and_mul: is for other, this is cpu"),
        ("silu_and_mul.rihgt", "there is no kernel 'silu_and_mul.rihgt' .* there are"),
    ],
)
def test_choice_by_name_that_does_not_fit_fails(name: str, expected: str) -> None:
    with pytest.raises(SelectionError, match=expected):
        _bind(table(kernel("right", device="other")), kernel=name)


# --- cuts ---


def test_token_ranges_cut_the_problem_and_rank_decides_where_they_overlap() -> None:
    found = table(kernel("right", rank=1, tokens=(1, 16)), kernel("second", rank=2, tokens=(8, 64)))
    assert _chosen(_bind(found)) == [
        (7, "silu_and_mul.right"),
        (64, "silu_and_mul.second"),
        (1 << 20, "silu_and_mul.torch"),
    ]


def test_cuts_keep_to_the_problem() -> None:
    found = table(kernel("right", rank=1, tokens=(1, 16)))
    assert _chosen(_bind(found, problem(4, 16))) == [(16, "silu_and_mul.right")]
    assert _chosen(_bind(found, problem(17, 32))) == [(32, "silu_and_mul.torch")]


def _marked(low: int, high: int, form: str) -> Table:
    make = kernel if form == "traceable" else opaque
    return table(make("wrong", rank=1, tokens=(low, high)))


@pytest.mark.parametrize("form", ["traceable", "opaque"])
@pytest.mark.parametrize("how", ["eager", "static", "dynamic", "keyword"])
def test_cut_list_calls_the_kernel_of_the_token_count(form: str, how: str) -> None:
    from fake_kernels import right, wrong

    fn = _bind(_marked(3, 5, form)).fn
    call: Callable[..., Any] = {
        "eager": fn,
        "keyword": lambda x: fn(x=x),
        "static": torch.compile(fn, fullgraph=True, backend="aot_eager"),
        "dynamic": torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager"),
    }[how]
    with torch.inference_mode():
        for tokens in (1, 2, 3, 5, 6, 40):
            x = torch.randn(tokens, 8)
            expected = wrong(x) if 3 <= tokens <= 5 else right(x)
            torch.testing.assert_close(call(x), expected)


def test_equal_cut_lists_share_one_op() -> None:
    assert _bind(_marked(3, 5, "opaque")).fn is _bind(_marked(3, 5, "opaque")).fn


def test_equal_problems_have_equal_keys_and_different_ones_do_not() -> None:
    assert problem(width=3).key == problem(width=3).key
    assert problem(width=3).key != problem(width=4).key


# --- opaque kernels ---


def test_opaque_kernel_is_bound_as_its_own_torch_library_op() -> None:
    fn = _bind(table(opaque("right", rank=1))).fn
    assert fn is torch.ops.polysilicon.silu_and_mul__right.default
    x = torch.randn(3, 8)
    torch.testing.assert_close(fn(x), x[:, :4].sigmoid() * x[:, :4] * x[:, 4:])


def test_opaque_kernel_passes_torchs_own_checks() -> None:
    fn: Any = _bind(table(opaque("right", rank=1))).fn
    with torch.inference_mode():
        torch.library.opcheck(
            fn, (torch.randn(3, 8),), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_through_an_opaque_kernel_raises(compiled: bool) -> None:
    fn = _bind(table(opaque("right", rank=1))).fn
    call = torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(Exception, match="has no gradient"):
        call(x)
    with torch.no_grad():
        call(x)


def test_one_op_name_for_two_functions_is_refused() -> None:
    _bind(table(opaque("right", name="silu_and_mul.shared", rank=1)))
    with pytest.raises(SelectionError, match="silu_and_mul__shared is already defined by"):
        _bind(
            table(opaque("second", name="silu_and_mul.shared", rank=1)),
            kernel="silu_and_mul.shared",
        )


# --- the judge ---


def test_judge_refuses_in_one_bucket_and_the_kernel_goes_from_all() -> None:
    found = table(kernel("right", rank=1), kernel("second", rank=2, tokens=(1, 4)))
    asked: list[tuple[str, tuple[int, int]]] = []

    def judge(entry: Provided[Kernel], asked_for: Problem, tokens: tuple[int, int]) -> str | None:
        asked.append((entry.record.name, tokens))
        bad = entry.record.name == "silu_and_mul.right" and tokens[0] > 4
        return "wrong above 4" if bad else None

    binding = _bind(found, judge=judge)
    assert _chosen(binding) == [(4, "silu_and_mul.second"), (1 << 20, "silu_and_mul.torch")]
    assert _reasons(binding)["silu_and_mul.right"] == "wrong above 4"
    assert ("silu_and_mul.second", (1, 4)) in asked


# --- fingerprint ---


def test_fingerprint_is_stable_and_changes_with_any_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = table(kernel("right", supports=lambda problem: None, rank=1))
    same = table(kernel("right", supports=lambda problem: None, rank=1))
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != table(kernel("right", rank=2)).fingerprint
    monkeypatch.setenv("POLYSILICON_DISABLE_KERNELS", "silu_and_mul.right")
    assert one.fingerprint != table(kernel("right", rank=1)).fingerprint


def test_missing_layout_role_says_so() -> None:
    with pytest.raises(SelectionError, match="no layout for role 'kv_block' on cpu"):
        table().layout(CPU, "kv_block")


# --- blame ---


@pytest.mark.parametrize("make", [kernel, opaque])
def test_kernel_that_raises_is_named_with_the_remedy(make: Callable[..., Kernel]) -> None:
    name = f"silu_and_mul.raises_{make.__name__}"
    found = table(make("raises", name=name, rank=1))
    binding = _bind(found)
    with torch.inference_mode(), pytest.raises(RuntimeError) as caught:
        binding.fn(torch.randn(2, 4))
    blamed = kernel_failed(caught.value, [binding])
    assert isinstance(blamed, KernelError)
    assert f"kernel {name} (polysilicon-acme 1.2) raised on cpu" in str(blamed)
    assert "misaligned address" in str(blamed)
    assert f"POLYSILICON_DISABLE_KERNELS={name}" in str(blamed)


def test_error_outside_any_kernel_is_not_blamed_on_one() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert kernel_failed(caught.value, [_bind(table(kernel("right", rank=1)))]) is None


def test_two_plugins_on_one_device_keep_their_origins() -> None:
    found = table(kernel("right", rank=1))
    assert [entry.origin for entry in found.kernels["cpu"]] == [ACME, CORE]
    again = build_table(
        devices=found.provided_devices, layouts=found.layouts, kernels=found.kernels
    )
    assert again.fingerprint == found.fingerprint
