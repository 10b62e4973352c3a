"""One update of an imported GRPO config by the worker, against the origin's formula on padded sequences.

The formulas are written here as their projects compute them, on [B, T] tensors of transformers' logprobs:
NeMo-RL at 7ea279ab (ClippedPGLossFn), verl at 1dda039b (compute_policy_loss_vanilla, agg_loss), TRL at
f2cd5771 (GRPOTrainer._compute_loss).
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
from nemorl.config.algorithm import OnlineConfig
from nemorl.data.packed import PackedBatch
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from tests.algorithms.groups import paid
from tests.megatron.cases import partition
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


@dataclass(frozen=True)
class Padded:
    """[B, T] tensors of the sampled tokens; rewards [B] in groups of `members`."""

    logprobs: Tensor  # with gradient
    entropies: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor
    mask: Tensor
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


def verl(x: Padded, kept: Tensor | None = None) -> Tensor:
    mask = x.mask if kept is None else x.mask * kept
    advantages = verl_advantages(x)
    ratio = (x.logprobs - x.old).clamp(-20, 20).exp()
    first, second = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    clipped = torch.maximum(first, second)
    terms = torch.where(advantages < 0, torch.minimum(-advantages * 1.2, clipped), clipped)
    log = (x.reference - x.logprobs).clamp(-20, 20)
    kl = (log.exp() - log - 1).clamp(-10, 10)
    return ((terms - 0.01 * x.entropies + 0.1 * kl) * mask).sum() / mask.sum()


def verl_masked(x: Padded) -> Tensor:
    """Rejected sequences leave the mask, and so the divisor, the divergence and the entropy."""
    mean = ((x.old - x.engine) * x.mask).sum(1, keepdim=True) / x.mask.sum(1, keepdim=True)
    kept = (mean.exp() >= 0.98) & (mean.exp() <= 1.02)
    assert 0 < int(kept.sum()) < len(kept)
    return verl(x, kept)


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


MASKED = {
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.98_1.02",
}
ALONE = {
    "actor_rollout_ref.rollout.n": 1,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
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
        logprobs=near(old, 0.1),
        reference_logprobs=near(current, 0.5),
    )
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
    before, parameters = theirs.state_dict(), policy.parameters()
    for part in policy.slices():
        mine = parameters[part.param]
        mine = mine.as_strided(part.size, part.strides, mine.storage_offset() + part.offset)
        box = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
        torch.testing.assert_close(before[part.name][box] - mine, named[part.name][box], atol=1e-6, rtol=1e-6)
