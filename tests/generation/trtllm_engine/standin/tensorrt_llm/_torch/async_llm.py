"""AsyncLLM: workers as Ray actors, requests to rank 0, calls to all."""

import asyncio
import itertools
from dataclasses import dataclass, field

import ray

from tensorrt_llm.executor.ray_gpu_worker import RayWorkerWrapper
from tensorrt_llm.llmapi.llm_args import LlmArgs


@dataclass(slots=True)
class CompletionOutput:
    index: int
    token_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish_reason: str | None = None


class RequestOutput:
    """Grows while it is iterated."""

    def __init__(self, llm, request_id):
        self._llm, self.request_id = llm, request_id
        self.outputs = [CompletionOutput(0)]
        self._queue = asyncio.Queue()
        self._done = False

    @property
    def finished(self):
        return self._done

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._done:
            raise StopAsyncIteration
        response = await self._queue.get()
        if isinstance(response, Exception):
            raise response
        tokens, logprobs, reason, trimmed = response
        output = self.outputs[0]
        output.token_ids.extend(tokens)
        output.logprobs.extend(logprobs)
        if trimmed:
            output.token_ids = output.token_ids[:-trimmed]
        output.finish_reason = reason
        self._done = reason is not None
        return self

    def abort(self):
        """Blocks, as it does there."""
        ray.get(self._llm.workers[0].abort_request.remote(self.request_id))


class AsyncLLM:
    def __init__(
        self, placement_groups=None, placement_bundle_indices=None, per_worker_gpu_share=None, **kwargs
    ):
        kwargs["orchestrator_type"] = "ray"
        kwargs["ray_placement_config"] = (placement_groups, placement_bundle_indices, per_worker_gpu_share)
        kwargs.setdefault("ray_worker_extension_cls", "tensorrt_llm.llmapi.rlhf_utils.WorkerExtension")
        self.args = LlmArgs(**kwargs)
        self.workers = []
        self._ids = itertools.count(1)
        self._results = {}
        self._fetching = None

    async def setup_async(self):
        self.workers = [RayWorkerWrapper.remote(rank, self.args) for rank in range(self.args.world_size)]
        await asyncio.gather(*[worker.__ray_ready__.remote() for worker in self.workers])
        self._fetching = asyncio.create_task(self._fetch())
        return self

    def generate_async(self, inputs, sampling_params=None, *, streaming=False):
        assert streaming, "the stand-in streams only"
        prompt = inputs["prompt_token_ids"]
        if len(prompt) > self.args.max_input_len:
            raise ValueError(
                f"prompt length ({len(prompt)}) exceeds max_input_len ({self.args.max_input_len})"
            )
        if len(prompt) > self.args.max_num_tokens and not self.args.enable_chunked_prefill:
            raise ValueError(f"{len(prompt)} tokens exceed max_num_tokens ({self.args.max_num_tokens})")
        number = next(self._ids)
        result = self._results[number] = RequestOutput(self, number)
        self.workers[0].enqueue_request.remote(number, prompt, sampling_params)
        return result

    async def collective_rpc(self, method, args=(), kwargs=None, unique_reply_rank=None, target_ranks=None):
        workers = self.workers if unique_reply_rank is None else [self.workers[unique_reply_rank]]
        calls = [worker.call_worker_method.remote(method, *args, **(kwargs or {})) for worker in workers]
        try:
            return list(await asyncio.gather(*calls))
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from error

    async def release(self, tags):
        await self.collective_rpc("sleep", args=(tags,))

    async def resume(self, tags):
        await self.collective_rpc("wakeup", args=(tags,))

    def shutdown(self):
        if self._fetching is not None:
            self._fetching.get_loop().call_soon_threadsafe(self._fetching.cancel)
        for worker in self.workers:
            ray.kill(worker)

    async def _fetch(self):
        """Responses of all requests; when the worker is gone nothing comes, and no one is notified."""
        while True:
            try:
                responses = await self.workers[0].fetch_responses.remote()
            except ray.exceptions.RayError:
                return
            for number, *response in responses:
                self._results[number]._queue.put_nowait(response)
                if response[2] is not None:
                    del self._results[number]
