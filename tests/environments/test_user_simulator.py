"""A user that a model behind the project's own endpoint plays."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.environment import UserSimulatorEnvConfig
from nemorl.config.generation import EndpointConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import Tokenizer, load_tokenizer
from nemorl.environments.chat_client import ChatFailed
from nemorl.environments.user_simulator import (
    GREETING,
    UserSimulatorEnvironment,
    UserSimulatorFactory,
)
from nemorl.generation.router import Replica, Router
from nemorl.serve.app import Listening, listening
from nemorl.serve.sampling import Served
from nemorl.trajectories import EnvironmentLost, Message, Step
from tests.data.tokenizers import IM_END, save_tokenizer
from tests.environments.episodes import said, task
from tests.rollout.stand_ins import EchoEngine

KEY = "NEMORL_TEST_USER_KEY"
PERSONA = "You bought a lamp."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = save_tokenizer(tmp_path_factory.mktemp("user"))
    return load_tokenizer(PolicyConfig(model_path=folder))


def config_of(at: Listening, **fields: Any) -> UserSimulatorEnvConfig:
    os.environ[KEY] = at.api_key
    given = {"name": "user_simulator", "url": at.url, "model": "user", "api_key_env": KEY}
    return UserSimulatorEnvConfig.model_validate({**given, **fields})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is as it was after a test."""
    monkeypatch.setenv(KEY, "")


def with_user(
    tokenizer: Tokenizer,
    texts: list[str],
    talk: Callable[[UserSimulatorEnvironment], Awaitable[Any]],
    **fields: Any,
) -> tuple[Any, list[str]]:
    """What `talk` returns, and the prompts of the model that plays; the endpoint says the texts in turn."""
    prompts: list[str] = []
    left = list(texts)

    def answer(request: Any) -> list[int]:
        prompts.append(tokenizer.decode(request.prompt.tolist()))
        return [*tokenizer.encode(left.pop(0)), IM_END]

    async def main() -> Any:
        served = Served(Router([Replica("user", EchoEngine(answer).generate)]), tokenizer, "user", 2048, 20.0)
        async with listening(EndpointConfig(port=0), served) as at:
            factory = UserSimulatorFactory(config_of(at, **fields))
            try:
                return await talk(factory.create())
            finally:
                await factory.close()

    return asyncio.run(asyncio.wait_for(main(), 60)), prompts


async def converse(environment: UserSimulatorEnvironment, *turns: str) -> list[Step]:
    opening = await environment.reset(task(None, "It has not come.", persona=PERSONA))
    assert opening == (Message("user", "It has not come."),)
    return [await environment.step(said(turn)) for turn in turns]


def test_the_user_answers_until_nothing_is_left_to_say(tokenizer: Tokenizer) -> None:
    steps, prompts = with_user(
        tokenizer,
        ["417, hurry!", "Thank you. [END]"],
        lambda environment: converse(environment, "Which number?", "It comes today."),
    )
    assert steps == [Step((Message("user", "417, hurry!"),), done=False), Step()]
    # Seen from the other side: what the user has said is the model's own, and the policy asks.
    instructions = (
        f"Play a user who talks with an assistant. {PERSONA}\nWrite only what the user says next. "
        "When the user has nothing more to say, write [END]"
    )
    sides = [
        ("system", instructions), ("user", GREETING), ("assistant", "It has not come."),
        ("user", "Which number?"), ("assistant", "417, hurry!"), ("user", "It comes today."),
    ]  # fmt: skip
    shown = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in sides]
    assert prompts == [
        "".join(shown[:4]) + "<|im_start|>assistant\n",
        "".join(shown) + "<|im_start|>assistant\n",
    ]


def test_the_last_turn_has_no_answer(tokenizer: Tokenizer) -> None:
    steps, prompts = with_user(
        tokenizer, ["a"], lambda environment: converse(environment, "1", "2"), max_turns=2
    )
    assert [step.done for step in steps] == [False, True]
    assert len(prompts) == 1


def test_an_endpoint_that_is_gone_is_lost(tokenizer: Tokenizer) -> None:
    with pytest.raises(EnvironmentLost, match=r"http://127.0.0.1:1/v1 does not answer: ClientConnector"):
        with_user(tokenizer, [], lambda environment: converse(environment, "1"), url="http://127.0.0.1:1/v1")


def test_an_endpoint_that_hangs_is_lost(tokenizer: Tokenizer) -> None:
    async def hang(requests: Any) -> Any:
        await asyncio.Event().wait()
        yield

    async def main() -> None:
        served = Served(Router([Replica("user", hang)]), tokenizer, "user", 2048, 20.0)
        async with listening(EndpointConfig(port=0), served) as at:
            factory = UserSimulatorFactory(config_of(at, call_seconds=0.3))
            try:
                with pytest.raises(EnvironmentLost, match="does not answer: TimeoutError"):
                    await converse(factory.create(), "1")
            finally:
                await factory.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("fields", "texts", "problem"),
    [({"model": "other"}, [], "refused with status 404"), ({}, [" "], "answered without a text")],
)
def test_what_a_retry_cannot_fix_is_a_failure(
    tokenizer: Tokenizer, fields: dict[str, str], texts: list[str], problem: str
) -> None:
    with pytest.raises(ChatFailed, match=problem):
        with_user(tokenizer, texts, lambda environment: converse(environment, "1"), **fields)


def test_a_key_that_is_missing_is_named() -> None:
    fields = {"url": "http://127.0.0.1:1/v1", "model": "user", "api_key_env": "NO_SUCH_KEY"}
    with pytest.raises(ValueError, match=r"env.api_key_env = NO_SUCH_KEY: there is no such variable"):
        UserSimulatorFactory(UserSimulatorEnvConfig(name="user_simulator", **fields))


def test_a_task_without_a_persona_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="task 0 has no text in the column `persona`"):
        with_user(tokenizer, [], lambda environment: environment.reset(task()))
