"""bench dispatch: what it reports, and that a bound op costs what it should."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from polysilicon import cli
from polysilicon.bench import dispatch

pytestmark = pytest.mark.usefixtures("fresh")


def test_json_has_the_documented_keys() -> None:
    command = ["bench", "dispatch", "--json", "--rounds", "2", "--calls", "20"]
    result = CliRunner().invoke(cli.build(), command)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    times = ("plain", "bound", "opaque", "library", "pluggy", "method", "module", "opaque_cuts")
    assert {f"{form}_us" for form in times} <= set(data)
    assert {"schema", "bound_ratio", "opaque_ratio", "import_s", "plugins_s"} <= set(data)


def test_table_prints() -> None:
    result = CliRunner().invoke(cli.build(), ["bench", "dispatch", "--rounds", "1", "--calls", "5"])
    assert "bound op, traceable" in result.stdout


def test_traceable_bound_op_is_the_plain_function_so_its_call_costs_nothing_more() -> None:
    assert dispatch.forms()["bound"] is dispatch.nothing


def test_opaque_bound_op_is_the_library_op_itself() -> None:
    bound = dispatch.forms()["opaque"]
    assert bound(torch.zeros(2, 4)).numel() == 0
    with FakeTensorMode():
        assert bound(torch.zeros(2, 4)).shape == (0,)
