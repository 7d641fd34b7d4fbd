"""What a plugin is held to without its hardware and without torch; needs no pytest."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from polysilicon import ops
from polysilicon.discovery import API_MAJOR, CORE, GROUP, entry_points
from polysilicon.errors import DeviceError
from polysilicon.plugins import gather
from polysilicon.records import Problem
from polysilicon.scaffold import accepted_range
from polysilicon.testing.findings import Finding, close
from polysilicon.testing.subject import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from polysilicon.records import Device, Provided
    from polysilicon.testing.subject import DeviceUnderTest, Subject

#: Longest that one `polysilicon_devices` may take, the best of a few calls.
DETECTION_SECONDS = 0.05
#: What importing a plugin module may bring in, beyond itself and the standard library.
LIGHT = ("polysilicon", "pluggy", "packaging", "importlib_metadata")
#: What detection may not import: each costs seconds. Small vendor libraries are what it is for.
HEAVY = ("torch", "triton", "transformers")

# Asked in a process of its own: this one has imported torch long ago. Of what comes in, only what
# the plugin itself asks for is told: torch brings dozens of others.
_ALONE = """
import builtins, importlib, json, sys, time
known = set(sys.modules)
own = {*json.loads(sys.argv[2]), sys.argv[1].partition(".")[0]}
askers, importing = {}, builtins.__import__
def spy(name, scope=None, *more, **named):
    asker = (scope or {}).get("__name__") or ""
    if asker.partition(".")[0] in own:
        askers.setdefault(name.partition(".")[0], asker)
    return importing(name, scope, *more, **named)
builtins.__import__ = spy
module = importlib.import_module(sys.argv[1])
builtins.__import__ = importing
light = {*own, *sys.stdlib_module_names, "__main__", "__mp_main__"}
came = {name.partition(".")[0] for name in set(sys.modules) - known} - light
heavy = sorted(came & set(askers) or came)
told = [f"{name} (in {askers[name]})" if name in askers else name for name in heavy]
seconds, error = [], ""
ask = getattr(module, "polysilicon_devices", None)
try:
    for _ in range(5 if ask else 0):
        begin = time.perf_counter()
        list(ask() or ())
        seconds.append(time.perf_counter() - begin)
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}"
later = [name for name in json.loads(sys.argv[3]) if name in sys.modules and name not in came]
print(json.dumps({"heavy": told, "later": later, "seconds": seconds, "error": error}))
"""


def check_plugin(under_test: type[DeviceUnderTest], found: Subject) -> tuple[Finding, ...]:
    """Every check of the plugin as a whole."""
    rows = []
    for check, look in CHECKS.items():
        texts = list(look(under_test, found))
        skipped = next((text[1:] for text in texts if text.startswith(_SKIP)), "")
        wrong = "; ".join(text for text in texts if not text.startswith(_SKIP))
        rows.append(
            Finding(names=("plugin",), details=(), check=check, text=wrong, skipped=skipped)
        )
    return tuple(rows)


#: Marks a text as the reason why a check does not apply.
_SKIP = "~"


def _module(found: Subject) -> str:
    if found.row.name == CORE:
        return "polysilicon.defaults"
    group = f"{GROUP}{API_MAJOR}"
    for _, entry_point in entry_points(group):
        if (entry_point.group, entry_point.name) == (group, found.row.name):
            return entry_point.module
    raise AssertionError(f"{found.row.name} is active and has no entry point")


@functools.cache
def _alone(module: str, environment: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    ran = subprocess.run(
        [sys.executable, "-c", _ALONE, module, json.dumps(LIGHT), json.dumps(HEAVY)],
        capture_output=True,
        text=True,
        env=dict(environment),
        check=False,
    )
    if ran.returncode:
        line = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        return {"broken": [f"importing {module} alone failed: {line}"]}
    told: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return told


def _told(found: Subject) -> dict[str, list[str]]:
    kept = {k: v for k, v in os.environ.items() if k != "POLYSILICON_DEVICE"}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return _alone(_module(found), tuple(sorted(kept.items())))


def _light_import(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    told = _told(found)
    yield from told.get("broken", ())
    if told.get("heavy"):
        what = ", ".join(told["heavy"])
        yield f"importing {_module(found)} imports {what}: import inside the function that needs it"


def _detection(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    told = _told(found)
    if told.get("error"):
        yield f"polysilicon_devices raised {told['error']}"
    if told.get("later"):
        what = ", ".join(told["later"])
        yield f"polysilicon_devices imports {what}: every listing waits for it; read sysfs instead"
    best = min(map(float, told.get("seconds", ())), default=0.0)
    if best > DETECTION_SECONDS:
        limit = f"{DETECTION_SECONDS * 1e3:.0f} ms"
        yield f"polysilicon_devices takes {best * 1e3:.0f} ms, expected at most {limit}"


def _forced_device(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    if under_test.device is None:
        yield _SKIP + "no device is named (device = '…')"
    elif found.device is None or not any(
        provided.record is found.device and provided.origin.plugin == found.row.name
        for provided in found.table.provided_devices
    ):
        yield f"POLYSILICON_DEVICE={under_test.device} gives no record of this plugin"


def _steady_answers(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    with environment(under_test):
        first, second = (_answers_of(found.row.name) for _ in range(2))
    if first != second:
        yield "the hooks gave other records when they were asked again"


def _answers_of(plugin: str) -> str:
    answers = gather()
    entries: list[Provided[Any]] = [*answers.devices]
    for by_device in (answers.layouts, answers.kernels):
        entries += [entry for own in by_device.values() for entry in own]
    return repr([entry.record for entry in entries if entry.origin.plugin == plugin])


def _targets(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    wanted: dict[str, str] = {}
    for kernel in found.all_kernels:
        for field in ("target", "fake", "offline"):
            wanted.setdefault(getattr(kernel, field), f"{field} of {kernel.name}")
    for layout in found.layouts:
        for field in ("pack", "unpack"):
            wanted.setdefault(getattr(layout, field), f"{field} of {layout.name}")
    for device in found.own_devices:
        wanted.setdefault(device.activate or "", f"activate of {device.name}")
    for target, name in wanted.items():
        if target and (text := _unresolved(target)):
            yield f"{name}: {text}"


def _devices(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    kernels: dict[str, list[str]] = {}
    for kernel in found.all_kernels:
        names = kernels.setdefault(kernel.device, [])
        names += [kernel.name] if kernel.name not in names else []
    for wanted, names in kernels.items():
        if not _answered(wanted, found):
            own = found.own_devices
            forms = sorted({f for d in own for f in (d.name, d.kind, f"{d.kind}:{d.arch}")})
            yield (
                f"{', '.join(names)}: Kernel.device is {wanted!r}, and no device answers to that"
                f"{close(wanted, forms)}: expected '*', a kind, kind:arch or a device's name; this "
                f"plugin's are {', '.join(form.rstrip(':') for form in forms) or 'none here'}"
            )


def _answered(wanted: str, found: Subject) -> bool:
    """Whether a device that is here is what a kernel is for, or one that can be forced."""
    if wanted.startswith("*:"):  # what a device of another plugin may state
        return True
    if _serves(wanted, found.table.devices):
        return True
    try:
        forced = [provided.record for provided in gather([wanted]).devices]
    except DeviceError:
        # None is here, and a plugin tells which of the kind there are.
        return ":" not in wanted and not found.own_devices
    return _serves(wanted, forced)


def _serves(wanted: str, devices: Iterable[Device]) -> bool:
    forms = {"*", *(form for d in devices for form in (d.name, d.kind, f"{d.kind}:{d.arch}"))}
    return wanted in forms


def _unresolved(target: str) -> str:
    """Why a target can't be, read from its source: importing it may need a toolchain."""
    module, _, attribute = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        return f"{target}: {error}"
    if spec is None or spec.origin is None:
        return f"there is no module {module} ({target})"
    if not spec.origin.endswith(".py"):
        return ""  # compiled: OpSuite imports it
    return "" if attribute in _top_level(spec.origin) else f"{module} has no {attribute}"


