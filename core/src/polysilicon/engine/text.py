"""From token ids to text: piece by piece while a request runs, and cut at its stop texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polysilicon.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Decode = Callable[[Sequence[int]], str]

#: What decoders put where bytes do not (yet) make a character.
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one request's tokens, as far as it can no longer change.

    A token may hold part of a character, and some decoders drop a leading space, so a piece is the
    difference between two decodings that begin at the same, earlier token. Text that may turn out
    to be the beginning of a stop text is held back.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in self._stop), default=0)
        self._ids: list[int] = []  # from the first token of the last piece on
        self._shown = 0  # leading ids whose text was taken
        self._shown_text = ""  # their decoding
        self._given = 0  # characters of `whole` that `take` has returned
        self.whole = ""
        self.stopped = False

    def add(self, *tokens: int) -> bool:
        """Adds tokens; True when a stop text was found (`whole` then ends before it)."""
        self._ids += tokens
        text = self._decode(self._ids)
        if len(text) > len(self._shown_text) and not text.endswith(_INCOMPLETE):
            self._extend(text)
        return self.stopped

    def close(self) -> None:
        """Takes in what is still incomplete, because no more tokens will come."""
        if not self.stopped and self._shown < len(self._ids):
            self._extend(self._decode(self._ids))
        self._stop, self._longest = (), 0  # nothing needs to be held back any longer

    def take(self) -> str:
        """The text that became final since the last call."""
        end = len(self.whole) if self.stopped else len(self.whole) - self._held()
        piece = self.whole[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _extend(self, text: str) -> None:
        before = len(self.whole)
        self.whole += text[len(self._shown_text) :]
        del self._ids[: self._shown]
        self._shown, self._shown_text = len(self._ids), self._decode(self._ids)
        # A stop text may have begun in earlier pieces.
        start = max(0, before - self._longest + 1)
        ends = [at for stop in self._stop if (at := self.whole.find(stop, start)) >= 0]
        if ends:
            self.whole = self.whole[: min(ends)]
            self.stopped = True

    def _held(self) -> int:
        """Length of the longest end of the text that some stop text begins with."""
        for length in range(min(self._longest - 1, len(self.whole)), 0, -1):
            end = self.whole[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


class Texts:
    """A tokenizer as the engine uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's own end-of-sequence id."""
        token = self._tokenizer.eos_token_id
        return frozenset() if token is None else frozenset((int(token),))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, with the special tokens that the model begins with."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self, messages: Sequence[dict[str, str]], known: Sequence[int] = ()
    ) -> list[int]:
        """Token ids of a conversation, the beginning of the answer included.

        `known` are the ids of its beginning as the engine has them: where their text is how the
        conversation begins, they are kept as they are and only the rest is encoded, since
        generated text need not encode to the tokens that it was generated as.
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: give it plain prompts")
        text = str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )
        if known:
            start = self._tokenizer.decode(list(known), skip_special_tokens=False)
            if text.startswith(start):
                return [*known, *self._ids(text[len(start) :], add_special_tokens=False)]
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Not verbose: the engine says itself, and for one request, that a prompt is too long.
        ids = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token) for token in ids["input_ids"]]

    def stream(self, stop: Sequence[str]) -> TextStream:
        """A text stream for one request."""
        return TextStream(self._decode, stop)

    def _decode(self, ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that was already shown.
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
