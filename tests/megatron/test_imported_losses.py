"""One update of an imported GRPO config by the worker, against the origin's formula on padded sequences.

The formulas are written here as their projects compute them, on [B, T] tensors of transformers' logprobs:
NeMo-RL at 7ea279ab (ClippedPGLossFn), verl at 1dda039b (compute_policy_loss_vanilla, agg_loss), TRL at
f2cd5771 (GRPOTrainer._compute_loss), OpenRLHF at 3c3be623 (PolicyLoss, compute_advantages_and_returns).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemorl.algorithms.objective import EntropyWeight
from nemorl.algorithms.policy_gradient import PolicyGradientUpdate
from nemorl.algorithms.token_advantages import TokenEstimator
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.advantages import TokenAdvantageBase
from nemorl.data.packed import PackedBatch
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from tests.algorithms.groups import paid
from tests.megatron.cases import assert_moved, partition
from tests.megatron.examples import policy_config, ragged_batch, reference_logprobs

REWARDS = [[1.0, 0.0, 0.25, 1.0], [0.5, 0.5, 0.5, 2.0]]
NEMO_RL = {
    "policy.model_name": "org/model",
    "policy.train_global_batch_size": 8,
    "policy.max_total_sequence_length": 512,
    "policy.megatron_cfg.enabled": True,
    "cluster.gpus_per_node": 1,
    "checkpointing.checkpoint_dir": "runs/a",
    "data.train.dataset_name": "DeepScaler",
    "grpo.num_prompts_per_step": 2,
    "grpo.num_generations_per_prompt": 4,
    "grpo.max_num_steps": 3,
    "loss_fn.reference_policy_kl_penalty": 0.1,
    "loss_fn.ratio_clip_max": 0.28,
    "loss_fn.use_importance_sampling_correction": True,
    "loss_fn.truncated_importance_sampling_type": "tis",
    "loss_fn.truncated_importance_sampling_ratio": 1.1,
}
VERL = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.1,
    "actor_rollout_ref.actor.entropy_coeff": 0.01,
    "actor_rollout_ref.actor.clip_ratio_c": 1.2,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "data.train_batch_size": 2,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": 3,
}
TRL = {
    "model_name_or_path": "org/model",
    "reward_funcs": "rewards.accuracy",
    "max_steps": 3,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "beta": 0.1,
    "delta": 1.3,
    "use_vllm": True,
    "vllm_importance_sampling_clip_max": 1.5,
}
OPENRLHF = {
    "trainer": "ppo_ray",
    "actor.model_name_or_path": "org/model",
    "actor.num_gpus_per_node": 1,
    "actor.eps_clip_low_high": [0.2, 0.27],
    "reward.remote_url": "reward_func.py",
    "data.prompt_dataset": "org/data",
    "data.max_samples": 16,
    "vllm.num_engines": 1,
    "train.colocate_all": True,
    "train.batch_size": 8,
    "rollout.batch_size": 2,
    "rollout.n_samples_per_prompt": 4,
    "algo.kl.init_coef": 0.1,
}
KL_LOSS = {"algo.kl.use_loss": True, "algo.kl.estimator": "k3"}


@dataclass(frozen=True)
class Padded:
    """[B, T] tensors of the sampled tokens; rewards [B] in groups of `members`.

    `values` are a critic's, of the state before each token.
    """

    logprobs: Tensor  # with gradient
    entropies: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor
    mask: Tensor
    collisions: Tensor  # of the old policy
    values: Tensor
    rewards: Tensor
    members: int


def nemo_rl_advantages(x: Padded) -> Tensor:
    """Baseline and deviation are of the others; 0 < deviation divides."""
    advantages = torch.zeros_like(x.rewards)
    for place, reward in enumerate(x.rewards.tolist()):
        first = place // x.members * x.members
        others = [
            r for i, r in enumerate(x.rewards.tolist()) if first <= i < first + x.members and i != place
        ]
        mean = sum(others) / len(others)
        square = sum(r * r for r in others) / len(others)
        deviation = ((square - mean**2) * len(others) / (len(others) - 1)) ** 0.5
        advantages[place] = (reward - mean) / (deviation + 1e-6) if deviation > 1e-9 else reward - mean
    return advantages.unsqueeze(1)


def nemo_rl(x: Padded, *, by_engine: bool = False) -> Tensor:
    advantages, tokens = nemo_rl_advantages(x), x.mask.sum()
    ratio = (x.logprobs - x.old).exp()
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    weights = (x.old - x.engine).exp().clamp(0.0, 1.1)
    actor = (weights * terms * x.mask).sum() / tokens
    log = (x.reference - x.logprobs).clamp(-20, 20)
    sampler = x.engine if by_engine else x.logprobs.detach()
    kl = ((x.logprobs - sampler).exp() * (log.exp() - 1 - log)).clamp(-10, 10)
    return actor + 0.1 * (kl * x.mask).sum() / tokens


def nemo_rl_engine(x: Padded) -> Tensor:
    return nemo_rl(x, by_engine=True)


def verl_advantages(x: Padded) -> Tensor:
    groups = x.rewards.reshape(-1, x.members)
    if x.members == 1:
        return x.rewards.unsqueeze(1)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-6)).reshape(-1, 1)


def verl(
    x: Padded, kept: Tensor | None = None, advantages: Tensor | None = None, weights: float | Tensor = 1.0
) -> Tensor:
    mask = x.mask if kept is None else x.mask * kept
    advantages = verl_advantages(x) if advantages is None else advantages
    ratio = (x.logprobs - x.old).clamp(-20, 20).exp()
    first, second = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    clipped = torch.maximum(first, second)
    terms = torch.where(advantages < 0, torch.minimum(-advantages * 1.2, clipped), clipped) * weights
    log = (x.reference - x.logprobs).clamp(-20, 20)
    kl = (log.exp() - log - 1).clamp(-10, 10)
    return ((terms - 0.01 * x.entropies + 0.1 * kl) * mask).sum() / mask.sum()


def verl_masked(x: Padded) -> Tensor:
    """Rejected sequences leave the mask, and so the divisor, the divergence and the entropy."""
    mean = ((x.old - x.engine) * x.mask).sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)
    kept = (mean.exp() >= 0.98) & (mean.exp() <= 1.02)
    assert 0 < int(kept.sum()) < len(kept)
    return verl(x, kept)


def verl_token_baselines(x: Padded, weights: Tensor | None = None) -> Tensor:
    """[B, T] by loops over groups and tokens: all rewards are at the last token, so they are all returns."""
    advantages = torch.zeros_like(x.mask)
    energies = 1 - 2 * x.old.exp() + x.collisions
    energies = energies if weights is None else energies * weights**2
    places = [row.nonzero().squeeze(1).tolist() for row in x.mask]
    for first in range(0, len(places), x.members):
        group = range(first, first + x.members)
        for t in range(max(len(places[i]) for i in group)):
            present = [i for i in group if len(places[i]) > t]
            sums = [sum(float(energies[i, j]) for j in places[i][: t + 1]) for i in present]
            rewards = [float(x.rewards[i]) for i in present]
            weighed = sum(w * r for w, r in zip(sums, rewards, strict=True))
            baseline = weighed / (sum(sums) + 1e-8) if len(present) > 1 else 0.0
            for i, reward in zip(present, rewards, strict=True):
                advantages[i, places[i][t]] = reward - baseline
    return advantages


def verl_otb(x: Padded) -> Tensor:
    return verl(x, advantages=verl_token_baselines(x))


def verl_otb_weighted(x: Padded) -> Tensor:
    """Weights are cut, and then divided by their mean over the tokens of the step."""
    weights = (x.old - x.engine).exp().clamp(max=1.05) * x.mask
    weights = weights / (weights.sum() / x.mask.sum())
    return verl(x, advantages=verl_token_baselines(x, weights), weights=weights)


def trl(x: Padded) -> Tensor:
    groups = x.rewards.reshape(-1, x.members)
    centered = groups - groups.mean(1, keepdim=True)
    advantages = (centered / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    ratio = (x.logprobs - x.old).exp()
    terms = -torch.minimum(ratio.clamp(max=1.3) * advantages, ratio.clamp(0.8, 1.2) * advantages)
    of_sequence = ((x.old - x.engine) * x.mask).sum(1, keepdim=True).exp()
    terms = terms * of_sequence.masked_fill(of_sequence > 1.5, 0.0)
    log = x.reference - x.logprobs
    return ((terms + 0.1 * (log.exp() - log - 1)) * x.mask).sum() / x.mask.sum()


def openrlhf_whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Over all tokens of the batch, by the variance divided by their number."""
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean).square() * mask).sum() / mask.sum()
    return (advantages - mean) * variance.clamp(min=1e-8).rsqrt()


