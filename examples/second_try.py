"""A custom environment: a sum, and another try after a wrong answer.

    task     12+34=
    policy   047
    env      12+34=
    policy   046

`configs/grpo_custom_environment.yaml` trains in it; docs/environments.md explains each part.
"""

from nemorl.trajectories import Action, Message, Step, Task

REWARD = "second_try"


class SecondTryEnvironment:
    """One conversation. A right answer is worth 1, and `discount` times less after each wrong one."""

    def __init__(self, tries: int, discount: float) -> None:
        self._tries = tries
        self._discount = discount
        self._value = 1.0

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Begin with the messages of the dataset."""
        if task.answer is None:
            raise ValueError(f"task {task.index} has no answer to compare with")
        self._task = task
        return task.messages

    async def step(self, action: Action) -> Step:
        """Compare the answer. Ask again while tries are left."""
        self._tries -= 1
        if action.text == self._task.answer:
            return Step(rewards={REWARD: self._value})
        if self._tries == 0:
            return Step(rewards={REWARD: 0.0})
        self._value *= self._discount
        return Step(messages=(Message("user", self._task.messages[-1].content),), done=False)

    async def close(self) -> None:
        """Called once at the end of the conversation, also after an error."""


class SecondTryFactory:
    """Makes one environment per trajectory. Its arguments are `env.options`."""

    def __init__(self, tries: int = 2, discount: float = 0.5) -> None:
        if tries < 1:
            raise ValueError(f"tries = {tries}: give at least one")
        self.reward_weights = {REWARD: 1.0}  # weight of each reward in the sum
        self._tries, self._discount = tries, discount

    def create(self) -> SecondTryEnvironment:
        """An environment for one trajectory."""
        return SecondTryEnvironment(self._tries, self._discount)

    async def close(self) -> None:
        """Called once, when the run ends."""
