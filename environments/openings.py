"""How several environments open the conversation of a task: from its seed, with a text of their own."""

from dataclasses import replace

from nemorl.trajectories import Message, Task


def seed_of(task: Task) -> int:
    """Raises ValueError for a task without a seed."""
    seed = task.columns.get("seed")
    if not isinstance(seed, int):
        raise ValueError(f"task {task.index} has no integer in column `seed`: set `data` to seeds")
    return seed


def opened(task: Task, text: str) -> tuple[Message, ...]:
    """The task's messages, the last of which ends with the text."""
    *others, last = task.messages
    return (*others, replace(last, content=last.content + text))