def openrlhf_rewards(x: Padded) -> Tensor:
    """[B, T]: less the divergence at each token, and the reward at the last one."""
    rewards = -0.1 * (x.old - x.reference).clamp(-10, 10) * x.mask
    for row, of_row in enumerate(x.mask):
        rewards[row, int(of_row.nonzero().max())] += x.rewards[row].clamp(-10, 10)
    return rewards


def openrlhf_loss(x: Padded, advantages: Tensor, dual: float | None = None) -> Tensor:
    """[B, T] of the policy's terms."""
    ratio = (x.logprobs - x.old).clamp(-20, 20).exp()
    first, second = ratio * advantages, ratio.clamp(0.8, 1.27) * advantages
    clipped = torch.minimum(first, second)
    if dual is not None:
        clipped = torch.where(advantages < 0, torch.maximum(clipped, dual * advantages), clipped)
    return -clipped


def openrlhf_group_norm(x: Padded) -> Tensor:
    groups = x.rewards.reshape(-1, x.members)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-9)
    terms = openrlhf_loss(x, advantages.reshape(-1, 1), dual=1.2)
    terms = terms * (x.old - x.engine).exp().clamp(0.9, 1.1)
    log = x.logprobs - x.reference
    kl = ((-log).exp() - 1 + log).clamp(-10, 10)
    return ((terms + 0.1 * kl - 0.01 * x.entropies) * x.mask).sum() / x.mask.sum()


