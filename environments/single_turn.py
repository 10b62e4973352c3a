"""One answer and no reward of its own: `rewards` score it."""

from nemorl.config.environment import SingleTurnEnvConfig
from nemorl.trajectories import Action, Message, Step, Task


class SingleTurnEnvironment:
    """Asks the task as it is and ends with the first turn."""

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening."""
        return task.messages

    async def step(self, action: Action) -> Step:
        """Done, whatever was said."""
        return Step()

    async def close(self) -> None:
        """Nothing is held."""


class SingleTurnFactory:
    """Makes `SingleTurnEnvironment`s."""

    def __init__(self, config: SingleTurnEnvConfig) -> None:
        self.reward_weights = config.reward_weights

    def create(self) -> SingleTurnEnvironment:
        """An environment for one trajectory."""
        return SingleTurnEnvironment()

    async def close(self) -> None:
        """Nothing is shared."""
