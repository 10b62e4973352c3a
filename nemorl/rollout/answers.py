"""What a conversation says at last, in words that compare: for majority votes (docs/evaluation.md)."""

import hashlib
from typing import Protocol, runtime_checkable

from nemorl.trajectories import Conversation

_LONGEST = 200  # characters that go to the driver; of longer answers their hash


@runtime_checkable
class ReadsAnswers(Protocol):
    """A factory of environments that knows where in a text the answer is."""

    async def answer_in(self, text: str) -> str | None:
        """The answer, alike for equal answers; None where there is none."""
        ...


async def last_answer(conversation: Conversation, environments: object) -> str | None:
    """The answer in the policy's last message, as the environment reads it, else the whole message.

    None after an error, and where nothing is said.
    """
    if conversation.trajectory.error is not None:
        return None
    texts = [message.content for message in conversation.exchange if message.role == "assistant"]
    text = texts[-1] if texts else ""
    if isinstance(environments, ReadsAnswers):
        answer = await environments.answer_in(text)
    else:
        answer = text
    answer = " ".join((answer or "").split())
    if len(answer) > _LONGEST:
        return hashlib.sha256(answer.encode()).hexdigest()
    return answer or None
