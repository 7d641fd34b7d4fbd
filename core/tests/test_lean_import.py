"""Importing polysilicon, and listing plugins, costs no torch and little time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "rich", "typer", "pluggy", "packaging")


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import polysilicon", HEAVY),
        ("import polysilicon; polysilicon.__version__", HEAVY[:5]),
        ("import polysilicon.api", HEAVY[:5]),
        ("import polysilicon; polysilicon.plugins()", HEAVY[:5]),
        ("import polysilicon; polysilicon.devices()", HEAVY[:5]),
        ("import polysilicon.cli; polysilicon.cli.build()", ("torch", "transformers", "numpy")),
    ],
)
def test_import_stays_lean(code: str, banned: tuple[str, ...]) -> None:
    loaded = json.loads(_run(f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in banned if name in loaded] == []


def test_a_missing_extra_is_named_by_the_command_and_by_the_package() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['polysilicon', 'run', 'hi']\n"
        "import polysilicon\n"
        "try: polysilicon.load\n"
        "except ImportError as error: print(error)\n"
        "from polysilicon.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "transformers is not installed: pip install 'polysilicon[models]'"
    assert done.returncode == 2
    assert done.stdout.strip() == f"polysilicon.load: {said}"
    assert done.stderr.strip() == f"error: {said}"


def test_public_names_are_all_there() -> None:
    import polysilicon

    for name in polysilicon.__all__:
        assert getattr(polysilicon, name) is not None
    assert set(polysilicon.__all__) <= set(dir(polysilicon))


def test_unknown_name_is_an_attribute_error() -> None:
    import polysilicon

    with pytest.raises(AttributeError, match="no attribute 'adpat'"):
        _ = polysilicon.adpat