@functools.cache
def _top_level(file: str) -> frozenset[str]:
    """Names that a source file may define at its top level, inside `if` and `try` too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)


def _known_ops(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    for kernel in found.kernels:
        if kernel.op not in ops.NAMES:
            yield (
                f"{kernel.name} is for op {kernel.op!r}, which this core does not have"
                f"{close(kernel.op, ops.NAMES)}; `polysilicon kernels` lists the ops"
            )


def _layouts(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    for kernel in found.kernels:
        roles = ops.get(kernel.op).roles if kernel.op in ops.NAMES else {}
        for argument, name in kernel.layouts.items():
            layout = found.offered.get(name)
            takes = f"{kernel.name} takes {argument} in layout {name}"
            if argument not in roles:
                yield f"{takes}: {kernel.op} gives roles to {', '.join(roles) or 'no argument'}"
            elif layout is None:
                yield f"{takes}: offered are {', '.join(found.offered)}"
            elif layout.role != roles[argument] or layout.pack is None:
                yield f"{takes}: expected one for {roles[argument]} with pack and unpack"


def _supports(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    for kernel in found.kernels:
        if kernel.supports is None:
            continue
        dtype = min(kernel.dtypes, default="float32")
        try:
            answer = kernel.supports(Problem(op=kernel.op, dtype=dtype))
        except Exception as error:
            yield (
                f"supports of {kernel.name} raised {type(error).__name__} on a problem without "
                f"facts: {error}"
            )
        else:
            if not (answer is None or (isinstance(answer, str) and answer)):
                yield f"supports of {kernel.name} answered {answer!r}: expected None or a reason"


def _bounds(under_test: type[DeviceUnderTest], found: Subject) -> Iterator[str]:
    if found.row.name == CORE:
        yield _SKIP + "core does not depend on itself"
        return
    floor, ceiling = accepted_range().split(",")
    operators = set()
    for text in distribution(found.row.distribution).requires or ():
        requirement = Requirement(text)
        if requirement.name.lower() == "polysilicon":
            operators |= {bound.operator for bound in requirement.specifier}
    if not operators & {">=", ">", "~=", "=="}:
        yield f"{found.row.distribution} requires no lowest polysilicon: add {floor}"
    if not operators & {"<", "<=", "~=", "=="}:
        yield f"{found.row.distribution} requires no highest polysilicon: add {ceiling}"


#: Check → what looks at it; each yields what is wrong, or one reason not to look.
CHECKS: dict[str, Callable[[type[DeviceUnderTest], Subject], Iterator[str]]] = {
    "light import": _light_import,
    "detection": _detection,
    "forced device": _forced_device,
    "steady answers": _steady_answers,
    "targets": _targets,
    "devices": _devices,
    "known ops": _known_ops,
    "layouts": _layouts,
    "supports": _supports,
    "floor and ceiling": _bounds,
}
