"""NeMo-RL's MOPD: the teachers of agents, and its loss and gradient, written sequence by sequence."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.distillation import distillation_loss
from nemorl.algorithms.teachers import teachers_of_tasks
from nemorl.config.algorithm import OnPolicyDistillationConfig
from nemorl.config.auxiliary import default_teacher, teachers_by_key
from nemorl.config.experiment import Experiment
from nemorl.data.datasets import load_tasks
from nemorl.data.packed import PackedBatch
from nemorl.errors import RunError
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from nemorl.importing.rules import CannotImport, Imported
from tests.algorithms.packed import MASKS, current, ragged
from tests.importing.contexts import MOPD, OPTIONS

_LOSS = {
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "loss_fn.disable_ppo_ratio": True,
    "loss_fn.use_importance_sampling_correction": True,
    "loss_fn.truncated_importance_sampling_type": "icepop",
    "loss_fn.truncated_importance_sampling_ratio": 1.3,
    "loss_fn.truncated_importance_sampling_ratio_min": 0.8,
}
_OPD = "on_policy_distillation"
_MODELS, _APART = f"{_OPD}.teacher_model_by_agent_name", f"{_OPD}.non_colocated_teachers"


def imported(values: dict[str, Any]) -> Imported:
    return import_values(PROJECTS["nemo-rl"], MOPD | values, OPTIONS)


def experiment(values: dict[str, Any], folder: Path) -> Experiment:
    return checked(to_text(imported(values), PROJECTS["nemo-rl"], "test"), folder)


def outcomes(values: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {row.key: (row.outcome, row.changes_result) for row in imported(values).rows}


def by_the_peer(
    batch: PackedBatch,
    logprobs: Tensor,
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    most: float = math.inf,
    by_sequence: bool = False,
    ratio: bool = False,
) -> tuple[Tensor, float, float]:
    """OPDAdvantageEstimator, and ClippedPGLossFn with or without a ratio and with IcePop, in one update.

    Its loss, the mean of the weighted negative advantages, and the share of the tokens that it divides by.
    Sequences whose mean factor between engine and trainer exceeds `most` are masked.
    """
    assert batch.logprobs is not None
    assert batch.reference_logprobs is not None
    means, values, sizes, start = [], [], [], 0
    for mask in MASKS:
        places = [start + i for i, sampled in enumerate(mask) if sampled]
        start += len(mask)
        own = logprobs[places]
        prev, engine = own.detach(), batch.logprobs[places].double()
        if float((engine - prev).abs().exp().mean()) > most:
            continue
        advantages = (batch.reference_logprobs[places].double() - prev).clamp(*bounds)
        weights = (prev - engine).exp()
        weights = torch.where((weights >= 0.8) & (weights <= 1.3), weights, 0.0)
        terms = -advantages * (own - prev).exp() if ratio else -advantages * own
        if ratio:
            clipped = -advantages * (own - prev).exp().clamp(0.8, 1.28)
            terms = torch.maximum(terms, clipped)
            terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * 3), terms)
        means.append((weights * terms).sum())
        values.append(float((weights * -advantages).sum()))
        sizes.append(len(places))
    if by_sequence:
        loss = torch.stack([one / size for one, size in zip(means, sizes, strict=True)]).mean()
        return loss, sum(v / s for v, s in zip(values, sizes, strict=True)) / len(sizes), 1.0
    share = sum(sizes) / sum(map(sum, MASKS))
    return torch.stack(means).sum() / sum(sizes), sum(values) / sum(sizes), share


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens": ({}, {}),
    "sequences": ({"loss_fn.token_level_loss": False}, {"by_sequence": True}),
    "clipped advantages": (
        {"grpo.advantage_clip_low": -0.4, "grpo.advantage_clip_high": 0.4},
        {"bounds": (-0.4, 0.4)},
    ),
    "masked sequences": ({"grpo.seq_logprob_error_threshold": 1.35}, {"most": 1.35}),
    "a ratio of 1": (
        {"loss_fn.disable_ppo_ratio": False, "loss_fn.ratio_clip_max": 0.28, "loss_fn.ratio_clip_c": 3.0},
        {"ratio": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_gradient_of_the_peer(case: str, tmp_path: Path) -> None:
    """In float64, to 1e-6; one token is 30 nats less likely to the teacher."""
    given, how = CASES[case]
    algorithm = experiment(_LOSS | given, tmp_path).algorithm
    assert isinstance(algorithm, OnPolicyDistillationConfig)
    batch = ragged(7, algorithm.aggregation)
    assert batch.reference_logprobs is not None
    distant = batch.reference_logprobs.double()
    distant[3] -= 30
    policy = current(batch, 2).double()
    batch = replace(batch, old_logprobs=None, reference_logprobs=distant, weights=batch.weights.double())
    own = policy.clone().requires_grad_()
    found = distillation_loss(algorithm.loss, algorithm.correction)(batch, own, torch.zeros_like(policy))
    found.loss.backward()  # type: ignore[no-untyped-call]

    theirs = policy.clone().requires_grad_()
    loss, value, share = by_the_peer(batch, theirs, **how)
    loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    assert theirs.grad is not None
    # Masked sequences stay in the divisor here.
    torch.testing.assert_close(own.grad, theirs.grad * share, rtol=1e-6, atol=1e-7)
    assert float(found.loss.detach()) == pytest.approx(value * share, rel=1e-6)
    assert (share < 1) == (case == "masked sequences")
    assert 0 < float(found.sums["correction/masked"]) < sum(map(sum, MASKS))


def test_one_teacher_scores_all_samples(tmp_path: Path) -> None:
    found = experiment({f"{_OPD}.strict_agent_name_match": True}, tmp_path)
    assert list(found.teachers) == ["main"]
    assert found.cluster.num_nodes == 5
    assert found.teachers["main"].layout.world_size == 8  # type: ignore[union-attr]
    assert found.policy.layout.world_size == 32, "the policy has the nodes of the teacher"
    algorithm = found.algorithm
    assert isinstance(algorithm, OnPolicyDistillationConfig)
    assert algorithm.teacher_key is None


def test_teachers_have_the_agents_of_their_models(tmp_path: Path) -> None:
    """Agents with the same model share a teacher, which has the settings of the first of them."""
    given = {
        f"{_MODELS}.prose": "org/prose",
        f"{_MODELS}.more_sums": "org/sums",
        f"{_OPD}.default_teacher_alias": "more_sums",
        f"{_APART}.teacher_overrides.prose.num_nodes": 2,
        f"{_APART}.teacher_overrides.prose.tensor_model_parallel_size": 4,
        f"{_APART}.teacher_overrides.prose.precision": "fp32",
        f"{_APART}.teacher_overrides.more_sums.num_nodes": 8,
    }
    found = experiment(given, tmp_path)
    algorithm = found.algorithm
    assert isinstance(algorithm, OnPolicyDistillationConfig)
    assert algorithm.teacher_key == "agent"
    assert teachers_by_key(found.teachers) == {"sums": "sums", "more_sums": "sums", "prose": "prose"}
    assert default_teacher(found.teachers) == "sums"
    layouts = {name: one.layout for name, one in found.teachers.items()}  # type: ignore[union-attr]
    assert {name: one and one.world_size for name, one in layouts.items()} == {"sums": 8, "prose": 16}
    assert layouts["prose"] is not None
    assert layouts["prose"].tensor_parallel_size == 4
    assert found.policy.layout.world_size == 16
    strict = experiment(given | {f"{_OPD}.strict_agent_name_match": True}, tmp_path)
    assert default_teacher(strict.teachers) is None


def test_rows_of_nemo_gym_name_their_teachers(tmp_path: Path) -> None:
    """Agents that no teacher is of have the default one's."""
    rows = [
        {"responses_create_params": {"input": "12?"}, "agent_ref": {"name": name}}
        for name in ("prose", "sums", "tales", "unknown")
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    given = {
        "data.train.data_path": str(file),
        **{f"{_MODELS}.{name}": "org/prose" for name in ("prose", "tales")},
        f"{_OPD}.default_teacher_alias": "sums",
    }
    found = experiment(given, tmp_path)
    algorithm, tasks = found.algorithm, load_tasks(found.data.train, found.data)
    assert isinstance(algorithm, OnPolicyDistillationConfig)
    names = teachers_of_tasks(tasks, algorithm.teacher_key, found.teachers)
    assert names == ["prose", "sums", "prose", "sums"]
    strict = experiment(given | {f"{_OPD}.strict_agent_name_match": True}, tmp_path)
    with pytest.raises(RunError, match=r"task 3: the column `agent`.* is 'unknown'"):
        teachers_of_tasks(tasks, algorithm.teacher_key, strict.teachers)


def test_what_a_loss_of_rewards_has_is_lost() -> None:
    """Without effect but for a reference, the likelihood of good samples, and advantages of flagged turns."""
    given = {
        "loss_fn.ratio_clip_max": 0.28,
        "grpo.normalize_rewards": True,
        "grpo.reward_scaling.enabled": True,
        "loss_fn.reference_policy_kl_type": "k3",
    }
    found = outcomes(_LOSS | given)
    assert {key: found[key] for key in given} == dict.fromkeys(given, ("none", False))
    lost = {
        "loss_fn.reference_policy_kl_penalty": 0.01,
        "loss_fn.positive_example_nll_weight": 0.1,
        "grpo.invalid_tool_call_advantage": -5.0,
        "policy.generation.top_p": 0.9,
    }
    found = outcomes(_LOSS | lost)
    assert {key: found[key] for key in lost} == dict.fromkeys(lost, ("none", True))


def test_what_differs_is_remarked_on() -> None:
    for given in (
        {"policy.train_global_batch_size": 32},
        {"grpo.seq_logprob_error_threshold": 2.0},
        {"grpo.advantage_clip_low": -2.0},
        {"grpo.advantage_clip_low": -2.0, "grpo.advantage_clip_high": 3.0},
    ):
        found = outcomes(_LOSS | given)
        assert {key: found[key] for key in given} == dict.fromkeys(given, ("changed", True))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({f"{_OPD}.enabled": False}, r"on_policy_distillation.enabled = false: the estimator opd requires"),
        ({f"{_APART}.enabled": False}, "non_colocated_teachers.enabled = false"),
        (
            {f"{_MODELS}.prose": "org/prose", f"{_OPD}.default_teacher_alias": "poems"},
            "default_teacher_alias = poems: no agent of .* expected one of sums, prose",
        ),
        (
            {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.disable_ppo_ratio": False},
            "sequence_level_importance_ratios = true: the tokens of a sequence would share",
        ),
    ],
)
def test_what_the_peer_refuses_or_has_no_counterpart(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(CannotImport, match=problem):
        imported(_LOSS | given)


def test_another_estimator_has_no_teachers() -> None:
    values = {"grpo.adv_estimator.name": "grpo"}
    found = imported(values)
    assert "teachers" not in found.tree
    assert found.tree["algorithm"]["name"] == "grpo"
    assert outcomes(values)[f"{_MODELS}.sums"] == ("none", False)
