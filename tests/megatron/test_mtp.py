"""Multi-token prediction: its loss and gradients by plain modules, and layouts next to one process."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemorl.config.policy import LayoutConfig, SgdConfig
from nemorl.data.losses import LossOutput
from nemorl.data.packed import PackedBatch
from nemorl.models.tensors import local_view
from tests.megatron.cases import assert_moved, live, partition
from tests.megatron.course import assert_same_course
from tests.megatron.examples import layout, policy_config, ragged_batch
from tests.models.mtp_models import further_hidden

WEIGHT = 0.3
SGD = SgdConfig(name="sgd", lr=1.0, momentum=0.0)


class Likelihood:
    """The weighted cross entropy of the trained tokens."""

    needs_entropy = False

    def __call__(self, batch: PackedBatch, outputs: Tensor, entropy: Tensor | None) -> LossOutput:
        loss = -(batch.weights * outputs).sum()
        return LossOutput(loss, {"loss/total": loss.detach(), "tokens": batch.loss_mask.sum()}, {})


def expected(
    model: PreTrainedModel, batch: PackedBatch, depth: int = 1
) -> tuple[Tensor, list[Tensor], list[float]]:
    """The likelihood loss, and of each depth the cross entropy and the share of right guesses."""
    likelihood, entropies, hits = torch.zeros(()), [[] for _ in range(depth)], [[] for _ in range(depth)]
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens, mask = batch.tokens[start:end], batch.loss_mask[start:end]
        logprobs = model(tokens.unsqueeze(0)).logits[0].log_softmax(-1)
        own = logprobs[:-1].gather(1, tokens[1:, None]).squeeze(1)
        likelihood = likelihood - (own * batch.weights[start + 1 : end]).sum()
        for k, hidden in enumerate(further_hidden(model, tokens, depth), 1):
            logprobs = model.lm_head(hidden[:-1]).log_softmax(-1)
            labels, trained = tokens[k + 1 :], mask[k + 1 :]
            entropies[k - 1].append(-logprobs.gather(1, labels[:, None]).squeeze(1)[trained])
            hits[k - 1].append((logprobs.argmax(-1) == labels)[trained])
    losses = [torch.cat(each).mean() for each in entropies]
    return likelihood, losses, [float(torch.cat(each).float().mean()) for each in hits]


@pytest.mark.parametrize(
    ("family", "section", "depth"),
    [
        ("mimo-mtp", {}, 1),
        ("mimo-mtp-tied", {}, 1),
        ("mimo-mtp-two", {}, 2),
        ("mimo-mtp", {"depth": 3}, 3),
        ("mimo-mtp", {"detach": True}, 1),
        ("deepseek-v3-mtp", {}, 1),
    ],
)
def test_loss_and_gradients_are_those_of_plain_modules(start_here, model, family, section, depth):
    theirs, folder = model(family)
    batch = ragged_batch()
    theirs.zero_grad()
    likelihood, losses, hits = expected(theirs, batch, depth)
    if section.get("detach"):
        inside = [p for n, p in theirs.named_parameters() if ".mtp_layers." in n]
        own = torch.autograd.grad(WEIGHT * losses[0], inside, retain_graph=True)
        likelihood.backward()
        for parameter, gradient in zip(inside, own, strict=True):
            parameter.grad = gradient
    else:
        (likelihood + WEIGHT * torch.stack(losses).mean()).backward()

    section = {"loss_weight": WEIGHT, **section}
    config = policy_config(folder, optimizer=SGD, max_grad_norm=None, multi_token_prediction=section)
    worker = start_here(config)
    worker.load_batch(batch)
    step = worker.train(partition(batch.num_sequences, 3), Likelihood())
    assert step.sums["loss/total"] == pytest.approx(float(likelihood), rel=1e-5)
    values = [float(loss) for loss in losses]
    assert step.mtp["mtp/loss"] == pytest.approx(sum(values) / depth, rel=1e-5)
    assert step.mtp["mtp/accepted"] == pytest.approx(sum(hits) / depth)
    if depth > 1:
        assert [step.mtp[f"mtp/loss_{k}"] for k in range(1, depth + 1)] == pytest.approx(values, rel=1e-5)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if family.startswith("mimo"):
        assert_moved(worker, theirs, gradients, atol=2e-6)
        return
    # transformers has the experts of a layer in one tensor.
    before, held = theirs.state_dict(), worker.parameters()
    known = [part for part in worker.slices() if gradients.get(part.name) is not None]
    assert any(".4.eh_proj." in part.name for part in known)
    for part in known:
        moved = before[part.name][part.box] - local_view(held, part)
        torch.testing.assert_close(moved, gradients[part.name][part.box], atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def course(pool, model):
    """Two steps of a family under a layout, by rank."""

    @cache
    def run(family, where, per_micro_batch, **section):
        further = {"loss_weight": WEIGHT} | section
        config = policy_config(model(family)[1], layout=where, multi_token_prediction=further)
        batches = [ragged_batch(seed=seed) for seed in range(2)]
        return pool.run(where.world_size, live, config, batches, per_micro_batch)

    return run


@pytest.mark.parametrize(
    ("family", "where", "section"),
    [
        ("mimo-mtp", layout(tp=2, sp=True), {}),
        ("mimo-mtp", layout(pp=2), {}),
        ("mimo-mtp", layout(pp=2, dp=2), {"detach": True}),
        ("mimo-mtp", layout(cp=2), {"depth": 2}),
        ("mimo-mtp", layout(dp=2), {}),
        ("mimo-mtp-tied", layout(pp=2, tp=2, sp=True), {}),
        ("mimo-mtp-two", layout(pp=2, vpp=2), {}),
        ("deepseek-v3-mtp", layout(dp=2, ep=2), {"detach": True}),
        pytest.param("deepseek-v3-mtp", layout(cp=2, tp=2, sp=True), {}, marks=pytest.mark.ci),
    ],
    ids=lambda value: value.name if isinstance(value, LayoutConfig) else None,
)
def test_steps_equal_one_process(course, family, where, section):
    (alone,) = course(family, layout(), 8, **section)
    for life in course(family, where, 3, **section):
        assert_same_course(life, alone)
        for mine, its in zip(life.steps, alone.steps, strict=True):
            assert mine.mtp == pytest.approx(its.mtp, rel=2e-5)


def test_detached_layers_leave_the_policy_as_it_is_without_them(course, pool, model):
    """Its clipping included: the norm of each is above the limit."""
    alone = policy_config(model("mimo-mtp")[1], share_prefixes=False)
    batches = [ragged_batch(seed=seed) for seed in range(2)]
    (without,) = pool.run(1, live, alone, batches, 8)
    (detached,) = course("mimo-mtp", layout(), 8, detach=True, loss_weight=50.0)
    (measured,) = course("mimo-mtp", layout(), 8, loss_weight=0.0)
    assert min(detached.steps[0].grad_norm, detached.steps[0].mtp["mtp/grad_norm"]) > alone.max_grad_norm
    for life in (detached, measured):
        assert torch.equal(life.logprobs, without.logprobs)
        for mine, its in zip(life.steps, without.steps, strict=True):
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-6)
            assert mine.sums == pytest.approx(its.sums, rel=1e-6)
            assert its.mtp == {}
    assert detached.steps[1].mtp["mtp/loss"] < measured.steps[1].mtp["mtp/loss"]


def test_packed_sequences_do_not_see_each_other(course):
    (packed,), (apart,) = course("mimo-mtp", layout(), 8, depth=2), course("mimo-mtp", layout(), 1, depth=2)
    assert_same_course(apart, packed)
    for mine, its in zip(apart.steps, packed.steps, strict=True):
        assert mine.mtp == pytest.approx(its.mtp, rel=2e-5)


def test_rounded_weights_are_those_of_the_other_layers(start_here, model):
    section = {"format": "int8", "train": "fake"}
    config = policy_config(
        model("mimo-mtp")[1], quantization=section, multi_token_prediction={"loss_weight": WEIGHT}
    )
    worker = start_here(config)
    worker.load_batch(ragged_batch())
    assert worker.train(partition(8, 3), Likelihood()).mtp["mtp/loss"] > 0
    own, sampled = worker.parameters(), worker.merged_parameters()
    assert all(torch.equal(own[name], sampled[name]) for name in own if name.startswith("mtp."))
    assert not torch.equal(
        own["decoder.layers.0.mlp.linear_fc1.weight"], sampled["decoder.layers.0.mlp.linear_fc1.weight"]
    )
