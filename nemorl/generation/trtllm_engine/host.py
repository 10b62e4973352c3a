"""The process of a TensorRT-LLM replica: the engine's front, and its side of the weight exchange.

handles    exchange ──▶ host memory (sampling continues) ──commit: CUDA IPC──▶ every worker
workers    exchange ──▶ a receiver in every worker (engine paused) ──▶ its loader; commit: the final None

Workers take weights through their own `update_weights`: handles `{gpu: [(name, (rebuild, arguments)), ...]}`
and, when all have come, None. It is called undecorated, since the engine is held around a whole update.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from ray.util.placement_group import get_current_placement_group
from safetensors import safe_open
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor
from torch.multiprocessing import reductions

from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.device import pins_memory
from nemorl.generation.request_driver import RequestDriver
from nemorl.generation.tokens import RequestLimits, load_decoder
from nemorl.generation.types import EngineFailed, EngineOptions
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitFailed,
    RefitSession,
    torch_dtype,
)
from nemorl.weights.whole_tensors import WholeTensorReceiver, batches, whole_slices

from .engine import TrtllmEngine, engine_arguments, memory_tags

_WATCH_SECONDS = 5.0  # between two looks whether the workers live


class TrtllmHost(RequestDriver):
    """A TensorRT-LLM replica. Lives in an event loop."""

    def __init__(
        self, config: TrtllmGenerationConfig, options: EngineOptions, *, bundle: int | None = None
    ) -> None:
        """Make the engine; its workers come up in `start`, in this bundle of the placement group."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._config, self._device, self._commit_seconds = config, options.device, options.commit_seconds
        shape, length = load_shape(options.model_path), options.max_sequence_length
        self._tensors = hf_tensors(shape)
        self._dtypes = _kept_types(options.model_path, self._tensors, config.precision or options.precision)
        name = f"TensorRT-LLM engine {options.rank}"
        arguments = engine_arguments(config, options)
        if bundle is not None:  # it has the GPUs of all workers
            arguments["placement_groups"] = [get_current_placement_group()]
            arguments["placement_bundle_indices"] = [[bundle] * config.ranks_per_replica]
        limits = RequestLimits(shape.vocab_size, length, length, load_decoder(options.tokenizer_path))
        self._trtllm = TrtllmEngine(config, limits, name, arguments)
        super().__init__(self._trtllm, name)
        loop = asyncio.get_running_loop()

        def commit(version: int) -> None:
            asyncio.run_coroutine_threadsafe(self._update_weights(version), loop).result()

        self._staging: dict[str, Tensor] = {}
        self._receiver = WeightReceiver(whole_slices(self._tensors), self._staged, commit)
        self._update = AsyncExitStack()  # holds the engine paused while workers receive
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._trtllm.llm.setup_async()
        self._watch = asyncio.create_task(self._keep_watch())

    async def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """Whole tensors: once for the replica, or once for each of its workers."""
        if self._config.weight_delivery == "handles":
            return (self._receiver.describe(),)
        size = self._config.bucket_megabytes * 2**20
        arguments = (self._tensors, self._dtypes, self._device, size)
        return tuple(await self._trtllm.call("nemorl_describe", *arguments))

    async def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        if self._config.weight_delivery == "handles":
            self._receiver.prepare(parts[0])
        else:
            await self._trtllm.call("nemorl_prepare", parts)

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        if self._config.weight_delivery == "handles":
            return (await asyncio.to_thread(self._receiver.begin(session)),)
        # The engine is paused from here to the commit.
        await self._update.enter_async_context(self._paused_for(session.version))
        return tuple(await self._trtllm.call("nemorl_receive", session))

    async def commit_weights(self, version: int) -> None:
        if self._config.weight_delivery == "handles":
            await asyncio.to_thread(self._receiver.commit, version)
            return
        try:
            await self._trtllm.call("nemorl_commit", version, self._recompute)
        except Exception as error:
            raise self.fail_update(version, error) from error
        self._trtllm.switch(version)
        self.recover()
        await self._update.aclose()

    async def abandon_refit(self) -> None:
        """Forget an update that did not finish. An engine with corrupt weights stays paused until a refit."""
        self._receiver.abandon()
        try:
            reasons = [r for r in await self._trtllm.call("nemorl_give_up") if r is not None]
            if reasons:
                self.corruption = reasons[0]
            else:
                await self._update.aclose()
        except EngineFailed as error:  # a worker died: nothing can be released
            self._update.pop_all()
            self.fail(error)

    async def sleep(self, level: int) -> None:
        """Leave the GPU: weights are kept in host memory at every level, the KV cache is lost."""
        await self.pause("wait")
        await self._trtllm.call("reset_prefix_cache")  # else its index refers to freed memory
        await self._trtllm.call("sleep", memory_tags(()))

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Take `weights`, `kv_cache` or, with no tag, both back; sampling continues with the cache."""
        await self._trtllm.call("wakeup", memory_tags(tags))
        if not tags or "kv_cache" in tags:
            await self.resume()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.fail(EngineFailed(f"{self.name} was closed"))
        await asyncio.to_thread(self._trtllm.llm.shutdown)

    def _staged(self) -> Mapping[str, Tensor]:
        if not self._staging:
            pinned = pins_memory(torch.device(self._device))
            self._staging = {
                name: torch.empty(extents, dtype=torch_dtype(self._dtypes[name]), pin_memory=pinned)
                for name, extents in self._tensors.items()
            }
        return self._staging

    async def _update_weights(self, version: int) -> None:
        async with self._paused_for(version):
            try:
                places = self._places(await self._trtllm.call("nemorl_device"))

                def copied(names: Sequence[str]) -> dict[str, dict[str, Tensor]]:
                    return {
                        gpu: {name: self._staging[name].to(device, copy=True) for name in names}
                        for gpu, device in places.items()
                    }

                for names in _batches(self._staging, self._config.bucket_megabytes * 2**20):
                    copies = await asyncio.to_thread(copied, names)
                    await self._trtllm.call("nemorl_load", _handles(copies))
                await self._trtllm.call("nemorl_finish", self._recompute)
            except Exception as error:
                unfinished = f"{self.name} did not finish its update to version {version}"
                problem = f"{unfinished}: its weights are of two versions until a complete refit"
                self.fail(EngineFailed(problem))
                await self._trtllm.call("nemorl_give_up")
                raise RefitFailed(f"refit to version {version}: {error}; {problem}") from error
            self._trtllm.switch(version)
            self.recover()

    def _places(self, names: Sequence[str]) -> dict[str, torch.device]:
        """Each worker's GPU in this process, which sees them all."""
        if self._device == "cpu":  # the tests' stand-in
            return dict.fromkeys(names, torch.device("cpu"))
        here = {str(get_device_uuid(index)): index for index in range(torch.cuda.device_count())}
        if missing := sorted(set(names) - here.keys()):
            problem = f"{self.name} has workers on GPUs that its process does not see ({', '.join(missing)})"
            fix = "place them on one machine, or set generation.weight_delivery to workers"
            raise RefitFailed(f"{problem}: {fix}")
        return {name: torch.device("cuda", here[name]) for name in names}

    def _paused_for(self, version: int) -> AbstractAsyncContextManager[None]:
        return self.paused_for(version, self._config.on_update, seconds=self._commit_seconds)

    @property
    def _recompute(self) -> bool:
        # With `finish` too: a request that was taken out may still be in the engine and leave its cache.
        return self._config.on_update != "continue"

    async def _keep_watch(self) -> None:
        # Notices workers that die; calls wait their turn behind whatever a worker does.
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self._trtllm.call("nemorl_device")
            except EngineFailed as error:
                self.fail(error)
                return


