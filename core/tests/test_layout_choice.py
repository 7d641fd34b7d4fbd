"""The joint choice: an argument lies in one layout for all token counts."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import layout_kernels as lk
import pytest
from tables import CHIP, CPU

from polysilicon.errors import SelectionError
from polysilicon.explaining import explain
from polysilicon.selection import bind
from polysilicon.testing import DeviceUnderTest
from polysilicon.testing.plugin_checks import CHECKS

if TYPE_CHECKING:
    from polysilicon.records import Layout

pytestmark = pytest.mark.usefixtures("fresh")

FEW = lk.linear("on_tiles", name="linear.few", rank=5, tokens=(1, 16))
REST = lk.linear("on_tiles", name="linear.rest", rank=-1)
TURNED = lk.linear("on_turned", lk.TURNED, rank=3)


def served(*kernels: Any, **more: Any) -> list[str]:
    """Names of what serves, few tokens first."""
    binding = bind(lk.problem(), device="cpu", table=lk.table(*kernels), **more)
    assert {name: layout.name for name, layout in binding.layouts.items()} == dict(
        binding.cuts[0][1].kernel.layouts
    )
    return [choice.kernel.name for _, choice in binding.cuts]


def reasons(*kernels: Any, **more: Any) -> dict[str, str]:
    """Why each candidate serves or not."""
    binding = bind(lk.problem(), device="cpu", table=lk.table(*kernels), **more)
    return {c.provided.record.name: c.reason for c in binding.candidates}


def test_the_winner_decides_how_the_weight_lies_for_all_token_counts() -> None:
    assert served(FEW, REST) == ["linear.few", "linear.rest"]
    assert reasons(FEW, REST) == {
        "linear.few": "highest rank (5)",
        "linear.rest": "takes weight in layout acme.tiles, as linear.few, which goes first",
        "linear.torch": (
            "takes weight plain; linear.few, which goes first, takes weight in layout acme.tiles"
        ),
    }


def test_a_winner_without_company_is_refused_and_the_choice_is_made_again() -> None:
    assert served(FEW) == ["linear.torch"]
    assert reasons(FEW)["linear.few"] == (
        "takes weight in layout acme.tiles, and no kernel takes that at ≥17 tokens"
    )
    assert served(FEW, TURNED) == ["linear.on_turned"]


def test_of_two_layouts_the_first_kernels_one_is_taken() -> None:
    assert served(FEW, REST, TURNED) == ["linear.few", "linear.rest"]
    higher = replace(TURNED, rank=7)
    assert served(FEW, REST, higher) == ["linear.on_turned"]
    assert reasons(FEW, REST, higher)["linear.few"] == (
        "takes weight in layout acme.tiles; linear.on_turned, which goes first, takes weight in "
        "layout acme.turned"
    )


def test_a_plain_winner_keeps_it_plain() -> None:
    plain = lk.linear("plain_linear", None, name="linear.quick", rank=9, tokens=(1, 4))
    assert served(FEW, REST, plain) == ["linear.quick", "linear.torch"]


def test_more_specific_goes_before_rank() -> None:
    near = replace(TURNED, rank=0, device="cpu")
    assert served(FEW, REST, near) == ["linear.on_turned"]


def test_kernels_of_two_layouts_that_tie_are_an_error() -> None:
    with pytest.raises(SelectionError, match=r"two kernels tie for linear .* at 1–16 tokens"):
        served(FEW, REST, replace(TURNED, rank=5))


def test_what_the_judge_refuses_decides_nothing() -> None:
    def judge(provided: Any, problem: Any, tokens: Any) -> str | None:
        return "it is slow" if provided.record.name == "linear.few" else None

    # Without few, rest ranks below the plain one.
    assert served(FEW, REST, judge=judge) == ["linear.torch"]


def test_a_kernel_asked_for_by_name_brings_its_layout() -> None:
    assert served(FEW, REST, kernel="linear.rest") == ["linear.rest"]


def test_the_suite_names_layouts_that_core_would_never_choose() -> None:
    kernels = (
        lk.linear("on_tiles"),
        lk.linear("on_turned", lk.TURNED),
        lk.linear("on_tiles", lk.PLAIN, name="linear.on_plain"),
        replace(lk.linear("on_tiles", name="linear.on_x"), layouts={"x": "acme.tiles"}),
    )
    offered = {layout.name: layout for layout in (lk.TILES, lk.PLAIN)}
    found: Any = SimpleNamespace(kernels=kernels, offered=offered)
    assert list(CHECKS["layouts"](DeviceUnderTest, found)) == [
        "linear.on_turned takes weight in layout acme.turned: offered are acme.tiles, plain",
        "linear.on_plain takes weight in layout plain: expected one for linear_weight with pack "
        "and unpack",
        "linear.on_x takes x in layout acme.tiles: linear gives roles to weight",
    ]


@pytest.mark.parametrize(
    ("kernel", "layouts", "reason"),
    [
        (lk.linear("on_tiles", rank=1), (lk.PLAIN,), "which no plugin offers here .*: plain"),
        (
            replace(lk.linear("on_tiles", rank=1), layouts={"x": "acme.tiles"}),
            (lk.TILES,),
            r"linear gives that argument no role \(with one: weight\)",
        ),
        (
            lk.linear("on_tiles", rank=1),
            (replace(lk.TILES, role="embedding"),),
            "which is for embedding and not for linear_weight",
        ),
        (lk.linear("on_tiles", lk.PLAIN, rank=1), (lk.PLAIN,), "has no pack: leave plain"),
        (
            lk.linear("on_tiles", rank=1),
            (replace(lk.TILES, facts={"dtypes": "bfloat16 float16"}),),
            "which takes bfloat16, float16, not float32",
        ),
    ],
    ids=["not offered", "no role", "other role", "no pack", "other dtype"],
)
def test_a_layout_that_cannot_be_used_is_told(
    kernel: Any, layouts: tuple[Layout, ...], reason: str
) -> None:
    table = lk.table(kernel, layouts=layouts)
    binding = bind(lk.problem(), device="cpu", table=table)
    told = {c.provided.record.name: c.reason for c in binding.candidates}
    assert binding.cuts[0][1].kernel.name == "linear.torch"
    assert not binding.layouts
    assert re.search(reason, told[kernel.name])
    with pytest.raises(SelectionError, match=reason):
        bind(lk.problem(), device="cpu", table=table, kernel=kernel.name)


def test_an_argument_that_must_stay_plain_does() -> None:
    plain = {"weight": "it is shared"}
    assert served(FEW, REST, plain=plain) == ["linear.torch"]
    assert reasons(FEW, REST, plain=plain)["linear.few"] == (
        "takes weight in layout acme.tiles, and it must stay plain: it is shared"
    )


def test_explain_says_which_layout_was_chosen() -> None:
    told = explain(lk.problem(), device="cpu", table=lk.table(FEW, REST))
    assert told.layouts == told.as_dict()["layouts"] == {"weight": "acme.tiles"}
    assert told.as_dict()["candidates"][0]["layouts"] == {"weight": "acme.tiles"}
    assert "on cpu, weight in acme.tiles" in str(told)


def test_the_first_layout_of_a_role_is_the_default_and_all_can_be_asked_for() -> None:
    table = lk.table(device=CHIP)
    assert table.layout(CHIP, "linear_weight").record is lk.TILES
    assert list(table.offered(CHIP)) == ["acme.tiles", "acme.turned", "plain"]
    assert table.offered(CPU) == {}


def test_nothing_that_covers_the_range_lists_every_reason() -> None:
    table = lk.table(FEW, replace(TURNED, tokens=(4, 64)), portable=False)
    with pytest.raises(SelectionError, match=r"no kernel serves linear on cpu for .* tokens") as e:
        bind(lk.problem(), device="cpu", table=table)
    assert "linear.few" in str(e.value)
