"""The part of every node but the head: Ray, until the head says that it is over."""

import asyncio
import logging

from .control import CONNECT_SECONDS, ControlClient
from .errors import SlurmError
from .meeting import Card, Meeting, Plan
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
        await _reachable(plan, card.node, head)
        store = object_store_bytes(card.hardware, configured_megabytes, plan.sharing(card.node))
        ray = RayNode(card, plan, meeting, store)
        async with ray as process:
            over = asyncio.ensure_future(line.until_end())
            await asyncio.wait({process.ended, over}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                logger.info("%s", over.result().why)
                if over.result().failed:
                    ray.keep_tails()
                return 0
            why = f"Ray ended there with exit status {process.ended.result()}, see {meeting.log(card.node)}"
            ray.keep_tails()
            logger.error("%s", why)
            await line.fail(why)
            over.cancel()
            return 1
    finally:
        line.close()


def _told(card: Card) -> tuple[int, int, str, str]:
    return card.hardware.cores, card.hardware.gpus, card.address, card.interface


async def _reachable(plan: Plan, node: str, head: str) -> None:
    """Wait until Ray listens on the head; it would try for minutes, and not say for what."""
    host, _, port = plan.gcs.rpartition(":")
    end = asyncio.get_running_loop().time() + CONNECT_SECONDS
    while True:
        try:
            async with asyncio.timeout(10):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            if asyncio.get_running_loop().time() > end:
                raise SlurmError(
                    f"{node} cannot reach Ray on the head, {head}, at {plan.gcs} ({error or 'no answer'}): "
                    "let the nodes reach each other's ports, or see the head's log."
                ) from None
            await asyncio.sleep(0.5)