def openrlhf_baseline(x: Padded) -> Tensor:
    groups = x.rewards.reshape(-1, x.members)
    advantages = (groups - groups.mean(1, keepdim=True)).reshape(-1, 1).expand_as(x.mask)
    weights = (x.old - x.engine).exp()
    weights = weights * ((weights >= 0.95) & (weights <= 1.05))
    terms = weights * openrlhf_loss(x, openrlhf_whitened(advantages, x.mask))
    kl = ((x.logprobs - x.reference).square() / 2).clamp(-10, 10)
    return ((terms + 0.1 * kl) * x.mask).sum() / x.mask.sum()


def openrlhf_returns(x: Padded, lam: float | None = None) -> Tensor:
    """REINFORCE with discounted returns, or with `lam` PPO with a critic."""
    rewards, values = openrlhf_rewards(x), x.values * x.mask
    columns, later = [], torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        if lam is None:
            later = rewards[:, t] + 0.9 * later
        else:
            following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
            later = rewards[:, t] + 0.9 * following - values[:, t] + 0.9 * lam * later
        columns.append(later)
    advantages = torch.stack(columns[::-1], 1)
    terms = openrlhf_loss(x, openrlhf_whitened(advantages, x.mask))
    return (terms * x.mask).sum() / x.mask.sum()


def openrlhf_ppo(x: Padded) -> Tensor:
    return openrlhf_returns(x, lam=0.8)


def openrlhf_gspo(x: Padded) -> Tensor:
    groups = x.rewards.reshape(-1, x.members)
    advantages = (groups - groups.mean(1, keepdim=True)).reshape(-1, 1)
    ratio = (((x.logprobs - x.old) * x.mask).sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)).exp()
    first, second = ratio * advantages, ratio.clamp(0.8, 1.27) * advantages
    return -torch.minimum(first, second).mean()


