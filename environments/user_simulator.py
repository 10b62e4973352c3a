"""A user that another model plays, behind an OpenAI endpoint.

    task        user: My order has not come.       persona: You bought a lamp. You lose patience quickly.
    policy      What is your order number?
    simulated   417, and give me my money back!
    …
    simulated   [END]

The model that plays sees the conversation from the user's side: what the policy says is addressed to it. The
environment gives no rewards; those of `rewards` score the conversation.
"""

import os

from nemorl.config.environment import UserSimulatorEnvConfig
from nemorl.trajectories import Action, Environment, EnvironmentFactory, Message, Step, Task

from .chat_client import ChatClient, ChatFailed

GREETING = "Hello, how can I help you?"  # chat templates require that a conversation begins so


class UserSimulatorEnvironment(Environment):
    def __init__(self, config: UserSimulatorEnvConfig, user: ChatClient) -> None:
        self._config, self._user = config, user
        self._turns_left = config.max_turns
        self._seen: list[dict[str, str]] = []  # the conversation from the user's side

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """The task's own opening. Raises ValueError for a task without a persona."""
        config = self._config
        persona = task.columns.get(config.persona_key)
        if not isinstance(persona, str):
            raise ValueError(f"task {task.index} has no text in the column `{config.persona_key}`")
        instructions = config.instructions.replace("{persona}", persona)
        instructions = instructions.replace("{end_phrase}", config.end_phrase)
        self._seen = [{"role": "system", "content": instructions}, {"role": "user", "content": GREETING}]
        self._seen += [_from_other_side(m) for m in task.messages if m.role in ("user", "assistant")]
        return task.messages

    async def step(self, action: Action) -> Step:
        """Raises EnvironmentLost if the endpoint does not answer, and ChatFailed."""
        self._turns_left -= 1
        if self._turns_left == 0:
            return Step()
        self._seen.append(_from_other_side(Message("assistant", action.content)))
        if not (text := (await self._user.say(self._seen)).strip()):
            raise ChatFailed(f"the user's endpoint {self._config.url} answered without a text")
        said = Message("user", text)
        if self._config.end_phrase in said.content:
            return Step()
        self._seen.append(_from_other_side(said))
        return Step((said,), done=False)


def _from_other_side(message: Message) -> dict[str, str]:
    return {"role": "user" if message.role == "assistant" else "assistant", "content": message.content}


class UserSimulatorFactory(EnvironmentFactory):
    def __init__(self, config: UserSimulatorEnvConfig) -> None:
        """Raises ValueError if the variable with the key is missing."""
        self._config, self.reward_weights = config, config.reward_weights
        if (name := config.api_key_env) is not None and name not in os.environ:
            raise ValueError(f"env.api_key_env = {name}: there is no such variable; set it to the key")
        self._user = ChatClient(
            config.url,
            config.model,
            key=None if name is None else os.environ[name],
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            seconds=config.call_seconds,
        )

    def create(self) -> UserSimulatorEnvironment:
        return UserSimulatorEnvironment(self._config, self._user)

    async def close(self) -> None:
        await self._user.close()
