"""The process of a vLLM replica: the engine's front, and its side of the weight exchange.

staged      workers receive next to the weights in use, sampling continues ──commit: paused──▶ copied over
in place    engine paused ──▶ workers receive into the weights in use ──commit──▶ engine resumes
reload      as staged, in whole tensors                                 ──commit──▶ vLLM's loader takes them
"""

import asyncio
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from nemorl.cluster.logs import last_lines
from nemorl.config.generation import VllmGenerationConfig
from nemorl.config.policy import LoraConfig
from nemorl.generation.request_driver import RequestDriver
from nemorl.generation.tokens import RequestLimits, load_decoder
from nemorl.generation.types import EngineFailed
from nemorl.models.adapters import adapted_projections
from nemorl.models.registry import load_shape
from nemorl.weights import messages as refits
from nemorl.weights.messages import (
    Part,
    ReceiveReport,
    ReceiverLayout,
    RefitDeadline,
    RefitFailed,
    RefitSession,
)

from .arguments import engine_arguments, environment
from .backend import VllmBackend

_OUTPUT = 2  # file descriptor
_LINES = 200  # of a start that failed, in which tracebacks of several processes follow each other
_ERROR = re.compile(r"(?:\] |^)((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Problem): .+)$")
_CONSEQUENCES = ("See root cause", "See stack trace", "EngineDeadError")


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


PARTS = TypeAdapter(tuple[Part, ...])
LAYOUT = TypeAdapter(ReceiverLayout)
SESSION = TypeAdapter(RefitSession)
REPORT = TypeAdapter(ReceiveReport)


logger = logging.getLogger(__name__)

EXTENSION = "nemorl.generation.vllm_engine.worker.VllmWorkerExtension"
_GRACE_SECONDS = 5.0  # that a worker's own deadline may come before ours


