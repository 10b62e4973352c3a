"""The part of every node but the head: Ray, until the head says that it is over."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from .control import ControlClient, Over
from .errors import SlurmError
from .network import reachable
from .ray_node import TOGETHER_SECONDS, RayNode, object_store_bytes
from .rendezvous import Card, Meeting

logger = logging.getLogger(__name__)


async def follow(head: str, meeting: Meeting, card: Card, configured_megabytes: int) -> int:
    """The node's exit status: 0 whenever the head has decided, whose status counts. Raises `SlurmError`."""
    meeting.join(card)
    logger.info("%d cores, %d GPUs, %s (%s)", *_told(card))
    plan = await meeting.plan()
    if plan.refused:
        return 0
    token = meeting.token_file.read_text(encoding="ascii")
    line = await ControlClient.connect(plan.head, plan.control, token, card.node, head)
    store = object_store_bytes(card.hardware, configured_megabytes, plan.sharing(card.node))
    over = asyncio.ensure_future(line.until_end())
    try:
        await _listens(reachable(plan.gcs, TOGETHER_SECONDS, card.node), over)
        await _ray_until(over, line, RayNode(card, plan, meeting, store), meeting.log(card.node))
    except SlurmError as error:
        await line.fail(str(error))
        raise
    finally:
        over.cancel()
        line.close()
    return 0


async def _listens(reached: Coroutine[Any, Any, None], over: "asyncio.Task[Over]") -> None:
    """Wait for Ray on the head, or until it is over before."""
    listening = asyncio.ensure_future(reached)
    await asyncio.wait({listening, over}, return_when=asyncio.FIRST_COMPLETED)
    if listening.done():
        listening.result()
    listening.cancel()


async def _ray_until(over: "asyncio.Task[Over]", line: ControlClient, ray: RayNode, log: Path) -> None:
    """Ray on this node until it is over. Raises `SlurmError` where it ends before."""
    while not over.done():
        async with ray as process:
            await asyncio.wait({process.ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done() or over.result().failed:
                ray.keep_tails()
            ray.hurried = over.done() and over.result().hurried
        if over.done():
            break
        if line.begun or not ray.was_late:
            raise SlurmError(f"Ray ended there with exit status {process.ended.result()}, see {log}")
        logger.warning("Ray did not come up in its own time; trying again")
    logger.info("%s", over.result().why)


def _told(card: Card) -> tuple[int, int, str, str]:
    return card.hardware.cores, card.hardware.gpus, card.address, card.interface
