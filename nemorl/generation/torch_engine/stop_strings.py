"""Finding stop strings in sampled text, token by token."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""

_CONTEXT_TOKENS = (
    5  # of the prompt; what a tokenizer does at the start of a text must not hit the first tokens
)
_UNFINISHED = "\ufffd"  # what a decoder shows for the bytes of half a character


class StopStringFinder:
    """Decodes one sequence as it grows and says when one of its stop strings is complete.

    Only the tokens since the last whole character are decoded at each step. Text of the prompt never counts.
    """

    def __init__(self, stop_strings: Sequence[str], prompt: Sequence[int], decode: Decode) -> None:
        self._stop_strings = tuple(stop_strings)
        self._decode = decode
        self._tokens = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._context = 0  # first token that is decoded
        self._read = len(self._tokens)  # tokens before this one are in `_tail` already
        self._tail = ""  # end of the sampled text, as long as a stop string may still begin in it

    def push(self, token: int) -> bool:
        """Whether `token` completes a stop string."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_UNFINISHED) or len(text) <= len(known):
            return False
        self._context, self._read = self._read, len(self._tokens)
        self._tail += text[len(known) :]
        if any(stop in self._tail for stop in self._stop_strings):
            return True
        beginnings = max(map(len, self._stop_strings)) - 1  # characters that may begin a stop string
        self._tail = self._tail[-beginnings:] if beginnings else ""
        return False
