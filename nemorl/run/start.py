"""Start the processes of a run, and run its coroutine to the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from nemorl.cluster.placement import worker_requests
from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.errors import RunError
from nemorl.session.session import Session, open_session

T = TypeVar("T")


@asynccontextmanager
async def started_session(
    experiment: Experiment, *, policy: bool, sampling: bool, install_signals: Callable[[], None]
) -> AsyncIterator[Session]:
    """Open a session in a new Ray cluster, or in the one that RAY_ADDRESS names.

    `install_signals` is called once Ray runs, because Ray replaces signal handlers when it starts.
    """
    models = {model.name: sampling if model.scores else policy for model in models_of(experiment)}
    policy = policy or not experiment.generation.has_engines  # the policy itself samples then
    groups = {**models, "policy": policy, "generation": sampling, "rollout": sampling, "endpoint": sampling}
    requests = [request for request in worker_requests(experiment) if groups[request.group]]
    with ClusterRuntime(experiment.cluster, requests) as runtime:
        install_signals()
        placement = await runtime.reserve()
        try:
            async with open_session(experiment, placement, policy=policy, sampling=sampling) as session:
                yield session
        finally:
            placement.release()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run the work. Raises RunError if a signal cancelled it."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise RunError(
            "Terminated immediately by a signal; all processes have ended. Continue a run from its newest "
            "checkpoint with --resume."
        ) from None
