"""From sampled tokens to the text of an answer, while it grows."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"  # what a decoder shows for the bytes of half a character


class TextStream:
    """The text of one answer, piece by piece; ends before the first of some marks.

    `text` is what has been given out, `rest` all from the first mark on. What may be the beginning of a mark
    is held back until more is known.
    """

    def __init__(self, decode: Decode, end_token_ids: frozenset[int], marks: Sequence[str] = ()) -> None:
        """`marks`: stop strings, and the opening of a tool call."""
        self._decode = decode
        self._end_token_ids = end_token_ids
        self._marks = tuple(marks)
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded
        self._read = 0  # tokens before this one are in the text already
        self._held = ""
        self.text = ""
        self.rest = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Take sampled tokens; the text that is certain by now. An end token is no text."""
        self._tokens += [token for token in tokens if token not in self._end_token_ids]
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_UNFINISHED):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return self._take(text[len(known) :])

    def finish(self) -> str:
        """The text that was held back."""
        text = self._decode(self._tokens[self._context :])
        known = self._decode(self._tokens[self._context : self._read])
        self._context = self._read = len(self._tokens)
        given = self._take(text[len(known) :])
        if self.rest:
            return given
        held, self._held = self._held, ""
        self.text += held
        return given + held

    def _take(self, new: str) -> str:
        if self.rest:
            self.rest += new
            return ""
        self._held += new
        found = [place for mark in self._marks if (place := self._held.find(mark)) >= 0]
        if found:
            self._held, self.rest = self._held[: min(found)], self._held[min(found) :]
            given, self._held = self._held, ""
        else:
            certain = len(self._held) - self._longest_beginning()
            given, self._held = self._held[:certain], self._held[certain:]
        self.text += given
        return given

    def _longest_beginning(self) -> int:
        """Characters at the end of what is held that may begin a mark."""
        longest = 0
        for mark in self._marks:
            for length in range(min(len(mark) - 1, len(self._held)), longest, -1):
                if self._held.endswith(mark[:length]):
                    longest = length
                    break
        return longest
