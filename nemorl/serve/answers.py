"""Answers in the shape of OpenAI's API: the text of sampled tokens while it grows, and the JSON around it."""

import json
import time
from collections.abc import Sequence
from typing import Any

from nemorl.data.tokenizer import Tokenizer
from nemorl.generation.tokens import TextDecoder
from nemorl.generation.types import Completion, Progress

from .requests import ChatRequest, CompletionRequest
from .sampling import Work

Json = dict[str, Any]


class TextStream:
    """The text of one answer, piece by piece, up to the first of some marks; `rest` is all from there on."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: frozenset[int], marks: Sequence[str]) -> None:
        """`marks` are the stop strings, and the openings of tool calls; an empty one holds all text back."""
        self._text = TextDecoder(tokenizer.decode)
        self._end_token_ids, self._marks = end_token_ids, marks
        self._held = ""
        self.rest = ""

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that is certain by now; after the `last` tokens, what was held back too."""
        new = self._text.push([t for t in tokens if t not in self._end_token_ids], last=last)
        if self.rest:
            self.rest += new
            return ""
        held = self._held + new
        starts = [start for mark in self._marks if (start := held.find(mark)) >= 0]
        if starts:
            self._held, self.rest = "", held[min(starts) :]
            return held[: min(starts)]
        lengths = ((mark, n) for mark in self._marks for n in range(1, min(len(mark), len(held) + 1)))
        uncertain = (length for mark, length in lengths if held.endswith(mark[:length]))
        certain = len(held) - (0 if last else max(uncertain, default=0))
        self._held = held[certain:]
        return held[:certain]