class VllmHost(RequestDriver):
    """A vLLM replica as the driver and the rollout workers call it. Lives in an event loop."""

    def __init__(
        self,
        model_path: Path,
        config: VllmGenerationConfig,
        *,
        rank: int,
        device: Literal["cpu", "cuda"],
        threads: int | None,
        tokenizer_path: Path,
        max_sequence_length: int,
        precision: Literal["float32", "bfloat16"],
        commit_seconds: float,
        return_experts: bool = False,
        lora: LoraConfig | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Nothing runs before `start`. `commit_seconds` limits the pause of the engine for new weights.

        `return_experts` reports the experts of each token. With `lora` the engine keeps the weights of
        `model_path` and receives adapters. `gpus` names the GPUs that the engine sees, those of its ranks
        first, if they are not those of this process.
        """
        self._lora = lora
        self._sockets = tempfile.TemporaryDirectory(prefix="nemorl-vllm-", ignore_cleanup_errors=True)
        self._rendezvous: Path | None = None  # the file at which vLLM's ranks have met
        self._update = config.update_on(device)
        self._device = device
        name = f"generation engine {rank}"
        decode = load_decoder(Path(tokenizer_path))
        shape = load_shape(model_path)
        vocabulary = shape.vocab_size
        arguments = engine_arguments(
            config,
            Path(model_path),
            device=device,
            precision=config.precision or precision,
            max_sequence_length=max_sequence_length,
            extension=EXTENSION,
            return_experts=return_experts,
            lora=lora,
            projections=adapted_projections(shape, lora) if lora is not None else (),
        )
        self._vllm = VllmBackend(
            arguments,
            environment(config, device=device, threads=threads, sockets=Path(self._sockets.name))
            | _visible(gpus),
            RequestLimits(vocabulary, max_sequence_length, max_sequence_length, decode is not None),
            name=name,
            decode=decode,
            recompute_kv_cache=config.recompute_kv_cache,
            moe_layers=[n for n in range(shape.num_layers) if shape.is_moe(n)] if return_experts else [],
            adapters=lora is not None,
            last_words=last_words,
        )
        super().__init__(self._vllm, name)
        self._commit_seconds = commit_seconds
        self._layouts: tuple[ReceiverLayout, ...] = ()
        self._pause = AsyncExitStack()  # holds the engine paused while an update in place lasts
        self._died = asyncio.Event()

    async def start(self) -> None:
        """Start vLLM's processes, load the model as version 0 and learn what its workers hold."""
        await self._vllm.start()
        lora = self._lora.model_dump_json() if self._lora is not None else None
        opened = await self._vllm.call("nemorl_open", self._update, os.getpid(), lora)
        answers = [json.loads(one) for one in opened]
        workers = {answer["process"]: f"worker {rank}" for rank, answer in enumerate(answers)}
        self._rendezvous = Path(answers[0]["meeting"])
        self._vllm.watch({**workers, answers[0]["engine"]: "EngineCore"}, self._lose)
        self._layouts = tuple(LAYOUT.validate_python(answer["layout"]) for answer in answers)
        for parameter, reason in answers[0]["reasons"].items():
            logger.info("%s comes in whole tensors and is loaded again: %s", parameter, reason)

    def describe_weights(self) -> tuple[ReceiverLayout, ...]:
        """What each rank of the engine needs, for the plan of the exchange."""
        return self._layouts

    async def prepare_refit(self, parts: tuple[Part, ...]) -> None:
        """Keep the ranks' parts of the plan."""
        await self._vllm.call("nemorl_prepare", PARTS.dump_json(parts).decode())

    async def receive_weights(self, session: RefitSession) -> tuple[ReceiveReport, ...]:
        """The engine's side of a refit; unless in place it keeps sampling meanwhile. Raises `RefitFailed`."""
        if self._died.is_set():
            raise RefitFailed(f"refit to version {session.version}: {self._vllm.failure()}")
        if self._update == "in_place":
            await self._pause.enter_async_context(self._paused_for(session.version))
        with tempfile.TemporaryDirectory(dir=self._sockets.name) as folder:  # of mode 0700
            address = Path(folder) / "reports"
            async with _Reports(address, len(self._layouts)) as reports:
                await self._vllm.call("nemorl_receive", SESSION.dump_json(session).decode(), str(address))
                found = await self._all_of(reports, session)
        return tuple(REPORT.validate_python(answer["report"]) for answer in found)

    async def commit_weights(self, version: int) -> None:
        """Sample with what was received, from the next step on."""
        async with AsyncExitStack() as stack:
            if self._update == "in_place":
                await stack.enter_async_context(self._pause.pop_all())
            else:
                await stack.enter_async_context(self._paused_for(version))
            try:
                await self._vllm.call("nemorl_commit", version)
                await self._vllm.switch(version)
            except Exception as error:
                raise self.fail_update(version, error) from error
        self.recover()

    async def abandon_refit(self) -> None:
        """Keep the version in use; an engine with corrupt weights stays paused until a refit."""
        if self._died.is_set():
            return  # nothing is left to resume
        reasons = [reason for reason in await self._vllm.call("nemorl_abandon") if reason is not None]
        if reasons:
            self.mark_corrupt(reasons[0])
        else:
            await self._pause.aclose()

    async def sleep(self, level: int) -> None:
        """Leave the device to the policy: 1 keeps the weights in host memory, 2 keeps nothing.

        Sequences in flight wait until sampling continues, and lose their cache; a CPU has nothing to leave.
        """
        await self.pause("keep")
        if self._device == "cuda":
            await self._vllm.sleep(level)

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Take `weights`, `kv_cache` or, with no tag, both back; sampling continues with the cache."""
        if self._device == "cuda":
            await self._vllm.wake(tags)
        if not tags or "kv_cache" in tags:
            await self.resume()

    async def close(self) -> None:
        """End the engine; pending requests get EngineFailed."""
        self._vllm.unwatch()
        self.fail(EngineFailed(f"{self.name} was closed"))
        await asyncio.to_thread(self._vllm.close)
        self._clean_up()

    def _paused_for(self, version: int) -> AbstractAsyncContextManager[None]:
        return self.paused_for(version, drain=False, seconds=self._commit_seconds)

    async def _all_of(self, reports: "_Reports", session: RefitSession) -> list[dict[str, Any]]:
        """Every worker's report; the worst of their errors, if any."""
        gathered = asyncio.create_task(reports.all())
        died = asyncio.create_task(self._died.wait())
        try:
            seconds = session.deadline_seconds + _GRACE_SECONDS
            await asyncio.wait({gathered, died}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gathered.done():
                found = gathered.result()
            elif died.done():
                raise RefitFailed(f"refit to version {session.version}: {self._vllm.failure()}")
            else:
                raise RefitDeadline(
                    f"refit to version {session.version}: {self.name} received nothing from its "
                    f"workers {reports.missing} within {seconds:g} s"
                )
        finally:
            gathered.cancel()
            died.cancel()
        errors = [answer for answer in found if "error" in answer]
        if errors:
            # A rank whose peer closed is mostly a consequence.
            worst = min(errors, key=lambda answer: answer["error"] == "PeerClosed")
            raise _error(worst)
        return sorted(found, key=lambda answer: int(answer["rank"]))

    def _lose(self, failure: str) -> None:
        """One of the engine's processes has ended."""
        self._died.set()
        self.fail(EngineFailed(failure))
        self._clean_up()

    def _clean_up(self) -> None:
        """Remove what vLLM's processes leave behind when they are killed."""
        self._sockets.cleanup()
        if self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)


class _Reports:
    """A socket on which each of `count` workers says once what came of its part."""

    def __init__(self, address: Path, count: int) -> None:
        self._address = address
        self._answers: list[dict[str, Any]] = []
        self._count = count
        self._complete = asyncio.Event()

    async def __aenter__(self) -> "_Reports":
        self._server = await asyncio.start_unix_server(self._take, self._address)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    @property
    def missing(self) -> list[int]:
        """Ranks that have said nothing."""
        return sorted(set(range(self._count)) - {answer["rank"] for answer in self._answers})

    async def all(self) -> list[dict[str, Any]]:
        """What all have said."""
        await self._complete.wait()
        return self._answers

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers.append(json.loads(await reader.read()))
        writer.close()
        if len(self._answers) == self._count:
            self._complete.set()


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    """What has the processes of the engine see these GPUs, in this order."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _error(answer: dict[str, Any]) -> RefitFailed:
    """A worker's error, of its own kind where that is one of the exchange's."""
    kind = getattr(refits, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, RefitFailed):
        return kind(answer["message"])
    return RefitFailed(f"{answer['error']}: {answer['message']}")
