"""Acting in an environment by hand."""

import numpy as np

from nemorl.trajectories import Action, Message, Step, StopReason, Task


def task(answer: str | None = "7", prompt: str = "3+4?", **columns) -> Task:
    return Task(0, (Message("user", prompt),), answer, columns)


def said(text: str) -> Action:
    """A turn of the policy that reads so."""
    return Action(text, np.zeros(1, dtype=np.int32), StopReason.STOP)


async def answer(factory, given: Task, text: str) -> Step:
    """What an environment of `factory` says to a first turn."""
    environment = factory.create()
    await environment.reset(given)
    try:
        return await environment.step(said(text))
    finally:
        await environment.close()
