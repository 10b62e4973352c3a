"""Several turns that a tiny model can do: each sum continues from the answer to the one before.

    task     12+34=
    policy   046
    env      46+12=
    policy   058

The next sum adds one of the task's two numbers, by turns, to the last digits of what was answered, right or
wrong. The reward `chained_sums` is 1 or 0 for the last sum, `chained_sums_turn` for each before it. An answer
with more or fewer digits than a sum has ends it all.
"""

import re

from nemorl.config.environment import ChainedSumsEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

REWARD = "chained_sums"
TURN_REWARD = "chained_sums_turn"
_SUM = re.compile(r"(\d+)\+(\d+)=")


class ChainedSumsEnvironment(Environment):
    def __init__(self, num_sums: int) -> None:
        self._num_sums = num_sums
        self._asked = 0  # sums so far
        self._numbers = ("", "")  # of the task
        self._sum = ("", "")  # that is to be answered

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task that is no sum."""
        found = _SUM.fullmatch(str(task.columns.get("prompt")))
        if found is None:
            fix = "set `data` to an arithmetic dataset"
            raise ValueError(f"task {task.index} is no sum such as 12+34=: {fix}")
        self._numbers = self._sum = (found[1], found[2])
        self._asked = 1
        return task.messages

    async def step(self, action: Action) -> Step:
        left, right = self._sum
        digits = len(left)
        reward = float(action.text == f"{int(left) + int(right):0{digits + 1}d}")
        if self._asked == self._num_sums:
            return Step(rewards={REWARD: reward})
        if not re.fullmatch(rf"[0-9]{{{digits + 1}}}", action.text):
            return Step(rewards={TURN_REWARD: 0.0, REWARD: 0.0})
        self._sum = (action.text[-digits:], self._numbers[(self._asked - 1) % 2])
        self._asked += 1
        return Step((Message("user", "{}+{}=".format(*self._sum)),), {TURN_REWARD: reward}, done=False)


class ChainedSumsFactory(EnvironmentFactory):
    def __init__(self, config: ChainedSumsEnvConfig) -> None:
        self._num_sums, self.reward_weights = config.num_sums, config.reward_weights

    def create(self) -> ChainedSumsEnvironment:
        return ChainedSumsEnvironment(self._num_sums)
