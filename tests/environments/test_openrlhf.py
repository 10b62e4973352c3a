"""Agent files of OpenRLHF, run as they are, compared with its loop over texts and tokens."""

import asyncio
import itertools
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.base import NotImported
from nemorl.config.library_environments import OpenRLHFEnvConfig
from nemorl.config.load import load_experiment
from nemorl.data.tokenizer import Tokenizer, prompts_of
from nemorl.environments.openrlhf import agent_at
from nemorl.generation.router import Replica, Router
from nemorl.generation.types import SamplingParams
from nemorl.rollout.custom_environment import Trial, custom_environment_problems
from nemorl.rollout.groups import GroupAssignment
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.rollout.worker import RolloutWorker
from nemorl.trajectories import Conversation
from tests.config.experiments import GRPO, write
from tests.data.conftest import model_folder, tokenizer
from tests.data.tokenizers import ENDOFTEXT, IM_END
from tests.environments.episodes import task
from tests.rollout.stand_ins import EchoEngine, ScriptedGenerator

__all__ = ["model_folder", "tokenizer"]

AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

SEEN = []


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        SEEN.append(dict(states))
        self.turns += 1
        done = self.turns == 3
        reward = torch.tensor(0.25 * self.turns)
        return {
            "rewards": reward,
            "scores": torch.tensor([float(states["label"] in states["action_text"])]),
            "environment_feedback": "" if done else "\\n<|im_start|>user\\n12 is wrong<|im_end|>\\n",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turns": torch.tensor(self.turns), "hidden": "a text"},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
FEEDBACK = "\n<|im_start|>user\n12 is wrong<|im_end|>\n"
_numbers = itertools.count()


@pytest.fixture
def section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes the section of an agent file, AGENT with parts replaced, in the current folder."""

    def made(*parts: tuple[str, str], **fields: Any) -> OpenRLHFEnvConfig:
        source, name = AGENT, f"agent_file_{next(_numbers)}"
        for old, new in parts:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return OpenRLHFEnvConfig(name="openrlhf", agent=f"{name}:AgentExecutor", **fields)

    monkeypatch.syspath_prepend(tmp_path)
    return made


def play(
    config: OpenRLHFEnvConfig,
    tokenizer: Tokenizer,
    turns: Sequence[Sequence[int]],
    chat: bool = True,
    **limits,
) -> tuple[Conversation, ScriptedGenerator]:
    """A conversation on the task "3+4?" with the answer 7, in which the policy samples these tokens."""
    generator = ScriptedGenerator(turns)
    defaults = {
        "max_sequence_length": 1000,
        "max_new_tokens": 999,
        "stop_token_ids": tokenizer.end_token_ids,
        "stop_strings": (),
        "generation_seconds": 10.0,
        "environment_seconds": 5.0,
    }
    prompts = prompts_of(tokenizer, chat, as_text=config.writes_text)
    loop = TurnLoop(Sampler(generator, tokenizer, prompts, TurnLimits(**(defaults | limits))))
    factory, key = config.make_factory(), SampleKey(1, 5, 2)
    (conversation,) = asyncio.run(loop.run(task(), factory.create(), key, SamplingParams()))
    return conversation, generator


@pytest.mark.parametrize("chat", [True, False])
def test_tokens_rewards_and_states_are_those_of_openrlhf(section, tokenizer: Tokenizer, chat: bool):
    """Its loop: the prompt, then each turn as sampled and the feedback, encoded without special tokens."""
    says = ["it is 1", "7", "6"]
    turns = [[*tokenizer.encode(text), IM_END] for text in says]
    config = section(logs=["turns"])
    conversation, generator = play(config, tokenizer, turns, chat)
    prompt = "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n" if chat else "3+4?"
    tokens, mask, text, states = tokenizer.encode(prompt), [], prompt, []
    mask += [False] * len(tokens)
    for turn, (said, feedback) in enumerate(zip(says, [FEEDBACK, FEEDBACK, ""], strict=True)):
        assert generator.requests[turn].prompt.tolist() == tokens
        states.append({"observation_text": text, "action_text": said, "label": "7"})
        added = tokenizer.encode(feedback)
        tokens, text = tokens + turns[turn] + added, text + said + feedback
        mask += [True] * len(turns[turn]) + [False] * len(added)
    trajectory = conversation.trajectory
    assert trajectory.error is None
    assert trajectory.tokens.tolist() == tokens
    assert trajectory.loss_mask.tolist() == mask
    seen = sys.modules[config.agent.partition(":")[0]].SEEN
    assert [{k: v for k, v in one.items() if k != "sampling_params"} for one in seen] == states
    # Rewards add up; scores and logs are those of the last step.
    assert trajectory.rewards == pytest.approx({"openrlhf": 1.5, "openrlhf_score": 0.0, "turns": 3.0})
    assert [turn.rewards["openrlhf"] for turn in trajectory.turns] == [0.25, 0.5, 0.75]
    assert config.reward_weights == {"openrlhf": 1.0, "openrlhf_score": 0.0, "turns": 0.0}


def test_without_scores_the_score_is_the_sum_so_far(section, tokenizer: Tokenizer):
    scores = '"scores": torch.tensor([float(states["label"] in states["action_text"])]),'
    conversation, _ = play(section((scores, "")), tokenizer, [[50, IM_END]] * 3)
    assert conversation.trajectory.rewards == pytest.approx({"openrlhf": 1.5, "openrlhf_score": 1.5})


def test_the_agent_may_open_the_conversation_and_end_turns(section, tokenizer: Tokenizer):
    """Strings that it puts into the sampling parameters end the next turns, until it takes them out."""
    opening = ('states["observation"]}', 'states["observation"].upper() + "12"}')
    stops = (
        "self.turns += 1",
        'self.turns += 1; states["sampling_params"].stop = ["<ab>"][: 2 - self.turns]',
    )
    config = section(opening, stops)
    conversation, generator = play(config, tokenizer, [[50, IM_END]] * 3, chat=False)
    assert conversation.trajectory.tokens.tolist()[:5] == tokenizer.encode("3+4?12")
    assert [request.stop_strings for request in generator.requests] == [(), ("<ab>",), ()]


def test_a_full_sequence_ends_the_conversation_with_what_it_earned(section, tokenizer: Tokenizer):
    """OpenRLHF leaves its loop when the feedback leaves no room."""
    room = len(tokenizer.encode("3+4?")) + 2 + len(tokenizer.encode(FEEDBACK))
    conversation, generator = play(
        section(), tokenizer, [[50, IM_END]] * 3, chat=False, max_sequence_length=room
    )
    assert len(generator.requests) == 1
    assert conversation.trajectory.error is None
    assert conversation.trajectory.rewards["openrlhf"] == 0.25


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("self.turns = 0", "raise LookupError('no board')", "AgentInstance() raised LookupError: no board"),
        ('return {"observation": states["observation"]}', "return 3", ".reset returned 3; return {'obs"),
        ("SEEN.append(dict(states))", "states['tools']", "AgentInstance.step raised KeyError: 'tools'"),
        ('"done": done,', "", "without done; return a dict with rewards, environment_feedback, done"),
        ('"rewards": reward', '"rewards": torch.zeros(2)', "step returned rewards=tensor([0., 0.]);"),
        ('"rewards": reward', '"rewards": None', "step returned rewards=None; return a tensor with one"),
        ('"extra_logs": {', '"extra_logs": 3, "x": {', "step returned extra_logs=3; return a dict"),
        ('"extra_logs": {', '"extra_logs": {"hidden": 1}, "environment_images": {', "images; only text"),
        ('"" if done else', "3 if 1 else", "step returned environment_feedback=3; return text"),
        ("self.turns += 1", "states['sampling_params'].temperature = 0", "set sampling_params.temperature"),
        ('states.get("sampling_params", None)', "object()", "returned sampling_params of the type object"),
    ],
)  # fmt: skip
def test_what_an_agent_does_wrong_names_its_method(section, tmp_path, tokenizer, old, new, problem):
    config = section((old, new))
    (found,) = custom_environment_problems(config, Trial(task(), 5.0, tokenizer))
    assert (found.field, found.value) == ("env.agent", config.agent)
    assert problem in found.fix
    assert f"{config.agent.partition(':')[0]}:AgentInstance" in found.fix


def test_a_sound_agent_has_no_problems(section, tokenizer: Tokenizer):
    assert list(custom_environment_problems(section(), Trial(task(), 5.0, tokenizer))) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("AgentExecutor(MultiTurnAgentExecutor)", "AgentExecutor", "is not derived from MultiTurn"),
        ("    def __init__(self):", "    execute = print\n\n    def __init__(self):", "has an `execute`"),
        ("super().__init__(AgentInstance)", "raise ValueError('no key')", "() raised ValueError: no key"),
        ("(AgentInstance)", "(dict)", "runs <class 'dict'>; give it a class derived from AgentInstanceBase"),
        ("class AgentExecutor", "class Executor", "has no AgentExecutor; did you mean `Executor`?"),
        ("import torch", "import openrlhf.models", "cannot import agent_file"),
    ],
)  # fmt: skip
def test_a_file_without_an_agent_of_steps_is_refused(section, old, new, problem):
    (found,) = custom_environment_problems(section((old, new)), Trial(None, 5.0))
    assert problem in found.fix
    with pytest.raises(NotImported):
        agent_at(section((old, new)).agent)


def test_logs_have_names_of_their_own():
    (problem,) = OpenRLHFEnvConfig(name="openrlhf", agent="a:B", logs=["openrlhf_score"]).problems({})
    assert (problem.field, problem.value) == ("logs", "openrlhf_score")


@pytest.mark.skipif(find_spec("openrlhf") is not None, reason="the package is installed")
def test_the_stand_in_is_there_only_while_the_file_is_imported(section):
    agent = agent_at(section().agent)
    assert [base.__module__ for base in agent.__mro__[1:2]] == ["nemorl.environments.openrlhf"]
    assert not [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]
    assert find_spec("openrlhf") is None


@pytest.mark.skipif(find_spec("openrlhf") is not None, reason="the package is installed")
def test_an_installed_package_has_precedence(section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "openrlhf" / "utils"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "agent.py").write_text(
        "class AgentInstanceBase: pass\n"
        "class MultiTurnAgentExecutor:\n"
        "    def __init__(self, agent_instance_cls): self.agent_instance_cls = agent_instance_cls\n"
        "    async def execute(self): pass\n"
    )
    try:
        agent = agent_at(section().agent)
        assert [base.__module__ for base in agent.__mro__[1:2]] == ["openrlhf.utils.agent"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
            monkeypatch.delitem(sys.modules, name)


def test_a_rollout_worker_gives_agents_the_text_of_the_prompt(
    section, tmp_path: Path, model_folder: Path, tokenizer: Tokenizer
):
    """Next to an environment whose messages the chat template writes."""
    config, sums = section(), "{dataset: {name: arithmetic, digits: 1, size: 10}}"
    several = f"{{agent: {{name: openrlhf, agent: '{config.agent}'}}, other: {{name: single_turn}}}}"
    experiment = load_experiment(
        write(tmp_path, GRPO.replace("models/arithmetic", str(model_folder))),
        [
            *("algorithm.num_generations_per_prompt=2", "data.chat=true", "policy.max_sequence_length=200"),
            f"data.train={{name: mixture, sources: {{agent: {sums}, other: {sums}}}}}",
            f"env={{name: by_task, key: source, environments: {several}}}",
        ],
    )
    engine, prompts = EchoEngine(lambda request: [*tokenizer.encode("07"), ENDOFTEXT]), []

    async def generate(requests):
        prompts.extend(tokenizer.decode(request.prompt.tolist()) for request in requests)
        async for batch in engine.generate(requests):
            yield batch

    worker = RolloutWorker(experiment, Router([Replica("echo", generate)]), store=lambda trajectories: 0)

    async def main() -> list[Any]:
        try:
            assignments = [GroupAssignment(group=n, task_index=n, num_samples=2) for n in (3, 13)]
            return sorted([one async for one in worker.run_groups(assignments)], key=lambda one: one.group)
        finally:
            await worker.close()

    agents, others = asyncio.run(main())
    assert [t.error for one in (agents, others) for t in one.trajectories] == [None] * 4
    assert [{t.num_turns for t in one.trajectories} for one in (agents, others)] == [{3}, {1}]
    opening = "<|im_start|>user\n"
    seen = sys.modules[config.agent.partition(":")[0]].SEEN
    assert seen[0]["observation_text"].startswith(opening)
    assert seen[0]["observation_text"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert all(prompt.startswith(opening) for prompt in prompts)
    assert sum(f"07<|endoftext|>{FEEDBACK}" in prompt for prompt in prompts) == 4  # two turns of two samples
