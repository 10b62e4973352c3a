"""The process of a vLLM replica: the engine's front, and its side of the weight exchange.

staged      workers receive next to the weights in use, sampling continues ──commit: paused──▶ copied over
in place    engine paused ──▶ workers receive into the weights in use ──commit──▶ engine resumes
reload      engine paused ──▶ vLLM's loader takes whole tensors as they come ──commit──▶ engine resumes
            (quantized, if that is set)
"""

import asyncio
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from nemorl.cluster.logs import last_lines
from nemorl.config.generation import OnUpdate, VllmGenerationConfig
from nemorl.config.policy import LoraConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.generation.request_driver import AsyncEngine, RequestDriver, first_of
from nemorl.generation.tokens import RequestLimits, load_decoder
from nemorl.generation.types import EngineFailed, EngineOptions
from nemorl.models.adapters import adapted_projections
from nemorl.models.registry import load_shape
from nemorl.weights import messages as refits
from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout, RefitFailed, RefitSession

from .arguments import engine_arguments, environment
from .backend import VllmBackend
from .quantized import config_of

PARTS = TypeAdapter(tuple[Part, ...])
LAYOUT = TypeAdapter(ReceiverLayout)
SESSION = TypeAdapter(RefitSession)
REPORT = TypeAdapter(ReceiveReport)

FOLDERS = "nemorl-vllm-"  # how the names of replicas' folders begin, which hold sockets
_SEGMENTS = "segments"  # the file in such a folder that names shared memory
_SEGMENT = re.compile(r"psm_\w+|vllm_dist_[^\s/]+")  # of its message queues; of collectives on a CPU
_GRACE_SECONDS = 5.0  # that a worker's own deadline may come before ours
_ABANDON_SECONDS = 20.0  # for an answer after a failed refit; less than its caller waits
_OUTPUT = 2  # file descriptor
_LINES = 200  # of a start that failed, in which tracebacks of several processes follow each other
_ERROR = re.compile(r"(?:\] |^)((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Problem): .+)$")
_CONSEQUENCES = ("See root cause", "See stack trace", "EngineDeadError")

logger = logging.getLogger(__name__)


def last_words(count: int = 12) -> str:
    """End of an error message: the first error in the log, and its last lines; or where to look."""
    if not stat.S_ISREG(os.fstat(_OUTPUT).st_mode):
        return "; its output says more"
    lines = last_lines(Path(f"/proc/self/fd/{_OUTPUT}"), _LINES)
    cause = first_error(lines)
    quoted = "".join(f"\n  | {line}" for line in lines[-count:])
    return (f": {cause}" if cause else "") + f". The last lines of its log:{quoted or ' none'}"


def first_error(lines: tuple[str, ...]) -> str | None:
    """The end of the first traceback among lines of a log; those after it are mostly its consequences."""
    found = (match[1] for line in lines if (match := _ERROR.search(line)))
    return next((error for error in found if not any(words in error for words in _CONSEQUENCES)), None)


def record_segments(folder: Path, processes: Iterable[int]) -> None:
    """Write into a replica's folder which shared memory of vLLM its processes have."""
    maps = (Path(f"/proc/{process}/maps").read_text(encoding="utf-8") for process in processes)
    mapped = re.compile(f"/dev/shm/({_SEGMENT.pattern})")
    names = sorted({name for text in maps for name in mapped.findall(text)})
    (folder / _SEGMENTS).write_text("\n".join(names), encoding="utf-8")


