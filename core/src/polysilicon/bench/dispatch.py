"""What one call through a bound op costs, next to its alternatives, in one process and one run.

The kernels do next to nothing, so that the call is what is measured. Forms are interleaved round
by round: a machine that slows down slows all of them.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy
import torch

from polysilicon.discovery import CORE, core_version
from polysilicon.records import Device, Kernel, Origin, Problem, Provided
from polysilicon.selection import Table, bind, build_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType
    from torch import Tensor

    Call = Callable[[Tensor], Any]

#: The op whose signature is the shortest: `(Tensor x) -> Tensor`.
OP = "silu_and_mul"


#: What each form is compared with.
COMPARED = {
    "bound": "plain",
    "cuts": "plain",
    "method": "plain",
    "module": "plain",
    "opaque": "library",
    "opaque_cuts": "library",
    "pluggy": "plain",
}


def nothing(x: Tensor) -> Tensor:
    """The traceable kernel of this benchmark."""
    return x


def nothing_else(x: Tensor) -> Tensor:
    """A second one, so that there is a cut to choose at."""
    return x


def allocate(x: Tensor) -> Tensor:
    """The opaque kernel of this benchmark: an op may not return its argument."""
    return x.new_empty(0)


def allocate_fake(x: Tensor) -> Tensor:
    """Its shape function."""
    return x.new_empty(0)


class Module(torch.nn.Module):
    """A module and a method around the bound kernel."""

    def __init__(self, kernel: Call) -> None:
        super().__init__()
        self.kernel = kernel

    def method(self, x: Tensor) -> Any:
        """What a layer does: call the attribute that was bound."""
        return self.kernel(x)

    forward = method


class Hooks:
    """A pluggy hook with one implementation, for the peers that dispatch that way."""

    spec = pluggy.HookspecMarker("polysilicon_bench")
    mark = pluggy.HookimplMarker("polysilicon_bench")

    @spec(firstresult=True)
    def run(self, x: Tensor) -> Any:
        """Declares the hook."""

    class Plugin:
        """Implements it."""

        def run(self, x: Tensor) -> Any:
            """Does what the plain call does."""
            return nothing(x)

    Plugin.run = mark(Plugin.run)  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Microseconds a call by form: the fastest round, the median one, and ratios of the fastest.

    Whatever else runs on the machine only ever adds time: the fastest rounds compare the forms.
    `import_s` is what `import polysilicon` takes, `plugins_s` all of `polysilicon plugins`, in
    seconds, in fresh processes.
    """

    rounds: int
    calls: int
    fastest: Mapping[str, float]
    median: Mapping[str, float]
    ratios: Mapping[str, float]
    import_s: float
    plugins_s: float

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON of `polysilicon bench dispatch` (docs/json.md)."""
        data: dict[str, Any] = {"schema": 1, "rounds": self.rounds, "calls": self.calls}
        data |= {"import_s": round(self.import_s, 4), "plugins_s": round(self.plugins_s, 4)}
        data |= {f"{form}_us": round(value, 4) for form, value in self.fastest.items()}
        data |= {f"{form}_median_us": round(value, 4) for form, value in self.median.items()}
        return data | {f"{form}_ratio": round(value, 3) for form, value in self.ratios.items()}

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as RichTable

        shown = RichTable("one call", "fastest µs", "median µs", "ratio")
        ratios = {form: f"{value:.2f} × {COMPARED[form]}" for form, value in self.ratios.items()}
        for form, fastest in self.fastest.items():
            row = (f"{fastest:.3f}", f"{self.median[form]:.3f}", ratios.get(form, ""))
            shown.add_row(_TITLES[form], *row)
        listing = f"polysilicon plugins: {self.plugins_s:.2f} s"
        once = f"import polysilicon: {self.import_s:.3f} s; {listing}"
        return Group(shown, once)


_TITLES = {
    "plain": "plain Python call",
    "bound": "bound op, traceable",
    "cuts": "bound op, traceable, two kernels by token count",
    "method": "bound op inside a method",
    "module": "bound op inside nn.Module.__call__",
    "library": "bare torch.library op",
    "opaque": "bound op, opaque",
    "opaque_cuts": "bound op, opaque, two kernels by token count",
    "pluggy": "pluggy hook, one plugin",
}


def _table(*kernels: tuple[str, dict[str, Any]]) -> Table:
    origin = Origin(plugin=CORE, distribution="polysilicon", version=core_version() or "source")
    device = Device(name="cpu", kind="cpu")
    home = __name__
    records = [
        Kernel(op=OP, name=f"{OP}.bench_{function}", target=f"{home}:{function}", **more)
        for function, more in kernels
    ]
    return build_table(
        devices=[Provided(record=device, origin=origin)],
        layouts={"cpu": ()},
        kernels={"cpu": [Provided(record=record, origin=origin) for record in records]},
    )


def _bound(*kernels: tuple[str, dict[str, Any]]) -> Call:
    return bind(Problem(op=OP, dtype="float32"), device="cpu", table=_table(*kernels)).fn


@functools.cache
def _library() -> Any:
    """The library that owns the bare op: made once, alive as long as the process."""
    library: Any = torch.library.Library("polysilicon_bench", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("bare(Tensor x) -> Tensor")
    library.impl("bare", allocate, "CompositeExplicitAutograd")
    return library


def _bare() -> Call:
    _library()
    found: Call = torch.ops.polysilicon_bench.bare.default
    return found


def forms() -> dict[str, Call]:
    """Every form of call by name, ready to be timed."""
    opaque = {"form": "opaque", "fake": f"{__name__}:allocate_fake"}
    few = {"tokens": (1, 16), "rank": 1}
    bound = _bound(("nothing", {}))
    module = Module(bound)
    manager = pluggy.PluginManager("polysilicon_bench")
    manager.add_hookspecs(Hooks)
    manager.register(Hooks.Plugin())
    hook = manager.hook.run
    return {
        "plain": nothing,
        "bound": bound,
        "cuts": _bound(("nothing", {}), ("nothing_else", few)),
        "method": module.method,
        "module": module,
        "library": _bare(),
        "opaque": _bound(("allocate", opaque)),
        "opaque_cuts": _bound(("allocate", opaque), ("nothing_else", few)),
        "pluggy": lambda x: hook(x=x),
    }


def measure(*, rounds: int = 30, calls: int = 2000) -> Result:
    """Times every form in interleaved rounds."""
    x = torch.zeros(64, 8)
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        known = forms()
        for call in known.values():
            _time(call, x, calls)
        for _ in range(rounds):
            for form, call in known.items():
                times.setdefault(form, []).append(_time(call, x, calls))
    fastest = {form: min(values) for form, values in times.items()}
    return Result(
        rounds=rounds,
        calls=calls,
        fastest=fastest,
        median={form: statistics.median(values) for form, values in times.items()},
        ratios={form: fastest[form] / fastest[base] for form, base in COMPARED.items()},
        import_s=min(float(_fresh("-c", _IMPORT)[1]) for _ in range(3)),
        plugins_s=min(_fresh("-m", "polysilicon", "plugins")[0] for _ in range(3)),
    )


_IMPORT = """
import time
begin = time.perf_counter()
import polysilicon
print(time.perf_counter() - begin)
"""


def _fresh(*arguments: str) -> tuple[float, str]:
    """Seconds that a Python process takes from start to end, and what it prints."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, done.stdout


def _time(call: Call, x: Tensor, calls: int) -> float:
    """Microseconds a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call(x)
    return (time.perf_counter() - begin) / calls * 1e6
