"""Text of a stream of tokens: whole characters only, and cut at stop texts."""

from __future__ import annotations

import pytest
from fake_model import FakeTokenizer
from hypothesis import given
from hypothesis import strategies as st

from polysilicon.engine.text import Texts, TextStream
from polysilicon.errors import RequestError

decode = FakeTokenizer().decode


def pieces(tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(decode, stop)
    found = []
    for token in tokens:
        ended = stream.add(token)
        found.append(stream.take())
        if ended:
            break
    stream.close()
    return [*found, stream.take()]


def test_a_character_of_three_tokens_comes_in_one_piece() -> None:
    assert pieces([0, 30, 31, 32, 1]) == ["a", "", "", "€", "b", ""]


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    assert pieces([0, 30, 31]) == ["a", "", "", "\ufffd"]


def test_text_that_may_begin_a_stop_text_is_held_back() -> None:
    assert pieces([0, 1, 2, 0, 1], stop=("bcd",)) == ["a", "", "", "bca", "", "b"]


def test_the_earliest_stop_text_cuts_the_text() -> None:
    assert "".join(pieces([0, 1, 2, 3, 4], stop=("cd", "bc"))) == "a"


def test_a_stop_text_over_several_tokens_is_never_shown() -> None:
    assert pieces([0, 30, 31, 32, 1, 7], stop=("€b",)) == ["a", "", "", "", "", ""]


@given(st.lists(st.integers(0, 49), max_size=40))
def test_pieces_add_up_to_the_whole_text(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == decode(tokens)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_stop_text(tokens: list[int], stop: list[str]) -> None:
    whole, shown = decode(tokens), "".join(pieces(tokens, tuple(stop)))
    # Token by token, the stop text that ends first wins, and of those the one that begins first.
    ends = [(whole.find(text) + len(text), whole.find(text)) for text in stop if text in whole]
    assert shown == (whole[: min(ends)[1]] if ends else whole)


def test_a_conversation_needs_a_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        Texts(FakeTokenizer()).encode_chat([{"role": "user", "content": "a"}])
