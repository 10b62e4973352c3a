"""Answers in the shape of OpenAI's API.

From sampled tokens to the text of an answer, while it grows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.data.tokenizer import Tokenizer
from nemorl.generation.types import Completion, Progress
from nemorl.trajectories import Float32Array, Int32Array

from .requests import ChatRequest, CompletionRequest
from .sampling import OPENING, Served, Work, tool_calls

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


Json = dict[str, Any]


@dataclass
class Choice:
    """One answer while it grows."""

    index: int
    stream: TextStream
    request: CompletionRequest | ChatRequest
    work: Work
    tokenizer: Tokenizer
    num_sampled: int = 0
    parts: list[Json] = field(default_factory=list)

    @property
    def chat(self) -> bool:
        """Whether it answers messages."""
        return isinstance(self.request, ChatRequest)

    @property
    def prompt(self) -> list[int]:
        """The tokens that it continues."""
        return self.work.prompts[self.index // self.request.n]

    def delta(self, progress: Progress) -> Json:
        """The part of a stream that these tokens make."""
        return self._part(self.stream.push(progress.tokens.tolist()), progress, None)

    def last_delta(self, completion: Completion) -> Json:
        """The last part: what was held back, tool calls, and why it ended."""
        none = Progress(
            completion.id, completion.tokens[:0], completion.logprobs[:0], completion.versions[:0]
        )
        text = self.stream.finish()
        calls = self._calls()
        if calls is None:
            text += self._unread()
        part = self._part(text, none, _finish_reason(completion, calls))
        if calls is not None:
            part["delta"]["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return part

    def whole(self, completion: Completion) -> Json:
        """The choice of an answer that comes in one piece."""
        self.num_sampled = len(completion.tokens)
        self.stream.push(completion.tokens.tolist())
        self.stream.finish()
        calls = self._calls()
        text = self.stream.text if calls is not None else self.stream.text + self._unread()
        choice: Json = {"index": self.index, "finish_reason": _finish_reason(completion, calls)}
        if self.chat:
            content = text.rstrip() or None if calls is not None else text
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            choice["message"] = message | ({"tool_calls": calls} if calls is not None else {})
        else:
            choice["text"] = text
        everything = Progress(completion.id, completion.tokens, completion.logprobs, completion.versions)
        return choice | self._details(everything, whole=True)

    def _calls(self) -> list[Json] | None:
        if not self.work.tools or not self.stream.rest.startswith(OPENING):
            return None
        return tool_calls(self.stream.rest, f"{self.work.name[:12]}_{self.index}")

    def _unread(self) -> str:
        """What begins like a tool call and is none is text like any other."""
        return self.stream.rest if self.stream.rest.startswith(OPENING) and self.work.tools else ""

    def _part(self, text: str, progress: Progress, finish_reason: str | None) -> Json:
        first = self.num_sampled == 0
        self.num_sampled += len(progress.tokens)
        part: Json = {"index": self.index, "finish_reason": finish_reason}
        if self.chat:
            part["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            part["text"] = text
        return part | self._details(progress, whole=first)

    def _details(self, progress: Progress, *, whole: bool) -> Json:
        """Logprobs and token ids, where they are asked for; the prompt's with the first tokens only."""
        details: Json = {"logprobs": None}
        if isinstance(self.request, ChatRequest):
            if self.request.logprobs:
                details["logprobs"] = {"content": self._chat_logprobs(progress.tokens, progress.logprobs)}
        elif self.request.logprobs is not None:
            details["logprobs"] = self._completion_logprobs(progress.tokens, progress.logprobs)
        if self.request.return_token_ids:
            details["token_ids"] = progress.tokens.tolist()
            details["weight_versions"] = progress.versions.tolist()
            if whole and not self.chat:
                details["prompt_token_ids"] = self.prompt
        return details

    def _chat_logprobs(self, tokens: Int32Array, logprobs: Float32Array) -> list[Json]:
        return [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(self._texts(tokens), logprobs.tolist(), strict=True)
        ]

    def _completion_logprobs(self, tokens: Int32Array, logprobs: Float32Array) -> Json:
        return {
            "tokens": self._texts(tokens),
            "token_logprobs": logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": None,
        }

    def _texts(self, tokens: Int32Array) -> list[str]:
        return [self.tokenizer.decode([token]) for token in tokens.tolist()]


class Answer:
    """The envelope of one answer and its choices."""

    def __init__(self, request: CompletionRequest | ChatRequest, work: Work, served: Served) -> None:
        self._request, self._work, self._served = request, work, served
        self._chat = isinstance(request, ChatRequest)
        self._created = int(time.time())
        tokenizer = served.tokenizer
        ends = tokenizer.end_token_ids | set(request.stop_token_ids)
        marks = [*request.stop_strings, *([OPENING] if work.tools else [])]
        self.choices = [
            Choice(
                index,
                TextStream(tokenizer.decode, frozenset(ends), marks),
                request,
                work,
                tokenizer,
            )
            for index in range(len(work.prompts) * request.n)
        ]

    def whole(self, completions: Sequence[Completion]) -> Json:
        """The answer in one piece."""
        choices = [choice.whole(c) for choice, c in zip(self.choices, completions, strict=True)]
        return self._envelope("", choices) | {"usage": self.usage()} | self._prompt_ids()

    def chunk(self, part: Json, *, first: bool) -> Json:
        """An event of a stream."""
        return self._envelope(".chunk", [part]) | (self._prompt_ids() if first else {})

    def last_chunk(self) -> Json:
        """The event that carries the counts."""
        return self._envelope(".chunk", []) | {"usage": self.usage()}

    def usage(self) -> Json:
        """Tokens that were read and sampled."""
        prompt = sum(map(len, self._work.prompts))
        sampled = sum(choice.num_sampled for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _envelope(self, suffix: str, choices: list[Json]) -> Json:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{self._work.name}",
            "object": kind,
            "created": self._created,
            "model": self._served.model_name,
            "choices": choices,
        }

    def _prompt_ids(self) -> Json:
        returned = self._chat and self._request.return_token_ids
        return {"prompt_token_ids": self._work.prompts[0]} if returned else {}


def _finish_reason(completion: Completion, calls: list[Json] | None) -> str:
    return "tool_calls" if calls is not None else str(completion.stop)
