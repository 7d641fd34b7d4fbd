"""`polysilicon new-plugin` writes a package that builds, installs and passes the whole suite."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from installing import install_into, path_with, run, uv
from typer.testing import CliRunner

from polysilicon.cli import build
from polysilicon.scaffold import TEMPLATE, template_files, write_plugin

if TYPE_CHECKING:
    from collections.abc import Callable

CORE = Path(__file__).parents[1]


def _new_plugin(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(build("new-plugin"), ["new-plugin", *arguments])
    return done.exit_code, done.output


def test_command_says_what_it_wrote_and_what_comes_next(fresh: None, tmp_path: Path) -> None:
    status, said = _new_plugin("bolt", "--dir", str(tmp_path))
    package = tmp_path / "polysilicon-bolt"
    assert status == 0
    assert said.splitlines() == [
        f"wrote {package}: {len(template_files())} files. Next:",
        f"  pip install -e '{package}[test]'",
        f"  pytest {package}",
        "  polysilicon explain rms_norm --device bolt:sim",
        "docs/write-a-plugin.md in the repository of polysilicon goes on from here.",
    ]


def test_written_package_installs_and_passes_the_conformance_suite(tmp_path: Path) -> None:
    package, site, report = write_plugin("bolt", tmp_path), tmp_path / "site", tmp_path / "r.json"
    install_into(site, package)
    python = (sys.executable, "-m")
    path = path_with(site)
    run(*python, "pytest", "-q", f"--polysilicon-report={report}", cwd=package, PYTHONPATH=path)
    told = json.loads(report.read_text())
    suites = {suite["suite"].rpartition("::")[2] for suite in told["suites"]}
    assert suites == {"TestPlugin", "TestLayouts", "TestOps", "TestLayers"}
    assert (told["totals"]["failed"], told["totals"]["gap"]) == (0, 0)
    asked = ("polysilicon", "explain", "rms_norm", "--device", "bolt:sim", "--json")
    first = json.loads(run(*python, *asked, PYTHONPATH=path))["candidates"][0]
    assert (first["kernel"], first["origin"]) == ("rms_norm.bolt", "polysilicon-bolt 0.1.0.dev0")


_OWN_CHIPS = """\
CHIPS = tuple(
    Chip(
        name=name,
        arch=arch,
        pci_device=pci_device,
        cores=7,
        scratch_bytes=scratch,
        memory_bytes=8 << 30,
        native_formats=("bfloat16",),
    )
    for name, arch, pci_device, scratch in (
        ("mini", "g1", "0x10de", 24 << 10),
        ("midi", "g2", "0x10df", 192 << 10),
        ("maxi", "g2", "0x10e0", 3 << 20),
    )
)

"""


def test_its_tests_pass_with_other_chips_and_another_tile(tmp_path: Path) -> None:
    package, site = write_plugin("bolt", tmp_path), tmp_path / "site"
    source = package / "src" / "polysilicon_bolt"
    chips, layout = source / "chips.py", source / "layout.py"
    head, _, rest = chips.read_text().partition("CHIPS = (\n")
    tail = rest[rest.index("#: The chip that") :]
    chips.write_text(head.replace('"0xffff"', '"0x8086"') + _OWN_CHIPS + tail)
    tiles = '{"N": 64, "K": 32}'
    assert tiles in layout.read_text()
    layout.write_text(layout.read_text().replace(tiles, '{"N": 16, "K": 16}'))
    install_into(site, package)
    run(sys.executable, "-m", "pytest", "-q", cwd=package, PYTHONPATH=path_with(site))


def test_nothing_of_the_template_vendor_is_left(fresh: None, tmp_path: Path) -> None:
    package = write_plugin("bolt", tmp_path)
    files = [file for file in package.rglob("*") if file.is_file()]
    assert len(files) == len(template_files())
    assert [file for file in files if "acme" in (str(file) + file.read_text()).lower()] == []


def test_it_has_every_file_that_all_plugins_of_this_repository_have() -> None:
    plugins = [file.parent for file in CORE.parent.glob("plugins/*/pyproject.toml")]
    common = set.intersection(*(_named_files(plugin) for plugin in plugins))
    assert "src/polysilicon_acme/plugin.py" in common
    assert common <= {file.as_posix() for file in template_files()}


def _named_files(plugin: Path) -> set[str]:
    """A plugin's files, called as if it were the template's vendor's."""
    files = [file for file in plugin.rglob("*") if file.suffix in (".py", ".md", ".toml", ".typed")]
    return {file.relative_to(plugin).as_posix().replace(plugin.name, "acme") for file in files}


