"""The part of every node but the head: Ray, until the head says that it is over."""

import asyncio
import logging

from .control import CONNECT_SECONDS, ControlClient
from .meeting import Card, Meeting
from .network import reachable
from .ray_node import RayNode, object_store_bytes

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
    try:
        await reachable(plan.gcs, CONNECT_SECONDS, card.node)
        store = object_store_bytes(card.hardware, configured_megabytes, plan.sharing(card.node))
        ray = RayNode(card, plan, meeting, store)
        over = asyncio.ensure_future(line.until_end())
        while True:
            async with ray as process:
                await asyncio.wait({process.ended, over}, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    logger.info("%s", over.result().why)
                    if over.result().failed:
                        ray.keep_tails()
                    return 0
                ray.keep_tails()
                if line.begun or not ray.was_late:
                    break
                logger.warning("Ray did not come up in its own time; trying again")
        why = f"Ray ended there with exit status {process.ended.result()}, see {meeting.log(card.node)}"
        logger.error("%s", why)
        await line.fail(why)
        over.cancel()
        return 1
    finally:
        line.close()


def _told(card: Card) -> tuple[int, int, str, str]:
    return card.hardware.cores, card.hardware.gpus, card.address, card.interface
