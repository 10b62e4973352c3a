"""Teachers: frozen models that score the policy's tokens.

Each reads the sequences assigned to it, in its layout, or is a server that the policy's ranks query. Results
go to the policy's ranks by object reference; the driver only assigns sequences to teachers.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from nemorl.config.auxiliary import EndpointTeacherConfig, TeacherConfig
from nemorl.config.facts import teacher_group
from nemorl.errors import RunError
from nemorl.session.session import Session
from nemorl.session.shard import Column, Field, SequencePlace
from nemorl.trajectories import Task

# What a teacher computes, and what it is to the policy.
_OF_SAMPLED: Mapping[Field, Field] = {"old_logprobs": "reference_logprobs"}
_OF_TOP: Mapping[Field, Field] = {"top_ids": "top_ids", "top_logprobs": "top_logprobs"}


@dataclass(frozen=True)
class Teachers:
    """The teachers of a session."""

    session: Session
    configs: Mapping[str, TeacherConfig]
    multiples: Mapping[str, int]  # of those in processes: of sequences into which a batch of theirs is laid
    top_k: int | None  # number of likeliest tokens; None: the logprob of each token of the sequence

    async def fill(
        self,
        places: Sequence[SequencePlace],
        teachers: Sequence[str],
        kind: Literal["trajectories", "examples"],
    ) -> None:
        """Fill the batch that the policy has loaded with the results of each sequence's teacher."""
        held = {name: [i for i, one in enumerate(teachers) if one == name] for name in self.configs}
        asked = [self._ask(name, rows, places, kind) for name, rows in held.items() if rows]
        if self.session.models_share_devices:
            answers = [await one for one in asked]
        else:
            answers = await asyncio.gather(*asked)
        order = [i for rows in held.values() for i in rows]
        for field, of_policy in self._fields.items():
            found = dict(zip(order, [p for columns in answers for p in columns[field]], strict=True))
            column = Column(tuple(found[i] for i in range(len(places))))
            await self.session.learner.take(of_policy, column)

    @property
    def _fields(self) -> Mapping[Field, Field]:
        return _OF_SAMPLED if self.top_k is None else _OF_TOP

    async def _ask(
        self,
        name: str,
        rows: Sequence[int],
        places: Sequence[SequencePlace],
        kind: Literal["trajectories", "examples"],
    ) -> dict[Field, list[tuple[object, int]]]:
        """References to the results of one teacher for the sequences of `rows`, by field."""
        config = self.configs[name]
        if isinstance(config, EndpointTeacherConfig):
            policy = self.session.learner
            await policy.ask_teacher(config, name, set(rows), self.top_k)
            shared = {field: await policy.share(of_policy) for field, of_policy in self._fields.items()}
            return {field: [column.places[row] for row in rows] for field, column in shared.items()}
        own, teacher = [places[row] for row in rows], self.session.model(teacher_group(name))
        # The result of the padding is not used.
        filled = [*own, *[replace(own[0], weight=0.0)] * (-len(own) % self.multiples[name])]
        await teacher.load([replace(place, compared=None) for place in filled], kind=kind)
        if self.top_k is None:
            await teacher.logprobs(old=True, reference=False)
        else:
            await teacher.top(self.top_k)
        return {field: list((await teacher.share(field)).places[: len(own)]) for field in self._fields}


def teachers_of_tasks(tasks: Sequence[Task], key: str | None, teachers: Sequence[str]) -> list[str]:
    """The name of each task's teacher: what its column `key` says, or the only one there is.

    Raises RunError for a task without a teacher.
    """
    if key is None:
        return [teachers[0]] * len(tasks)
    named = []
    for task in tasks:
        name = task.columns.get(key)
        if name not in teachers:
            problem = f"is {name!r}" if key in task.columns else "is missing"
            raise RunError(
                f"task {task.index}: the column `{key}`, which algorithm.teacher_key names, {problem}; "
                f"set it to one of the teachers: {', '.join(teachers)}"
            )
        named.append(str(name))
    return named