MASKED = {
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.98_1.02",
}
ALONE = {
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
}
OTB = {"algorithm.adv_estimator": "optimal_token_baseline"}
NORMALIZED = {
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 1.05,
    "algorithm.rollout_correction.rollout_is_batch_normalize": True,
}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Padded], Tensor]]] = {
    "nemo-rl": ("nemo-rl", NEMO_RL, nemo_rl),
    "nemo-rl with the on-policy approximation": (
        "nemo-rl",
        NEMO_RL | {"loss_fn.use_on_policy_kl_approximation": True},
        nemo_rl_engine,
    ),
    "verl": ("verl", VERL, verl),
    "verl with rejected sequences": ("verl", VERL | MASKED, verl_masked),
    "verl with groups of one": ("verl", VERL | ALONE, verl),
    "verl with a baseline of tokens": ("verl", VERL | OTB, verl_otb),
    "verl with normalized weights": ("verl", VERL | OTB | NORMALIZED, verl_otb_weighted),
    "openrlhf with normalized groups": (
        "openrlhf",
        OPENRLHF
        | KL_LOSS
        | {
            "algo.advantage.estimator": "group_norm",
            "algo.advantage.is_correction_enable": True,
            "algo.advantage.is_correction_threshold": [0.9, 1.1],
            "actor.dual_clip": 1.2,
            "actor.entropy_coef": 0.01,
        },
        openrlhf_group_norm,
    ),
    "openrlhf with REINFORCE++-baseline": (
        "openrlhf",
        OPENRLHF
        | KL_LOSS
        | {
            "algo.kl.estimator": "k2",
            "algo.advantage.estimator": "reinforce_baseline",
            "algo.advantage.is_correction_enable": True,
            "algo.advantage.is_correction_type": "icepop",
            "algo.advantage.is_correction_threshold": [0.95, 1.05],
        },
        openrlhf_baseline,
    ),
    "openrlhf with REINFORCE++": (
        "openrlhf",
        OPENRLHF | {"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.9},
        openrlhf_returns,
    ),
    "openrlhf with a critic": (
        "openrlhf",
        OPENRLHF | {"algo.advantage.gamma": 0.9, "algo.advantage.lambd": 0.8},
        openrlhf_ppo,
    ),
    "openrlhf with GSPO": (
        "openrlhf",
        OPENRLHF
        | {
            "algo.advantage.estimator": "dr_grpo",
            "algo.kl.init_coef": 0.0,
            "actor.policy_loss_type": "gspo",
        },
        openrlhf_gspo,
    ),
    "trl": ("trl", TRL, trl),
}


def algorithm_of(project: str, values: dict[str, Any], folder: Path) -> OnlineConfig:
    imported = import_values(PROJECTS[project], values)
    assert not [row.key for row in imported.rows if row.outcome == "unknown"]
    algorithm = checked(to_text(imported, PROJECTS[project], "test"), folder).algorithm
    assert isinstance(algorithm, OnlineConfig)
    return algorithm


def scored(batch: PackedBatch, algorithm: OnlineConfig) -> PackedBatch:
    """The batch with the advantages and weights that the algorithm gives its sequences."""
    members = algorithm.num_generations_per_prompt
    flat = [reward for group in REWARDS for reward in group]
    rewards = [flat[i : i + members] for i in range(0, len(flat), members)]
    lengths = torch.diff(batch.cu_seqlens)
    bounds = batch.cu_seqlens.tolist()
    sampled = [int(batch.loss_mask[a:b].sum()) for a, b in pairwise(bounds)]
    groups = [paid(i, r, sampled[i * members : (i + 1) * members]) for i, r in enumerate(rewards)]
    places = PolicyGradientUpdate(algorithm, EntropyWeight.of(algorithm.entropy)).score(groups)
    advantages = torch.tensor([place.advantage for place in places]).float()
    weights = torch.tensor([place.weight for place in places]).float()
    return replace(
        batch,
        advantages=advantages.repeat_interleave(lengths),
        weights=weights.repeat_interleave(lengths) * batch.loss_mask,
    )


def estimated(batch: PackedBatch, algorithm: OnlineConfig) -> PackedBatch:
    """The batch with advantages of its tokens, if the algorithm has those."""
    if not isinstance(algorithm.advantage, TokenAdvantageBase):
        return batch
    ends = [int(batch.loss_mask[:b].nonzero().max()) for b in batch.cu_seqlens[1:].tolist()]
    rewards = torch.zeros(batch.num_tokens)
    rewards[ends] = torch.tensor(REWARDS).flatten()
    kl = algorithm.kl if algorithm.kl.placement == "reward" else None
    number, members = batch.num_sequences, algorithm.num_generations_per_prompt
    groups = batch.spread([place // members for place in range(number)], torch.int64)
    longest = [max(batch.lengths)] * (number // members)
    estimator = TokenEstimator(algorithm.advantage, kl, algorithm.correction, longest)
    estimate = estimator(replace(batch, rewards=rewards, groups=groups), lambda sums: sums)
    return replace(batch, advantages=estimate.advantages)


def padded(theirs: Any, batch: PackedBatch, members: int) -> Padded:
    rows: list[dict[str, Tensor]] = []
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[a:b]
        log = theirs(tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        row = {
            "logprobs": log.gather(1, tokens[1:, None]).squeeze(1),
            "entropies": -(log.exp() * log).sum(-1),
        }
        row |= {"old": batch.old_logprobs[a + 1 : b], "engine": batch.logprobs[a + 1 : b]}
        row |= {"values": batch.values[a : b - 1], "collisions": batch.old_collisions[a + 1 : b]}
        row |= {"reference": batch.reference_logprobs[a + 1 : b], "mask": batch.loss_mask[a + 1 : b].float()}
        rows.append(row)
    stacked = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)
        for name in rows[0]
    }
    # Outside of the mask all are equal, as there is nothing to compare.
    for name in ("old", "engine", "reference"):
        stacked[name] = torch.where(stacked["mask"] > 0, stacked[name], stacked["logprobs"].detach())
    return Padded(**stacked, rewards=torch.tensor(REWARDS).flatten(), members=members)


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_the_origin(case, model, start_here, tmp_path):
    project, values, formula = CASES[case]
    algorithm = algorithm_of(project, values, tmp_path)
    theirs = model("qwen3")[0]
    sampled = ragged_batch((9, 14, 7, 11, 16, 8, 10, 13))
    noise = torch.Generator().manual_seed(3)

    def near(logprobs: Tensor, width: float) -> Tensor:
        return (logprobs + width * torch.randn(len(logprobs), generator=noise)) * sampled.loss_mask

    current = reference_logprobs(theirs, sampled)
    old = near(current, 0.2)
    batch = replace(
        scored(sampled, algorithm),
        old_logprobs=old,
        old_collisions=old.exp() ** 2 + 0.7 * (1 - old.exp()) ** 2,
        logprobs=near(old, 0.1),
        reference_logprobs=near(current, 0.5),
        values=near(current, 0.5),
    )
    batch = estimated(batch, algorithm)
    x = padded(theirs, batch, algorithm.num_generations_per_prompt)
    expected = formula(x)
    grads = torch.autograd.grad(expected, list(theirs.parameters()))
    named = dict(zip((name for name, _ in theirs.named_parameters()), grads, strict=True))

    sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
    policy = start_here(policy_config(model("qwen3")[1], optimizer=sgd, max_grad_norm=None))
    policy.load_batch(batch)
    update = PolicyGradientUpdate(algorithm, EntropyWeight.of(algorithm.entropy))
    loss = replace(update._loss, entropy_coefficient=getattr(algorithm.entropy, "coefficient", 0.0))
    stats = policy.train(partition(8, 3), loss)
    assert stats.sums["loss/total"] == pytest.approx(expected.item(), abs=1e-6)
    assert_moved(policy, theirs, named)
