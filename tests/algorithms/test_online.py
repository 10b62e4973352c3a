"""The steps of learning from a batch: who is asked what, in which order, and what goes where."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.algorithms.metrics import optimizer_metrics
from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.algorithms.policy_losses import ValueLoss
from nemorl.config.algorithm import OnlineConfig
from nemorl.data.losses import LogprobStats, TrainStats, ValueStats
from nemorl.data.shards import SequencePlace
from nemorl.rollout.groups import GroupSummary
from nemorl.session.session import Session
from tests.algorithms.groups import failed, group, trajectory

GROUPS = [
    group(0, trajectory(1.0, 0, 4), trajectory(0.0, 1, 2)),
    group(1, trajectory(1.0, 0, 3, num_turns=2, turn_rewards=(0.25, 0.0)), failed(1)),
]
VALUES = {"loss/total": 0.5, "tokens": 4.0, "value": 1.0, "return": 2.0, "return_squared": 2.0, "error": 1.0}
VALUES |= {"error_squared": 1.0, "clip_fraction": 0.0}
POLICY = {"tokens": 4.0, "entropy": 1.0, "loss/policy": 0.5, "logprob_gap/mean": 0.0}


class Model:
    """A `ModelHandle` that remembers what it is asked; with a barrier it computes when others do."""

    def __init__(self, name: str, log: list[str], barrier: asyncio.Barrier | None = None) -> None:
        self.name, self.log, self.barrier = name, log, barrier
        self.devices = self if barrier else None
        self.places: Sequence[SequencePlace] = ()

    async def outlasting(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    async def meet_others(self) -> None:
        if self.barrier is not None:
            async with asyncio.timeout(10):
                await self.barrier.wait()

    async def load(self, places: Sequence[SequencePlace], **_: Any) -> None:
        self.places = places
        self.log.append(f"{self.name} load")

    async def logprobs(
        self, *, old: bool, reference: bool, entropy: bool = False, collision: bool = False
    ) -> LogprobStats:
        await self.meet_others()
        of = f"{' old' * old}{' reference' * reference}{' entropy' * entropy}{' collision' * collision}"
        self.log.append(f"{self.name} logprobs{of}")
        of_this = 2.0 if self.name == "policy" else 3.0
        return LogprobStats(0.0, 0.0, 9, flops=of_this * old, reference_flops=5.0 * reference)

    async def values(self) -> ValueStats:
        await self.meet_others()
        self.log.append(f"{self.name} values")
        return ValueStats(0.0, 9, flops=7.0)

    async def share(self, field: str) -> str:
        return f"{field} of the {self.name}"

    async def take(self, field: str, column: str) -> None:
        self.log.append(f"{self.name} takes {column} as {field}")

    async def estimate(self, estimator: Any) -> dict[str, float]:
        self.log.append(f"{self.name} estimates {estimator.config.name}")
        return {"advantage/mean": 0.0}

    async def sequence_metrics(self, metric: Any) -> list[float]:
        return [0.5, 1.5, 2.0, 0.0]

    async def take_advantages(self, places: Sequence[SequencePlace]) -> None:
        self.places = places
        self.log.append(f"{self.name} takes advantages")

    async def train(self, loss: Any, minibatch: int, *, keep: bool = False) -> TrainStats:
        self.log.append(f"{self.name} trains {minibatch}")
        sums = VALUES if isinstance(loss, ValueLoss) else POLICY
        maxima = {} if isinstance(loss, ValueLoss) else {"logprob_gap/max": 0.0}
        return TrainStats(dict(sums), maxima, 1.0, 0.1, False, False, 9, 9, 9)

    def packing_metrics(self) -> dict[str, float]:
        return {}


def step_of(
    names: Sequence[str],
    step: int = 1,
    groups: Sequence[GroupSummary] = GROUPS,
    barrier: asyncio.Barrier | None = None,
    **fields: Any,
) -> tuple[list[str], dict[str, Model], Any]:
    """One step of an algorithm over models of these names: what was asked, the models and the metrics."""
    counts = {"num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    config = OnlineConfig.model_validate({**counts, **fields})
    log: list[str] = []
    models: Any = {name: Model(name, log, barrier) for name in names}
    session = Session(models=models)
    observer: Any = SimpleNamespace(stage=lambda *_, **__: nullcontext(SimpleNamespace(advance=ignore)))
    gate: Any = SimpleNamespace(due=lambda _: False, check=ignore)
    nobody: Any = None
    update = PolicyGradientUpdate(config, EntropyWeight.of(config.entropy))
    algorithm = OnlineAlgorithm(config, session, nobody, update, gate, observer, nobody)
    metrics = asyncio.run(algorithm.train(update.prepare(groups, step), step))
    return log, models, metrics


def ignore(*_: Any, **__: Any) -> None:
    """Instead of what is not looked at."""


def test_ppo_with_a_reference_of_its_own() -> None:
    log, models, metrics = step_of(
        ["policy", "critic", "reference"],
        step=3,
        name="ppo",
        num_minibatches=2,
        num_epochs=2,
        kl={"coefficient": 0.1},
        critic={"aggregation": "seq-mean-token-mean", "warmup_steps": 2},
    )
    assert log == [
        "policy load",
        "critic load",
        "policy logprobs old",
        "reference load",
        "reference logprobs old",
        "critic values",
        "policy takes old_logprobs of the reference as reference_logprobs",
        "policy takes values of the critic as values",
        "policy estimates gae",
        "critic takes returns of the policy as returns",
        *[f"critic trains {minibatch}" for minibatch in (0, 1, 0, 1)],
        *[f"policy trains {minibatch}" for minibatch in (0, 1, 0, 1)],
    ]
    assert metrics["critic/value"] == 0.25
    assert metrics["loss/policy"] == 0.5
    # Minibatches are groups here: two sequences of 4 and 2 tokens; one of 3, and one that failed.
    assert [place.weight for place in models["policy"].places] == pytest.approx([1 / 6, 1 / 6, 1 / 3, 0])
    assert [place.weight for place in models["critic"].places] == pytest.approx([1 / 8, 1 / 4, 1 / 3, 0])
    # What a turn was rewarded stays with it, and all else goes to the last one.
    assert [place.rewards for place in models["policy"].places] == [(1.0,), (0.0,), (0.25, 0.75), (0.0,)]


def test_models_on_devices_of_their_own_compute_at_the_same_time() -> None:
    """None of them gets past the barrier before all three compute; the policy takes results afterwards."""
    names, kl = ["policy", "critic", "reference"], {"coefficient": 0.1}
    log, _, together = step_of(names, name="ppo", kl=kl, num_epochs=2, barrier=asyncio.Barrier(3))
    computed = ["policy logprobs old", "reference logprobs old", "critic values"]
    assert sorted(log[3:6]) == sorted(computed)
    assert log[6:8] == [
        "policy takes old_logprobs of the reference as reference_logprobs",
        "policy takes values of the critic as values",
    ]
    _, _, in_turns = step_of(names, name="ppo", kl=kl, num_epochs=2)
    assert together == in_turns


def test_in_warm_up_the_critic_learns_alone() -> None:
    log, _, metrics = step_of(["policy", "critic"], step=2, name="ppo", critic={"warmup_steps": 2})
    assert [entry for entry in log if "trains" in entry] == ["critic trains 0"]
    assert "loss/policy" not in metrics
    assert metrics["critic/lr"] == 0.1


def test_returns_of_tokens_need_no_critic() -> None:
    log, _, _ = step_of(["policy"], name="reinforce_plus_plus", kl={"coefficient": 0.1})
    assert log == [
        "policy load",
        "policy logprobs old",
        "policy logprobs reference",
        "policy estimates token_returns",
        "policy trains 0",
    ]


def test_divergence_in_the_reward_of_a_group() -> None:
    log, models, metrics = step_of(
        ["policy"],
        name="grpo",
        advantage={"normalize": False},
        kl={"coefficient": 0.1, "placement": "reward"},
    )
    assert log[-2:] == ["policy takes advantages", "policy trains 0"]
    # Rewards 1 - 0.05 and 0 - 0.15; a failed one has no group.
    advantages = [place.advantage for place in models["policy"].places]
    assert advantages == pytest.approx([0.55, -0.55, 0.0, 0.0])
    assert metrics["kl/penalty"] == pytest.approx(0.1 * (0.5 + 1.5 + 2.0) / 3)


def test_one_update_in_a_step_requires_no_old_logprobs() -> None:
    for correction in ({"name": "none"}, {"name": "mis"}):
        log, _, _ = step_of(["policy"], name="grpo", correction=correction)
        assert log == ["policy load", "policy trains 0"]


def test_a_divisor_of_what_is_kept_requires_old_logprobs() -> None:
    log, _, _ = step_of(["policy"], name="grpo", correction={"name": "mis", "divisor": "kept"})
    assert log == ["policy load", "policy logprobs old", "policy trains 0"]


def test_a_choice_by_entropy_requires_the_entropies_before_the_updates() -> None:
    log, _, _ = step_of(["policy"], name="grpo", loss={"top_entropy_quantile": 0.2})
    assert log == ["policy load", "policy logprobs old entropy", "policy trains 0"]


@pytest.mark.parametrize("form", ["decoupled", "bypass"])
def test_a_mean_of_weights_requires_old_logprobs(form: str) -> None:
    correction = {"name": "tis", "form": form, "normalize": True}
    log, _, _ = step_of(["policy"], name="grpo", loss={"name": "reinforce"}, correction=correction)
    assert log == ["policy load", "policy logprobs old", "policy trains 0"]


def test_a_baseline_of_tokens_requires_what_the_old_policy_says_of_all_tokens() -> None:
    log, models, _ = step_of(["policy"], name="otb")
    assert log == [
        "policy load",
        "policy logprobs old collision",
        "policy estimates otb",
        "policy trains 0",
    ]
    assert [place.group for place in models["policy"].places] == [0, 0, 1, 1]
    assert [place.rewards for place in models["policy"].places] == [(1.0,), (0.0,), (0.25, 0.75), (0.0,)]


def test_well_rewarded_trajectories_are_imitated_by_the_tokens_of_their_minibatch() -> None:
    fields = {"num_minibatches": 2, "likelihood": {"coefficient": 0.1, "min_reward": 0.5}}
    groups = [
        group(0, trajectory(0.5, 0, 4), trajectory(0.75, 1, 2)),
        group(1, trajectory(0.0, 0, 3), failed(1)),
    ]
    _, models, _ = step_of(["policy", "critic"], groups=groups, name="ppo", **fields)
    weights = [place.likelihood for place in models["policy"].places]
    assert weights == pytest.approx([1 / 6, 1 / 6, 0, 0])
    assert {place.likelihood for place in models["critic"].places} == {None}
    _, models, _ = step_of(["policy"], groups=groups, name="grpo")
    assert {place.likelihood for place in models["policy"].places} == {None}


NOTHING = [group(0, failed(0), failed(1)), group(1, failed(0), failed(1))]


def test_where_nothing_trains_no_model_is_asked_for_anything() -> None:
    """As after filters that leave no group: no optimizer steps, so neither momentum nor decay moves."""
    for kl in ({}, {"coefficient": 0.1, "placement": "reward", "estimator": "k1"}):
        log, _, metrics = step_of(["policy", "critic"], step=3, groups=NOTHING, name="ppo", kl=kl)
        assert (log, metrics) == ([], optimizer_metrics([], left_out=1))


def test_minibatches_of_which_nothing_trains_are_left_out() -> None:
    groups = [group(0, trajectory(1.0, 0, 4), failed(1)), NOTHING[1]]
    fields = {"num_minibatches": 2, "num_epochs": 3, "advantage": {"name": "reinforce"}}
    log, _, metrics = step_of(["policy"], groups=groups, name="grpo", **fields)
    assert [entry for entry in log if "trains" in entry] == ["policy trains 0"] * 3
    assert (metrics["updates/all"], metrics["updates/empty"], metrics["loss/policy"]) == (6, 3, 0.5)


def test_the_first_error_of_a_run_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    async def next_batch(advance: object) -> list[GroupSummary]:
        return GROUPS

    stage = SimpleNamespace(advance=ignore, share=ignore)
    observer: Any = SimpleNamespace(stage=lambda *_, **__: nullcontext(stage))
    collector: Any = SimpleNamespace(next_batch=next_batch)
    counts = {"num_steps": 9, "num_prompts_per_step": 2, "num_generations_per_prompt": 2}
    config = OnlineConfig.model_validate({"name": "grpo", **counts})
    nobody: Any = None
    algorithm = OnlineAlgorithm(config, nobody, collector, nobody, nobody, observer, nobody)
    for _ in range(2):
        assert asyncio.run(algorithm._sample()) == GROUPS
    error = GROUPS[1].trajectories[1].error
    assert caplog.messages == [f"1 of 4 trajectories failed. The first error: {error}"]


def test_operations_of_the_passes_before_an_update_are_counted() -> None:
    _, _, inside = step_of(["policy"], name="grpo", kl={"coefficient": 0.1}, num_minibatches=2)
    assert {k: v for k, v in inside.items() if k.startswith("flops/")} == {
        "flops/logprobs": 2.0,
        "flops/reference": 5.0,  # of the policy's processes
    }
    _, _, apart = step_of(["policy", "reference", "critic"], name="ppo", kl={"coefficient": 0.1})
    assert {k: v for k, v in apart.items() if k.startswith("flops/")} == {
        "flops/logprobs": 2.0,
        "flops/reference": 3.0,
        "flops/values": 7.0,
    }
