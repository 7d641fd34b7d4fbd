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


def test_import_takes_less_than_150_ms() -> None:
    code = (
        "import time; begin = time.perf_counter(); import polysilicon; "
        "print(time.perf_counter() - begin)"
    )
    assert min(float(_run(code)) for _ in range(5)) < 0.15


def test_plugins_listing_takes_less_than_half_a_second_of_work() -> None:
    code = (
        "import sys, time; sys.argv = ['polysilicon', 'plugins']\n"
        "from polysilicon.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(); print(time.process_time())"
    )
    assert min(float(_run(code).splitlines()[-1]) for _ in range(3)) < 0.5


def test_public_names_are_all_there() -> None:
    import polysilicon

    for name in polysilicon.__all__:
        assert getattr(polysilicon, name) is not None
    assert set(polysilicon.__all__) <= set(dir(polysilicon))


def test_unknown_name_is_an_attribute_error() -> None:
    import polysilicon

    with pytest.raises(AttributeError, match="no attribute 'adpat'"):
        _ = polysilicon.adpat