class Choice:
    def __init__(
        self, index: int, request: CompletionRequest | ChatRequest, work: Work, tokenizer: Tokenizer
    ) -> None:
        self.index, self.request, self.work, self.tokenizer = index, request, work, tokenizer
        self.is_chat = isinstance(request, ChatRequest)
        self.num_sampled = 0
        ends = tokenizer.end_token_ids | set(request.stop_token_ids)
        read_by = tokenizer.tool_format
        splits = read_by is not None and (work.tools or (self.is_chat and read_by.splits_every_turn))
        self._format = read_by if splits else None  # else the text is the answer
        marks = [*request.stop_strings, *(self._format.marks if self._format else ())]
        self._text = TextStream(tokenizer, frozenset(ends), marks)

    def delta(self, progress: Progress) -> Json:
        return self._part(self._text.push(progress.tokens.tolist()), progress, None)

    def last_delta(self, completion: Completion) -> Json:
        none = completion.tokens[:0], completion.logprobs[:0], completion.versions[:0]
        part = self._end(completion, Progress(completion.id, *none))
        for index, call in enumerate(part.get("delta", {}).get("tool_calls", ())):
            call["index"] = index
        return part

    def whole(self, completion: Completion) -> Json:
        choice = self._end(completion, completion)
        if isinstance(self.request, CompletionRequest) and self.request.echo:
            self._add_prompt(choice, completion)
        if self.is_chat:
            message = choice["message"] = choice.pop("delta") | {"refusal": None}
            if "tool_calls" in message:
                message["content"] = message["content"].rstrip() or None
        return choice

    def _add_prompt(self, choice: Json, completion: Completion) -> None:
        """Begin the text and the logprobs of a choice with the prompt, whose first token has none."""
        prompt = self.work.prompts[self.index // self.request.n]
        choice["text"] = self.tokenizer.decode(prompt) + choice["text"]
        logprobs, scores = choice["logprobs"], completion.prompt_scores
        if logprobs is None or scores is None:
            return
        count = len(prompt) - 1  # a moved request has scores of what was sampled before, too
        pieces = map(self._piece, scores.top_tokens[:count].tolist())
        pairs = zip(pieces, scores.top_logprobs[:count].tolist(), strict=True)
        # A sampled token is alone: of the distribution after temperature and filters.
        sampled = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        tops = [{piece: logprob} for piece, logprob in (*pairs, *sampled)]
        choice["logprobs"] = {
            "tokens": [*map(self._piece, prompt), *logprobs["tokens"]],
            "token_logprobs": [None, *scores.logprobs[:count].tolist(), *logprobs["token_logprobs"]],
            "top_logprobs": [None, *tops] if self.request.logprobs else None,
            "text_offset": None,
        }

    def _end(self, completion: Completion, sampled: Progress | Completion) -> Json:
        """Return the last part, with what was held back; a call that cannot be read is text."""
        text, reply = self._text.push(sampled.tokens.tolist(), last=True), None
        if self._format is not None and self._text.rest:
            stops = (self._text.rest.find(stop) for stop in self.request.stop_strings)
            rest = self._text.rest[: min((place for place in stops if place >= 0), default=None)]
            reply = self._format.parse(
                rest,
                f"{self.work.name[:5]}{self.index:02x}",
                in_reasoning=self._format.marks == ("",)
                and self.tokenizer.opens_reasoning(self.work.prompts[self.index // self.request.n]),
                max_calls=self.tokenizer.max_calls or None,
            )
            text += reply.content
        calls = [] if reply is None else [call.as_dict() for call in reply.tool_calls]
        part = self._part(text, sampled, "tool_calls" if calls else str(completion.stop))
        if reply is not None and reply.reasoning is not None:
            part["delta"]["reasoning_content"] = reply.reasoning
        if calls:
            part["delta"]["tool_calls"] = calls
            for call in calls:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return part

    def _part(self, text: str, sampled: Progress | Completion, finish_reason: str | None) -> Json:
        """Return the text with logprobs and token ids where requested; the prompt's with the first only."""
        request, tokens, logprobs = self.request, sampled.tokens.tolist(), sampled.logprobs.tolist()
        first = self.num_sampled == 0
        self.num_sampled += len(tokens)
        part: Json = {"index": self.index, "finish_reason": finish_reason, "logprobs": None}
        if self.is_chat:
            part["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            part["text"] = text
        if self.is_chat and request.logprobs:
            content = [
                {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, logprob in zip(map(self._piece, tokens), logprobs, strict=True)
            ]
            part["logprobs"] = {"content": content}
        elif not self.is_chat and request.logprobs is not None:
            part["logprobs"] = {"tokens": list(map(self._piece, tokens)), "token_logprobs": logprobs}
            part["logprobs"] |= {"top_logprobs": None, "text_offset": None}
        if request.return_token_ids:
            part |= {"token_ids": tokens, "weight_versions": sampled.versions.tolist()}
            if first and not self.is_chat:
                part["prompt_token_ids"] = self.work.prompts[self.index // request.n]
        return part

    def _piece(self, token: int) -> str:
        return self.tokenizer.decode([token])


class Answer:
    def __init__(
        self, request: CompletionRequest | ChatRequest, work: Work, model_name: str, tokenizer: Tokenizer
    ) -> None:
        self._request, self._work, self._model = request, work, model_name
        self._created, count = int(time.time()), len(work.prompts) * request.n
        self.choices = [Choice(index, request, work, tokenizer) for index in range(count)]

    @property
    def id(self) -> str:
        """Its name for clients."""
        return f"{'chatcmpl' if isinstance(self._request, ChatRequest) else 'cmpl'}-{self._work.name}"

    def whole(self, completions: Sequence[Completion]) -> Json:
        choices = [choice.whole(c) for choice, c in zip(self.choices, completions, strict=True)]
        return self._envelope("", choices, first=True) | self._usage()

    def chunk(self, part: Json, *, first: bool) -> Json:
        return self._envelope(".chunk", [part], first=first)

    def last_chunk(self) -> Json:
        return self._envelope(".chunk", [], first=False) | self._usage()

    def _usage(self) -> Json:
        prompt = sum(map(len, self._work.prompts))
        sampled = sum(choice.num_sampled for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return {"usage": counts}

    def _envelope(self, suffix: str, choices: list[Json], *, first: bool) -> Json:
        is_chat = isinstance(self._request, ChatRequest)
        envelope: Json = {
            "id": self.id,
            "object": f"chat.completion{suffix}" if is_chat else "text_completion",
            **{"created": self._created, "model": self._model, "choices": choices},
        }
        if first and is_chat and self._request.return_token_ids:
            envelope["prompt_token_ids"] = self._work.prompts[0]
        return envelope
