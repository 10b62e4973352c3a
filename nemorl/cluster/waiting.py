"""Waiting for workers, with a stage, a deadline, and errors that name the rank and the cause."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from .errors import ClusterError, DeadlineExceeded, NodeLost, WorkerDied, WorkerFailed
from .logs import last_lines

if TYPE_CHECKING:
    from .group import Worker

# After the first failure of a call the other ranks get this long to answer. The peers of a dead rank see
# their connection break and raise before Ray reports the death, which is the cause and has to be reported.
GRACE_SECONDS = 2.0
# Across nodes: Ray reports a broken connection to a lost node only after this time.
GRACE_SECONDS_APART = 8.0
# Ray then needs about 15 s to decide that the node is lost and not only the connection.
VERDICT_SECONDS = 40.0
_POLL_SECONDS = 0.5
ACTIVITY_SECONDS = 3.0

Answers = Mapping[ray.ObjectRef, "Worker"]


async def answers(pending: Answers, stage: str, deadline_seconds: float) -> list[Any]:
    """Return the answers of all workers, in the order of `pending`.

    The first failure ends the wait and is raised as `WorkerFailed`, `WorkerDied` or the `ClusterError` that
    the worker raised. Raises `DeadlineExceeded` if some have not answered in time.
    """
    futures = {asyncio.wrap_future(reference.future()): worker for reference, worker in pending.items()}
    end = time.monotonic() + deadline_seconds
    waiting: set[asyncio.Future[Any]] = set(futures)
    failed: list[asyncio.Future[Any]] = []
    try:
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=max(0.0, end - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            new_failures = [future for future in done if future.exception() is not None]
            if new_failures and not failed:
                apart = any(worker.home is not None for worker in pending.values())
                end = min(end, time.monotonic() + (GRACE_SECONDS_APART if apart else GRACE_SECONDS))
            failed += new_failures
    finally:
        for future in waiting:
            future.cancel()
    if failed:
        raise _cause([await resolve_error(futures[future], stage, future.exception()) for future in failed])
    if waiting:
        late = [worker for future, worker in futures.items() if future in waiting]
        where = await describe_activity(late)
        raise DeadlineExceeded(late[0].group, tuple(w.rank for w in late), stage, deadline_seconds, where)
    return [future.result() for future in futures]


async def describe_activity(workers: Sequence["Worker"]) -> tuple[str, ...]:
    """Describe the current activity of each worker; the stacks of its threads are written to its log."""
    asked = [asyncio.wrap_future(worker.actor.describe_activity.remote().future()) for worker in workers]
    await asyncio.wait(asked, timeout=ACTIVITY_SECONDS)
    activities = []
    for future, worker in zip(asked, workers, strict=True):
        if not future.done():
            future.cancel()
            activities.append("does not respond; its process is stopped or holds the interpreter's lock")
        elif (error := future.exception()) is not None:
            activities.append(str(typed_error(worker, "describe_activity", error)))
        else:
            activities.append(f"{future.result()} (stacks in {worker.log})")
    return tuple(activities)


async def resolve_error(worker: "Worker", stage: str, error: BaseException | None) -> ClusterError:
    """Return `typed_error`; for an unreachable worker, first wait for Ray to decide if its node is lost."""
    if isinstance(error, ActorUnavailableError) and worker.home is not None:
        end = time.monotonic() + VERDICT_SECONDS
        while not worker.home.is_lost() and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
    return typed_error(worker, stage, error)


def typed_error(worker: "Worker", stage: str, error: BaseException | None) -> ClusterError:
    """Convert an error of Ray to a `ClusterError`, without Ray's traceback."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ClusterError):
            return error.cause
        kind = f"{type(error.cause).__module__}.{type(error.cause).__qualname__}"
        return WorkerFailed(worker.group, worker.rank, stage, kind, _one_line(str(error.cause)), worker.log)
    if isinstance(error, RayActorError):
        return _death(worker, stage, exit_reason(str(error)))
    if isinstance(error, RayError):
        kind = f"ray.{type(error).__qualname__}"
        return WorkerFailed(worker.group, worker.rank, stage, kind, _one_line(str(error)), worker.log)
    raise TypeError(f"not an error of Ray: {error!r}")


def _death(worker: "Worker", stage: str, reason: str) -> WorkerDied:
    who, home = (worker.group, worker.rank, stage), worker.home
    if home is not None and home.is_lost():
        return NodeLost(*who, home.name, str(home), worker.log)
    return WorkerDied(*who, reason, worker.log, last_lines(worker.log), home.name if home else "")


def exit_reason(account: str) -> str:
    """Extract the exit detail from Ray's message on a dead actor, or return all of it as one line."""
    found = re.search(r"Worker exit detail: (.*)", account, re.DOTALL)
    detail = _one_line(found[1] if found else account)
    if "connection error code 2" in detail:  # all that Ray reports of a closed socket
        return "the process vanished: it crashed, was killed, or the machine ran out of memory"
    if "killed by `ray.kill`" in detail:
        return "the driver ended its process and reports the reason"
    return detail


def _cause(errors: Sequence[ClusterError]) -> ClusterError:
    """Return the error that explains the others: a death before the errors of its peers, else the first.

    A lost node comes before the deaths of its processes, which may be reported earlier.
    """
    deaths = [error for error in errors if isinstance(error, WorkerDied)]
    return next((death for death in deaths if isinstance(death, NodeLost)), [*deaths, errors[0]][0])


def _one_line(text: str) -> str:
    return " ".join(text.split())