def test_requirement_accepts_this_core_and_the_minor_after_it(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polysilicon.scaffold.core_version", lambda: "0.4.1")
    text = (write_plugin("bolt", tmp_path) / "pyproject.toml").read_text()
    assert 'dependencies = ["polysilicon>=0.4.1,<0.6"]' in text


@pytest.mark.parametrize("name", ["Bolt", "my-chip", "9x", "b", "b" * 13, "bolt/../..", ""])
def test_name_that_no_plugin_can_have(fresh: None, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected 2 to 12 lower-case letters and digits"):
        write_plugin(name, tmp_path)
    assert [*tmp_path.glob("polysilicon*")] == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lambda", "a word of Python's own"),
        ("none", "a word of Python's own"),
        ("torch", "the name of a Python module"),
        ("json", "the name of a Python module"),
    ],
)
def test_name_that_python_has_already(fresh: None, tmp_path: Path, name: str, why: str) -> None:
    status, said = _new_plugin(name, "--dir", str(tmp_path))
    assert status == 2
    assert f"error: plugin name {name!r} is {why}" in said
    assert [*tmp_path.glob("polysilicon*")] == []


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("acme", "acme-good 1.2, installed here"),
        ("core", "polysilicon itself"),
        ("cpu", "core's own device"),
    ],
)
def test_name_that_is_taken(
    install: Callable[..., None], tmp_path: Path, name: str, whose: str
) -> None:
    install("good")
    status, said = _new_plugin(name, "--dir", str(tmp_path))
    assert (status, said) == (2, f"error: the name {name!r} belongs to {whose}: choose another\n")


def test_folder_that_exists_is_left_alone(fresh: None, tmp_path: Path) -> None:
    (tmp_path / "polysilicon-bolt").mkdir()
    with pytest.raises(ValueError, match="polysilicon-bolt is there already"):
        write_plugin("bolt", tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        write_plugin("bolt", tmp_path / "nowhere")


def _needs(tool: str) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not in this environment; nox runs this in its types session")


# A short name joins lines that were wrapped, a long one overruns.
@pytest.mark.parametrize("name", ["qx", "longestname2"])
def test_written_package_is_formatted_and_lints(fresh: None, tmp_path: Path, name: str) -> None:
    _needs("ruff")
    package, ruff = write_plugin(name, tmp_path), (sys.executable, "-m", "ruff")
    run(*ruff, "check", "--no-cache", ".", cwd=package)
    run(*ruff, "format", "--check", "--no-cache", ".", cwd=package)


def test_written_package_has_strict_types(fresh: None, tmp_path: Path) -> None:
    _needs("mypy")
    package = write_plugin("bolt", tmp_path)
    run(sys.executable, "-m", "mypy", cwd=package, MYPYPATH=str(CORE / "src"))


def test_template_travels_in_the_wheel(tmp_path: Path) -> None:
    run(uv(), "build", "--quiet", "--wheel", "--out-dir", tmp_path, CORE)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = zipfile.ZipFile(wheel).namelist()
    root = TEMPLATE.relative_to(CORE / "src").as_posix()
    assert {f"{root}/{file.as_posix()}" for file in template_files()} == {
        name for name in shipped if name.startswith(f"{root}/")
    }
