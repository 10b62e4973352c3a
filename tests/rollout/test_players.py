"""Several players in one episode: a trajectory, rewards and a group of its own for each."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from nemorl.commands.show import _list
from nemorl.config.environment import FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.rollout.stored import LocalWriter, RolloutFiles, SampledBy, StoredGroup, TrajectoryLog, spread
from nemorl.trajectories import Episode, EpisodeEnvironment, Message, Model, Task, Trajectory
from tests.rollout.stored import stored, trajectory
from tests.rollout.test_episodes import SEEN, chat_model, experiment, sample, scripted, seen

__all__ = ["chat_model", "seen"]

GIVEN = {"white": {"length": 2.0}, "black": {"length": -2.0}}


class Duel(EpisodeEnvironment):
    """Each player answers what the other one says; white over HTTP. The model itself says nothing."""

    def __init__(self, given: dict[str, dict[str, float]], raises: bool) -> None:
        self._given, self._raises = given, raises

    async def run(self, task: Task, model: Model) -> Episode:
        white, black = model.player("white"), model.player("black")
        assert model.player("white") is white
        client = AsyncOpenAI(base_url=white.base_url, api_key=white.api_key, max_retries=0)
        of_white: list[Any] = [{"role": "user", "content": "begin"}]
        of_black: list[Message] = []
        for _ in range(2):
            answer = await client.chat.completions.create(model=white.name, messages=of_white)
            said = str(answer.choices[0].message.content)
            if self._raises:
                raise LookupError("no board")
            of_black.append(Message("user", said))
            reply = await black.chat(of_black)
            of_black.append(reply.message)
            of_white += [{"role": "assistant", "content": said}, {"role": "user", "content": reply.text}]
        await client.post("/rewards", cast_to=object, body={"rewards": {"length": 0.5}, "id": answer.id})
        return Episode({"length": 1.0}, {reply.id: {"length": 0.25}}, {"moves": 4}, self._given)


class Factory:
    def __init__(self, given: dict[str, dict[str, float]], raises: bool = False) -> None:
        self.reward_weights = {"length": 1.0}
        self._given, self._raises = given, raises

    def create(self) -> Duel:
        return Duel(self._given, self._raises)

    async def close(self) -> None:
        pass


def duel(folder: Path, **options: Any) -> Experiment:
    config = experiment(folder, "Duel", {}, factory=f"{__name__}:Factory", max_retries=0)
    env = config.env.model_copy(update={"options": {"given": GIVEN} | options})
    rewards = (FunctionRewardConfig(function="tests.rollout.test_episodes:seen"),)
    return config.model_copy(update={"env": env, "rewards": rewards})


def test_each_player_has_a_trajectory_with_its_own_tokens_and_rewards(chat_model, tokenizer) -> None:
    group, trajectories = sample(duel(chat_model), scripted(tokenizer, "w1", "b1", "w2", "b2").generate)
    assert [t.player for t in trajectories] == [t.player for t in group.trajectories] == ["white", "black"]
    trained = [tokenizer.decode(t.tokens[t.loss_mask]) for t in trajectories]
    assert trained == ["w1<|im_end|>w2<|im_end|>", "b1<|im_end|>b2<|im_end|>"]
    # White was given `b1` in the middle, and black both moves of white.
    given = [tokenizer.decode(t.tokens[~t.loss_mask]) for t in trajectories]
    assert ["b1" in given[0], "b2" in given[0], "w1" in given[1], "w2" in given[1]] == [
        True,
        False,
        True,
        True,
    ]
    # The whole, the player's own, and those of single answers: posted ones of white, returned ones of black.
    assert [t.reward for t in group.trajectories] == [1.0 + 2.0 + 0.5, 1.0 - 2.0 + 0.25]
    assert [t.turn_rewards for t in group.trajectories] == [(0.0, 3.5), (0.0, -0.75)]
    assert [t.num_sampled for t in group.trajectories] == [int(t.loss_mask.sum()) for t in trajectories]


def test_players_of_several_samples_lie_in_the_order_of_samples(chat_model, tokenizer) -> None:
    group, trajectories = sample(duel(chat_model), scripted(tokenizer, *["x"] * 12).generate, 3, num_texts=2)
    assert [t.player for t in group.trajectories] == ["white", "black"] * 3
    assert [t.row for t in group.trajectories] == list(range(6)) == list(range(len(trajectories)))
    assert [[t.row for t in one.trajectories] for one in group.by_player] == [[0, 2, 4], [1, 3, 5]]
    assert group.num_samples == 3
    assert [text.sample for text in group.texts] == [0, 1, 2, 3]  # of both players of two samples
    # A function that compares the answers of a group sees those of one player at a time.
    assert sorted((columns["player"], columns["moves"]) for columns in SEEN) == [
        (["black"] * 3, [4] * 3),
        (["white"] * 3, [4] * 3),
    ]


def test_an_episode_that_fails_fails_for_those_who_made_calls(chat_model, tokenizer) -> None:
    group, (trajectory,) = sample(duel(chat_model, raises=True), scripted(tokenizer, "w1").generate)
    (summary,) = group.trajectories
    assert (summary.player, summary.error) == ("white", "environment run: LookupError: no board")
    assert not trajectory.loss_mask.any()


def test_rewards_of_unknown_players_are_an_error_of_the_environment(chat_model, tokenizer) -> None:
    engine = scripted(tokenizer, "w1", "b1", "w2", "b2")
    group, _ = sample(duel(chat_model, given={"red": {"length": 1.0}}), engine.generate)
    problem = "environment run: ValueError: rewards of the player red, which the episode does not have"
    assert [t.error for t in group.trajectories] == [problem] * 2


def test_a_name_that_metrics_cannot_have_is_refused(chat_model, tokenizer) -> None:
    group, _ = sample(
        experiment(chat_model, "Duel", {}, factory=f"{__name__}:Odd"), scripted(tokenizer).generate
    )
    assert "player = 'a/b': names of players have letters" in str(group.trajectories[0].error)


class Odd(Factory):
    def __init__(self, shape: str) -> None:
        super().__init__({})

    def create(self) -> Any:
        return AsksForOddPlayer()


class AsksForOddPlayer(EpisodeEnvironment):
    async def run(self, task: Task, model: Model) -> Episode:
        await model.player("a/b").chat([Message("user", "x")])
        return Episode()


def test_stored_trajectories_name_their_player(
    chat_model, tokenizer, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, trajectories = sample(duel(chat_model), scripted(tokenizer, "w1", "b1", "w2", "b2").generate)
    files = RolloutFiles(tmp_path / "trajectories")
    files.begin(SampledBy("model", "checksum", 1.0, {}))
    advantages = tuple(spread(t, 0.0) for t in trajectories)
    files.write(1, [StoredGroup(1, group, tuple(trajectories), advantages)])
    read = files.group(1, 0)
    assert [t.player for t in read.sequences] == [t.player for t in read.summary.trajectories]
    assert [t.player for t in read.sequences] == ["white", "black"]
    _list(files)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("player", "white", "black"))


@pytest.mark.parametrize(("count", "written"), [(2, 1), (3, 2)])
def test_stored_samples_are_counted_without_their_players(tmp_path, count: int, written: int) -> None:
    def games(number: int) -> StoredGroup:
        played = [replace(trajectory(2), player=name) for name in ("white", "black")]
        return stored(number, [[one] for one in played * 2])

    groups = {f"reference {number}": games(number) for number in range(2)}

    async def fetch(reference: str) -> tuple[Trajectory, ...]:
        return groups[reference].sequences

    files = RolloutFiles(tmp_path / "trajectories")
    files.begin(SampledBy("model", "checksum", 1.0, {}))
    summaries = [replace(group.summary, reference=name) for name, group in groups.items()]
    log = TrajectoryLog(files, lambda: [LocalWriter(fetch)], count)
    asyncio.run(log.write(1, log.kept(summaries), {}))
    assert len(list(files.summaries())) == written


class Explores(EpisodeEnvironment):
    """Continues in three ways after its first turn: itself, with a fork, and with a fork over HTTP."""

    async def run(self, task: Task, model: Model) -> Episode:
        history = [Message("user", "plan")]
        first = await model.chat(history)
        history += [first.message, Message("user", "go")]
        fork, other = model.fork(), model.fork()
        one, two = await model.chat(history), await fork.chat(history)
        client = AsyncOpenAI(base_url=other.base_url, api_key=other.api_key, max_retries=0)
        messages: list[Any] = [{"role": m.role, "content": m.content} for m in history]
        three = await client.chat.completions.create(model=other.name, messages=messages)
        given = {first.id: 0.125, one.id: 1.0, two.id: 0.5, three.id: 0.25}
        return Episode(answer_rewards={answer: {"length": reward} for answer, reward in given.items()})


class Explorers(Factory):
    def __init__(self, shape: str) -> None:
        super().__init__({})

    def create(self) -> Any:
        return Explores()


def test_forks_are_trajectories_that_train_what_follows_the_fork(chat_model, tokenizer) -> None:
    config = experiment(chat_model, "Explores", {}, factory=f"{__name__}:Explorers")
    group, trajectories = sample(config, scripted(tokenizer, "p", "one", "two", "three").generate)
    trained = [tokenizer.decode(t.tokens[t.loss_mask]) for t in trajectories]
    assert trained == ["p<|im_end|>one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    trunk, *forks = trajectories
    end = trunk.turns[1].start  # of what all of them share
    for fork in forks:
        assert fork.tokens[:end].tolist() == trunk.tokens[:end].tolist()
        assert fork.turns[0].start == end
        assert (fork.versions[:end] == -1).all()
    assert [(t.player, t.fork, t.reward) for t in group.trajectories] == [
        ("", 0, 1.125),
        ("", 1, 0.5),
        ("", 2, 0.25),
    ]
    assert (group.num_samples, [len(one.trajectories) for one in group.by_player]) == (1, [3])
