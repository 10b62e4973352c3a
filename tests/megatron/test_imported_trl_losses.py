"""One update of an imported SFT, DPO or KTO config of TRL by the worker, and scores, against TRL's formulas.

The formulas are written here as TRL 1.16 computes them, on [B, T] tensors of transformers' logprobs of
completions and of a reference: SFTTrainer.compute_loss, DPOTrainer._compute_loss, KTOTrainer._compute_loss,
RewardTrainer.compute_loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemorl.algorithms.objective import sequence_weights
from nemorl.algorithms.offline import objective_of
from nemorl.config.algorithm.offline import OfflineBase, SftConfig
from nemorl.data.packed import PackedBatch
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from tests.megatron.cases import assert_moved, partition
from tests.megatron.examples import policy_config, ragged_batch, reference_logprobs

LENGTHS = (9, 14, 7, 11, 16, 8, 10, 13)
LABELS = (1.0, -1.0) * 4  # of pairs, or of single answers
DIVERGENCE = 0.3


@dataclass(frozen=True)
class Padded:
    """[B, T] tensors."""

    logprobs: Tensor  # with gradient
    reference: Tensor
    mask: Tensor  # of the tokens of completions

    def scores(self, divided: bool = False) -> tuple[Tensor, Tensor]:
        """Log-ratios of the chosen and of the rejected answers, of a token if they are divided."""
        ratios = ((self.logprobs - self.reference) * self.mask).sum(1)
        if divided:
            ratios = ratios / self.mask.sum(1)
        return ratios[0::2], ratios[1::2]


def sft(x: Padded) -> Tensor:
    return -(x.logprobs * x.mask).sum() / x.mask.sum()


def every_token(x: Padded) -> Tensor:
    """On every token but the first of a row; what pads has no logprob."""
    there = (x.logprobs != 0).float()
    return -x.logprobs.sum() / there.sum()


def sigmoid(x: Padded) -> Tensor:
    chosen, rejected = x.scores()
    return -F.logsigmoid(0.2 * (chosen - rejected)).mean()


def sigmoid_norm(x: Padded) -> Tensor:
    chosen, rejected = x.scores(divided=True)
    return -F.logsigmoid(0.2 * (chosen - rejected)).mean()


def ipo(x: Padded) -> Tensor:
    chosen, rejected = x.scores(divided=True)
    return (chosen - rejected - 1 / (2 * 10.0)).square().mean()


def hinge(x: Padded) -> Tensor:
    chosen, rejected = x.scores()
    terms = torch.relu(1 - 0.2 * (chosen - rejected))
    assert terms.gt(0).any()
    return terms.mean()


def robust(x: Padded) -> Tensor:
    chosen, rejected = x.scores()
    delta = 0.2 * (chosen - rejected)
    return ((0.1 * F.logsigmoid(-delta) - 0.9 * F.logsigmoid(delta)) / 0.8).mean()


def apo_zero(x: Padded) -> Tensor:
    chosen, rejected = x.scores()
    return (1 - torch.sigmoid(0.2 * chosen) + torch.sigmoid(0.2 * rejected)).mean()


def apo_down(x: Padded) -> Tensor:
    chosen, rejected = x.scores()
    return (torch.sigmoid(0.2 * chosen) + 1 - torch.sigmoid(0.2 * (chosen - rejected))).mean()


def sigmoid_and_sft(x: Padded) -> Tensor:
    chosen = slice(0, None, 2)
    cross_entropy = -x.logprobs[chosen][x.mask[chosen].bool()].mean()
    return sigmoid(x) + 0.3 * cross_entropy


def kto(x: Padded) -> Tensor:
    desirable, undesirable = x.scores()
    good = 1.2 * (1 - torch.sigmoid(0.2 * (desirable - DIVERGENCE)))
    bad = 0.8 * (1 - torch.sigmoid(0.2 * (DIVERGENCE - undesirable)))
    return torch.cat([good, bad]).mean()


DPO: dict[str, Any] = {"trainer": "dpo", "beta": 0.2}
BOTH = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
CASES: dict[str, tuple[dict[str, Any], Callable[[Padded], Tensor]]] = {
    "sft on completions": ({"trainer": "sft", "completion_only_loss": True}, sft),
    "sft on every token": ({"trainer": "sft"}, every_token),
    "dpo": (DPO, sigmoid),
    "ipo": (DPO | {"loss_type": "ipo", "beta": 10.0}, ipo),
    "hinge": (DPO | {"loss_type": "hinge"}, hinge),
    "robust": (DPO | {"loss_type": "robust", "label_smoothing": 0.1}, robust),
    "robust without smoothing": (DPO | {"loss_type": "robust"}, sigmoid),
    "sigmoid_norm": (DPO | {"loss_type": "sigmoid_norm"}, sigmoid_norm),
    "apo_zero": (DPO | {"loss_type": ["apo_zero"]}, apo_zero),
    "apo_down": (DPO | {"loss_type": ["apo_down"]}, apo_down),
    "dpo with sft": (DPO | BOTH, sigmoid_and_sft),
    "kto": (
        {"trainer": "kto", "beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.8},
        kto,
    ),
}


def algorithm_of(values: dict[str, Any], folder: Path) -> OfflineBase:
    given = {"model_name_or_path": "org/model", "dataset_name": "org/data", "max_steps": 3, **values}
    imported = import_values(PROJECTS["trl"], given)
    assert not [row.key for row in imported.rows if row.outcome == "unknown"]
    algorithm = checked(to_text(imported, PROJECTS["trl"], "test"), folder).algorithm
    assert isinstance(algorithm, OfflineBase)
    return algorithm


def batch_of(algorithm: OfflineBase) -> PackedBatch:
    """Eight sequences with the masks, labels and weights that the algorithm gives them."""
    batch = ragged_batch(LENGTHS)
    if isinstance(algorithm, SftConfig) and algorithm.train_on == "all":
        batch = replace(batch, loss_mask=batch.position_ids > 0)
    sampled = [float(batch.loss_mask[a:b].sum()) for a, b in pairwise(batch.cu_seqlens.tolist())]
    if algorithm.sequences_per_unit == 2:
        sampled[1::2] = [0.0] * 4
    weights = sequence_weights(sampled, objective_of(algorithm).aggregation)
    return replace(
        batch,
        units=batch.spread([place // 2 for place in range(8)], torch.int64),
        labels=batch.spread(list(LABELS)),
        weights=batch.spread(weights.tolist()) * batch.loss_mask,
    )


def padded(theirs: Any, batch: PackedBatch) -> Padded:
    columns: dict[str, list[Tensor]] = {"logprobs": [], "reference": [], "mask": []}
    assert batch.reference_logprobs is not None
    for a, b in pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[a:b]
        log = theirs(tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        columns["logprobs"].append(log.gather(1, tokens[1:, None]).squeeze(1))
        columns["reference"].append(batch.reference_logprobs[a + 1 : b])
        columns["mask"].append((batch.position_ids[a + 1 : b] >= max(1, (b - a) // 3)).float())
    return Padded(
        **{name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    )


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_trl(case, model, start_here, tmp_path):
    values, formula = CASES[case]
    algorithm = algorithm_of(values, tmp_path)
    theirs = model("qwen3")[0]
    batch = batch_of(algorithm)
    noise = torch.Generator().manual_seed(3)
    near = reference_logprobs(theirs, batch) + 0.05 * torch.randn(batch.num_tokens, generator=noise)
    batch = replace(batch, reference_logprobs=near * batch.loss_mask)
    expected = formula(padded(theirs, batch))
    grads = torch.autograd.grad(expected, list(theirs.parameters()))
    named = dict(zip((name for name, _ in theirs.named_parameters()), grads, strict=True))

    sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.0}
    policy = start_here(policy_config(model("qwen3")[1], optimizer=sgd, max_grad_norm=None))
    policy.load_batch(batch)
    loss = objective_of(algorithm).loss(8 // algorithm.sequences_per_unit, DIVERGENCE)
    stats = policy.train(partition(8, 2), loss)
    total = next(
        stats.sums[name] for name in ("loss/total", "loss/preference", "loss/sft") if name in stats.sums
    )
    assert total == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    # The square's gradient has the float32 error of the difference of two means, which is small.
    assert_moved(policy, theirs, named, atol=3e-6 if case == "ipo" else 1e-6)


def test_scores_of_a_reward_model_equal_trl(tmp_path: Path) -> None:
    algorithm = algorithm_of({"trainer": "reward", "center_rewards_coefficient": 0.05}, tmp_path)
    batch = batch_of(algorithm)
    values = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(4), requires_grad=True)
    found = objective_of(algorithm).loss(4, 0.0)(batch, values, None)
    ends = values[batch.cu_seqlens[1:].long() - 1]
    chosen, rejected = ends[0::2], ends[1::2]
    expected = -F.logsigmoid(chosen - rejected).mean() + 0.05 * ((chosen + rejected) ** 2).mean()
    torch.testing.assert_close(found.loss, expected, atol=1e-6, rtol=1e-6)
    ours, origins = (
        torch.autograd.grad(loss, values, retain_graph=True)[0] for loss in (found.loss, expected)
    )
    torch.testing.assert_close(ours, origins, atol=1e-6, rtol=1e-6)