def _handles(copies: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[tuple[str, Any]]]:
    """By GPU, how its worker opens each tensor: torch's own reduction, which is TensorRT-LLM's format."""
    return {
        device: [(name, reductions.reduce_tensor(tensor)) for name, tensor in tensors.items()]
        for device, tensors in copies.items()
    }


def _batches(tensors: Mapping[str, Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Names of tensors of `most_bytes` together, or of one that is larger."""
    batch: list[str] = []
    for name in tensors:
        if batch and sum(tensors[one].nbytes for one in (*batch, name)) > most_bytes:
            yield batch
            batch = []
        batch.append(name)
    yield batch


def _kept_types(model_path: Path, tensors: Mapping[str, tuple[int, ...]], precision: str) -> dict[str, str]:
    """The type of each tensor on the wire: `precision`, or float32 where only some of the folder are that."""
    folder = HfFolder(model_path)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in tensors:
        by_file[folder.file(name)].append(name)
    stored: dict[str, str] = {}
    for path, names in by_file.items():
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_slice(name).get_dtype() for name in names}
    mixed = set(stored.values()) != {"F32"}
    return {name: "float32" if mixed and kind == "F32" else precision for name, kind in stored.items()}


_take_handles = WorkerExtension.update_weights.__wrapped__
_DEVICE_ARGUMENT = 6  # of a rebuild function's arguments; the worker puts its own device there


class NemorlExtension(WorkerExtension):
    """Methods of a worker, in its main thread. `engine` is its PyExecutor, `device_id` its GPU."""

    _nemorl_control: Any = None  # held while it is there
    _nemorl_unfinished = False  # weights have been loaded since the last None
    _nemorl_receiver: Any = None  # a WholeTensorReceiver, from `nemorl_describe` on

    def nemorl_device(self) -> str:
        return str(get_device_uuid(self.device_id))

    def nemorl_hold(self) -> dict[int, int]:
        """Pause between two steps; the tokens sampled so far of every request in the batch."""
        if self._nemorl_control is None:  # else it is paused since an update that never finished
            control = self.engine.control_action(drain=False)
            control.__enter__()
            self._nemorl_control = control
        return {
            request.py_client_id: request.get_num_tokens(0) - request.py_orig_prompt_len
            for request in self.engine.active_requests
        }

    def nemorl_release(self) -> None:
        """Step again. Raises RuntimeError for an update that never came to its end."""
        if self._nemorl_unfinished:
            half = "new weights were loaded and the final None did not follow, so the model is half prepared"
            raise RuntimeError(f"{half}: finish the update or give it up")
        control, self._nemorl_control = self._nemorl_control, None
        control.__exit__(None, None, None)

    def nemorl_load(self, handles: Mapping[str, Any]) -> None:
        if self._nemorl_control is None:
            raise RuntimeError("weights came while the engine was sampling: hold it first")
        self._nemorl_unfinished = True
        _take_handles(self, handles)

    def nemorl_finish(self, recompute: bool) -> None:
        """End the update; `recompute` the KV cache of sequences in flight."""
        _take_handles(self, None)
        if recompute:
            self.engine.recompute_active_requests()
        self._nemorl_unfinished = False

    def nemorl_give_up(self) -> str | None:
        """Forget an update; return the reason if the weights are of two versions."""
        self._nemorl_unfinished = False
        if self._nemorl_receiver is None:
            return None
        self._nemorl_receiver.abandon()
        return self._nemorl_receiver.corruption  # type: ignore[no-any-return]

    def nemorl_describe(
        self, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], kind: str, batch_bytes: int
    ) -> ReceiverLayout:
        """Become a receiver of whole tensors on this worker's device, which is of `kind`."""
        device = torch.device(kind, self.device_id) if kind == "cuda" else torch.device(kind)
        receiver = WholeTensorReceiver(tensors, dtypes, _OwnLoader(self, batch_bytes), device=device)
        self._nemorl_receiver = receiver
        return receiver.describe()

    def nemorl_prepare(self, parts: tuple[Part, ...]) -> None:
        self._nemorl_receiver.prepare(parts[self.global_rank])

    def nemorl_receive(self, session: RefitSession) -> ReceiveReport:
        return self._nemorl_receiver.receive(session)  # type: ignore[no-any-return]

    def nemorl_commit(self, version: int, recompute: bool) -> None:
        self._nemorl_receiver.commit(version)
        if recompute:
            self.engine.recompute_active_requests()


class _OwnLoader:
    """A worker's loader for tensors of its own process: handles that give back what was put into them."""

    def __init__(self, worker: NemorlExtension, batch_bytes: int) -> None:
        self._worker, self._batch_bytes = worker, batch_bytes

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for batch in batches(tensors, self._batch_bytes):
            handles = [(name, (_given, (new, *[None] * _DEVICE_ARGUMENT))) for name, new in batch.items()]
            self._worker.nemorl_load({self._worker.nemorl_device(): handles})

    def finish(self) -> None:
        self._worker.nemorl_finish(recompute=False)


def _given(tensor: Tensor, *_: object) -> Tensor:
    return tensor
