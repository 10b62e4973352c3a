"""Keeps what `live.json` shows of a run's engines and processes up to date."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nemorl.cluster.errors import ClusterError
from nemorl.observe.live import LiveFile, LiveWorker
from nemorl.session.session import Session

PERIOD_SECONDS = 2.0  # between two questions to the engines

logger = logging.getLogger(__name__)


@asynccontextmanager
async def shown_live(session: Session, live: LiveFile) -> AsyncIterator[None]:
    """Inside, the file shows the processes of the session."""

    async def update() -> None:
        while True:
            live.workers = [
                LiveWorker(worker.group, worker.rank, worker.home.name if worker.home is not None else "")
                for group in session.groups.values()
                if not group.has_ended
                for worker in group.workers
            ]
            if session.replicas is not None:
                try:
                    live.engines = await session.replicas.live()
                except ClusterError as error:  # the run finds it too
                    logger.debug("the engines did not answer: %s", error)
            await asyncio.sleep(PERIOD_SECONDS)

    task = asyncio.create_task(update())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        live.engines, live.workers = (), ()
