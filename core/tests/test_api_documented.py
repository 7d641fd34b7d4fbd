"""All that a plugin may import is documented, field by field, with its default."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from scripts import script

from polysilicon import api

GENERATOR = script("generate_records")
PAGE = GENERATOR.PAGE.read_text()


def test_page_is_current() -> None:
    assert GENERATOR.render() == PAGE, "run python docs/generate_records.py"


@pytest.mark.parametrize("name", sorted(api.__all__))
def test_name_stands_in_the_page(name: str) -> None:
    assert f"## {name}\n" in PAGE or f"### `{name}(" in PAGE or f"- `{name}`: " in PAGE


@pytest.mark.parametrize("name", GENERATOR.records())
def test_docstring_explains_each_field_and_no_other(name: str) -> None:
    record = getattr(api, name)
    fields = [field.name for field in dataclasses.fields(record) if field.init]
    known = GENERATOR.meanings(GENERATOR.sections(record).get("Attributes", ""))
    assert sorted(known) == sorted(fields)
    assert all(known.values())


@pytest.mark.parametrize("name", GENERATOR.functions())
def test_docstring_explains_each_argument(name: str) -> None:
    function = getattr(api, name)
    told = GENERATOR.meanings(GENERATOR.sections(function).get("Args", ""))
    arguments = list(inspect.signature(function).parameters)
    assert not told or list(told) == arguments


def test_wrapped_meaning_is_one_line() -> None:
    text = "tiles: dim → tile size;\n    padded to a multiple.\norder: of the dims."
    assert GENERATOR.meanings(text) == {
        "tiles": "dim → tile size; padded to a multiple.",
        "order": "of the dims.",
    }