def remove_folder(folder: Path) -> None:
    """Remove the folder of a replica that has ended, and the shared memory recorded there."""
    with suppress(OSError):
        if folder.stat().st_uid == os.getuid():  # another user's record could name our memory
            for name in _SEGMENT.findall((folder / _SEGMENTS).read_text(encoding="utf-8")):
                Path("/dev/shm", name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def reports_in(answers: Sequence[dict[str, Any]]) -> tuple[ReceiveReport, ...]:
    """Reports of an engine's workers, by rank. Raises the error of one, a `RefitFailed`."""
    if errors := [answer for answer in answers if "error" in answer]:
        # A rank whose peer closed is mostly a consequence.
        worst = min(errors, key=lambda answer: bool(answer["error"] == "PeerClosed"))
        kind, message = getattr(refits, worst["error"], None), worst["message"]
        if isinstance(kind, type) and issubclass(kind, RefitFailed):
            raise kind(message)
        raise RefitFailed(f"{worst['error']}: {message}")
    in_order = sorted(answers, key=lambda answer: int(answer["rank"]))
    return tuple(REPORT.validate_python(answer["report"]) for answer in in_order)


class UpdatedDriver(RequestDriver):
    """Its engine takes a version next to the weights in use (`staged`), or paused from the transfer on."""

    def __init__(
        self, engine: AsyncEngine, name: str, *, staged: bool, on_update: OnUpdate, commit_seconds: float
    ) -> None:
        super().__init__(engine, name)
        self._staged, self._on_update, self._commit_seconds = staged, on_update, commit_seconds
        self._pause = AsyncExitStack()  # holds the engine paused while an update writes into its weights

    def _paused_for(self, version: int) -> AbstractAsyncContextManager[None]:
        return self.paused_for(version, self._on_update, seconds=self._commit_seconds)

    async def _pause_for_transfer(self, version: int) -> None:
        if not self._staged:
            await self._pause.enter_async_context(self._paused_for(version))

    @asynccontextmanager
    async def _committing(self, version: int) -> AsyncIterator[None]:
        """The block makes the version that in use. Raises RefitFailed."""
        async with self._paused_for(version) if self._staged else self._pause.pop_all():
            try:
                yield
            except Exception as error:
                raise self.fail_update(version, error) from error
        self.recover()


class VllmHost(UpdatedDriver):
    """A vLLM replica. Lives in an event loop."""

    def __init__(
        self,
        config: VllmGenerationConfig,
        options: EngineOptions,
        *,
        return_experts: bool = False,
        lora: LoraConfig | None = None,
        quantization: QuantizationConfig | None = None,
        trained_drafts: bool = False,
        gpus: Sequence[str] = (),
    ) -> None:
        """With `lora` the engine receives adapters only; with `quantization` its workers quantize weights.

        With `trained_drafts` updates bring the layers or the head that drafts, too. `gpus` it sees, unless it
        sees this process's. Raises Unquantizable.
        """
        from nemorl.cluster.runtime import hold, remove_abandoned  # and Ray, which vLLM's workers do without

        remove_abandoned(Path(tempfile.gettempdir()), FOLDERS, remove_folder)
        self._temporary = tempfile.TemporaryDirectory(prefix=FOLDERS, ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        self._folder_lock = hold(self._folder)
        self._rendezvous: Path | None = None  # the file at which vLLM's ranks have met
        self._options, self._lora = options, lora
        self._update = config.update_on(options.device, quantizes=quantization is not None)
        self._layouts: tuple[ReceiverLayout, ...] = ()
        self._died = asyncio.Event()
        variables = environment(config, options, self._folder, quantization, trained_drafts=trained_drafts)
        if gpus:  # the processes of the engine see these, in this order
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        shape, length = load_shape(options.model_path), options.max_sequence_length
        names = adapted_projections(shape, lora) if lora is not None else ()
        quantized = None
        if quantization is not None:
            quantized = config_of(shape, quantization)
        self._vllm = VllmBackend(
            engine_arguments(
                config,
                options,
                return_experts=return_experts,
                lora=lora,
                projections=names,
                quantization_config=quantized,
            ),
            variables,
            RequestLimits(shape.vocab_size, length, length, load_decoder(options.tokenizer_path)),
            name=f"generation engine {options.rank}",
            recompute_kv_cache=config.on_update != "continue",
            moe_layers=[n for n in range(shape.num_layers) if shape.is_moe(n)] if return_experts else [],
            adapters=lora is not None,
            last_words=last_words,
        )
        super().__init__(
            self._vllm,
            f"generation engine {options.rank}",
            staged=self._update == "staged",
            on_update=config.on_update,
            commit_seconds=options.commit_seconds,
        )

    async def start(self) -> None:
        await self._vllm.start()
        lora = self._lora.model_dump_json() if self._lora is not None else None
        opened = await self._vllm.call("nemorl_open", self._update, lora)
        answers = [json.loads(answer) for answer in opened]
        processes = {answer["process"]: f"worker {rank}" for rank, answer in enumerate(answers)}
        processes[answers[0]["engine"]] = "EngineCore"  # of one rank it is the worker
        self._rendezvous = Path(answers[0]["meeting"])
        record_segments(self._folder, processes)
        self._vllm.watch(processes, self._lose)
        self._layouts = tuple(LAYOUT.validate_python(answer["layout"]) for answer in answers)
        for parameter, reason in answers[0]["reasons"].items():
            logger.info("%s comes in whole tensors and is loaded again: %s", parameter, reason)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        return self._layouts

    async def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        await self._vllm.call("nemorl_prepare", PARTS.dump_json(parts).decode())

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """The engine's side of a refit; only if staged it keeps sampling meanwhile. Raises RefitFailed."""
        if self._died.is_set():
            raise RefitFailed(f"refit to version {session.version}: {self._failure}")
        await self._pause_for_transfer(session.version)
        answers: list[dict[str, Any]] = []
        complete = asyncio.Event()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers.append(json.loads(await reader.read()))
            writer.close()
            if len(answers) == len(self._layouts):
                complete.set()

        refit, seconds = f"refit to version {session.version}", session.deadline_seconds + _GRACE_SECONDS
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:  # of mode 0700
            address = str(Path(folder) / "reports")  # each worker says here once what came of its part
            server = await asyncio.start_unix_server(take, address)
            try:
                begin = "nemorl_receive", SESSION.dump_json(session).decode(), address
                await self._call_or_lose(*begin, seconds=seconds)
                await first_of(complete, self._died, seconds=seconds)
            finally:
                server.close()
        if not complete.is_set():
            if self._died.is_set():
                raise RefitFailed(f"{refit}: {self._failure}")
            missing = sorted(set(range(len(self._layouts))) - {answer["rank"] for answer in answers})
            late = f"{self.name} received nothing from its workers {missing} within {seconds:g} s"
            raise refits.RefitDeadline(f"{refit}: {late}")
        return reports_in(answers)

    async def commit_weights(self, version: int) -> None:
        async with self._committing(version):
            await self._vllm.call("nemorl_commit", version)
            await self._vllm.switch(version)

    async def abandon_refit(self) -> None:
        """Keep the version in use; an engine with corrupt weights stays paused until a refit.

        One that does not answer is lost. Raises RefitDeadline.
        """
        if self._died.is_set():
            return  # nothing is left to resume
        seconds = min(_ABANDON_SECONDS, self._options.commit_seconds)
        answers = await self._call_or_lose("nemorl_abandon", seconds=seconds)
        if reasons := [reason for reason in answers if reason is not None]:
            self.corruption = reasons[0]
        else:
            await self._pause.aclose()

    async def sleep(self, level: int) -> None:
        """Leave a GPU to the policy: 1 keeps the weights in host memory, 2 nothing; sequences leave it."""
        await self.suspend()
        if self._options.device == "cuda":
            await self._vllm.sleep(level)

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Take `weights`, `kv_cache` or, with no tag, both back; sampling continues with the cache."""
        if self._options.device == "cuda":
            await self._vllm.wake(tags)
        if not tags or "kv_cache" in tags:
            await self.revive()

    async def close(self) -> None:
        self._vllm.unwatch()
        self.fail(EngineFailed(f"{self.name} was closed"))
        await asyncio.to_thread(self._vllm.close)
        self._clean_up()

    async def _call_or_lose(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """Answers of the workers. An engine that gives none in time hangs, though this process does not."""
        try:
            async with asyncio.timeout(seconds):
                return await self._vllm.call(method, *arguments)
        except TimeoutError:
            failure = f"{self.name} hangs: no answer of its workers to {method} within {seconds:g} s"
            self._lose(failure)
            raise refits.RefitDeadline(failure) from None

    def _lose(self, failure: str) -> None:
        self._died.set()
        self.fail(EngineFailed(failure))
        self._clean_up()

    def _clean_up(self) -> None:
        remove_folder(self._folder)
        self._folder_lock.close()
        if self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)
