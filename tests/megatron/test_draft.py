"""The head for drafts: its loss and gradients by plain formulas, layouts next to one process, checkpoints."""

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.data.losses import TrainStats
from nemorl.data.packed import PackedBatch
from nemorl.megatron.checkpoint_files import UnfitCheckpoint, read_draft
from nemorl.megatron.export import export_draft
from nemorl.models.eagle3 import Eagle3Head, read_head, write_head
from nemorl.models.eagle3_shape import LM_HEAD, SENT, Eagle3Shape
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import local_view
from tests.megatron.cases import LOSS, LOSS_WITHOUT_REFERENCE, partition, share, start_worker
from tests.megatron.examples import MAX_LENGTH, layout, policy_config, ragged_batch
from tests.models.draft_heads import draft_logits, states_of

DRAFT = {"lr": 3e-3}  # in three steps


def expected(
    model: PreTrainedModel,
    shape: Eagle3Shape,
    weights: dict[str, Tensor],
    batch: PackedBatch,
    steps: int,
    ids: list[int] | None = None,
) -> tuple[Tensor, list[float]]:
    """The loss in float64, and by step the share of tokens whose likeliest next token is the same.

    With `ids` these are the tokens that the head drafts.
    """
    entropies: list[list[Tensor]] = [[] for _ in range(steps)]
    agreed: list[list[Tensor]] = [[] for _ in range(steps)]
    embedding = model.get_input_embeddings().weight.detach().double()
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens, mask = batch.tokens[start:end], batch.loss_mask[start:end]
        states, logits = states_of(model, tokens, shape.layers)
        drafted = draft_logits(shape, weights, embedding[tokens[1:]], states[:-1].double(), steps)
        target = logits[:, ids or slice(None)].double().softmax(-1)
        for step, own in enumerate(drafted):
            for place in range(2 + step, end - start):
                if mask[place]:
                    row = own[place - 2 - step]
                    entropies[step].append(-(target[place - 1] * row.log_softmax(-1)).sum())
                    agreed[step].append(row.argmax() == target[place - 1].argmax())
    loss = sum(0.8**step * torch.stack(of_step).mean() for step, of_step in enumerate(entropies))
    assert isinstance(loss, Tensor)
    return loss, [float(torch.stack(of_step).float().mean()) for of_step in agreed]


@pytest.mark.parametrize(
    ("family", "layers", "steps"),
    [
        ("llama", None, 1),
        ("llama", None, 4),
        ("llama-tied", (0, 1, 4), 2),
        ("qwen3", (1, 2, 3), 3),
        ("mixtral", None, 3),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(start_here, model, family, layers, steps):
    theirs, folder = model(family)
    config = policy_config(folder, draft=DRAFT | {"layers": layers, "depth": steps}, max_grad_norm=None)
    worker = start_here(config)
    shape = Eagle3Shape.of(load_shape(folder), layers)
    before = {name: values.double() for name, values in worker._draft.state().items() if name != "updates"}
    weights = {name: values.clone().requires_grad_() for name, values in before.items()}
    batch = ragged_batch()
    loss, accuracies = expected(theirs, shape, weights, batch, steps)
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))

    worker.load_batch(batch)
    step = worker.train(partition(batch.num_sequences, 3), LOSS_WITHOUT_REFERENCE)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert step.draft["draft/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert step.draft["draft/accuracy"] == pytest.approx(accuracies[0])
    by_step = [step.draft.get(f"draft/accuracy_{number + 1}") for number in range(steps)]
    assert by_step == ([None] if steps == 1 else pytest.approx(accuracies))
    assert step.draft["draft/grad_norm"] == pytest.approx(norm, rel=1e-4)
    state = worker._draft.state()
    for name, gradient in gradients.items():
        # Adam's first moment is a tenth of the first gradient.
        torch.testing.assert_close(state[f"exp_avg.{name}"] * 10, gradient.float(), atol=1e-5, rtol=1e-4)


def test_torch_counts_the_operations_of_the_head(start_here, model):
    """What `flops` has more with a head, next to the products of torch; attention is counted by hand."""
    folder, batch, steps = model("llama")[1], ragged_batch(), 3
    flops, products = [], []
    for draft in (None, DRAFT):
        worker = start_here(policy_config(folder, draft=draft))
        worker.load_batch(batch)
        with FlopCounterMode(display=False) as counter:
            stats = worker.train(partition(batch.num_sequences, 3), LOSS_WITHOUT_REFERENCE)
        worker.close()
        flops.append(stats.flops)
        counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        products.append(counts["aten.mm"])
    shape = Eagle3Shape.of(load_shape(folder))
    predicted = sum(int((batch.loss_mask & (batch.position_ids >= 2 + step)).sum()) for step in range(steps))
    of_logits = 2 * predicted * shape.hidden_size * shape.vocab_size
    # The policy's logits again are no operations of the model, and torch has no count of `addmm_`, by which
    # the gradient of the output matrix is summed.
    counted = products[1] - products[0] - of_logits + of_logits
    seen = sum(
        start + 1 + step
        for first, end in itertools.pairwise(batch.cu_seqlens.tolist())
        for start in range(end - first)
        for step in range(steps)
    )
    attention = 3 * 2 * 2 * shape.num_attention_heads * shape.head_dim * seen
    assert flops[1] - flops[0] == counted + attention


def test_bfloat16_learns_from_the_same_distribution(start_here, model):
    """With weights of the head in float32, next to which those of the policy are rounded."""
    theirs, folder = model("llama")
    worker = start_here(policy_config(folder, draft=DRAFT, precision="bfloat16"))
    state = worker._draft.state()
    weights = {name: values.double() for name, values in state.items() if name != "updates"}
    loss, _ = expected(theirs, Eagle3Shape.of(load_shape(folder)), weights, ragged_batch(), steps=3)
    worker.load_batch(ragged_batch())
    step = worker.train(partition(8, 3), LOSS_WITHOUT_REFERENCE)
    # The states of a policy of 4 layers are within about 1% of those in float32.
    assert step.draft["draft/loss"] == pytest.approx(float(loss), rel=0.03)
    assert all(values.dtype == torch.float32 for name, values in state.items())


def steps_of(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, per_micro_batch: int, count: int
) -> tuple[list[TrainStats], dict[str, Tensor], dict[str, Tensor]]:
    """Optimizer steps, and weights of policy and head after them."""
    worker = start_worker(rank, world_size, rendezvous, config)
    steps = []
    for seed in range(count):
        mine = share(ragged_batch(seed=seed), rank, config)
        worker.load_batch(mine)
        micro_batches = partition(mine.num_sequences, per_micro_batch)
        worker.compute_logprobs(micro_batches, old=True, reference=True)
        steps.append(worker.train(micro_batches, LOSS))
    policy = {name: values.clone() for name, values in worker.parameters().items()}
    head = {} if worker._draft is None else {name: v.clone() for name, v in worker._draft.state().items()}
    worker.close()
    return steps, policy, head


@pytest.fixture(scope="module")
def course(pool, model):
    """Two steps of a family under a layout, by rank."""

    @cache
    def run(family, where, per_micro_batch, recompute="none"):
        config = policy_config(model(family)[1], layout=where, draft=DRAFT, recompute={"name": recompute})
        return pool.run(where.world_size, steps_of, config, per_micro_batch, 2)

    return run


@pytest.mark.parametrize(
    ("family", "where", "recompute"),
    [
        ("llama", layout(tp=2, sp=True), "none"),
        ("llama", layout(cp=2), "none"),
        ("llama", layout(dp=2), "full"),
        ("llama-tied", layout(pp=2), "full"),
        ("llama", layout(pp=2, tp=2, sp=True), "none"),
        ("llama", layout(pp=2, vpp=2), "none"),
        ("mimo-mtp", layout(), "none"),
        pytest.param("llama-tied", layout(cp=2, tp=2, sp=True), "none", marks=pytest.mark.ci),
        pytest.param("mixtral", layout(dp=2, ep=2), "none", marks=pytest.mark.ci),
    ],
    ids=lambda value: value.name if isinstance(value, LayoutConfig) else None,
)
def test_steps_equal_one_process(course, family, where, recompute):
    ((alone, _, head),) = course(family, layout(), 8)
    lives = course(family, where, 3, recompute)
    for steps, _, _ in lives:
        for mine, its in zip(steps, alone, strict=True):
            assert mine.draft == pytest.approx(its.draft, rel=1e-4)
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):
        found = next(part[name] for _, _, part in lives if name in part)
        # Adam moves an element by its rate, however small the gradient that another order of sums changes.
        assert (found - head[name]).abs().max() < 2 * DRAFT["lr"]
        assert (found - head[name]).abs().mean() < DRAFT["lr"] / 100


def test_the_policy_is_the_one_without_a_head_to_the_bit(pool, model):
    """With clipping, and with beginnings that sequences share."""
    folder = model("llama")[1]
    without, with_head = (policy_config(folder, draft=draft) for draft in (None, DRAFT))
    ((plain, weights, _),) = pool.run(1, steps_of, without, 3, 2)
    ((drafting, same, head),) = pool.run(1, steps_of, with_head, 3, 2)
    assert plain[0].grad_norm > without.max_grad_norm
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    for mine, its in zip(drafting, plain, strict=True):
        assert (mine.sums, mine.maxima, mine.grad_norm) == (its.sums, its.maxima, its.grad_norm)
        assert mine.draft["draft/loss"] > 0
        assert its.draft == {}
    assert head["updates"] == 2


def test_a_micro_batch_with_more_tokens_is_computed_in_parts(start_here, model):
    """As one whose sequences share prefixes, which the policy computes once and the head does not."""
    batch, found = ragged_batch(), []
    for limit in (batch.num_tokens, MAX_LENGTH):
        worker = start_here(policy_config(model("llama")[1], draft=DRAFT, micro_batch_tokens=limit))
        worker.load_batch(batch)
        micro = worker._maker.make(worker.batch, list(range(batch.num_sequences)))
        parts = len(worker._draft._inputs_of(micro, worker._draft._predicted(micro)))
        stats = worker.train(partition(batch.num_sequences, batch.num_sequences), LOSS_WITHOUT_REFERENCE)
        found.append((parts, stats.draft, worker._draft.state()))
        worker.close()
    (whole, expected_stats, state), (parts, stats, of_parts) = found
    assert whole == 1
    assert parts > 1
    assert stats == pytest.approx(expected_stats, rel=1e-5)
    for name, values in state.items():
        if name.startswith("exp_avg."):  # a tenth of the gradient
            torch.testing.assert_close(of_parts[name], values, atol=1e-6, rtol=1e-4)


def test_accuracy_rises(start_here, model):
    worker = start_here(policy_config(model("llama")[1], draft={"lr": 3e-3}))
    worker.load_batch(ragged_batch())
    micro_batches = partition(8, 3)
    steps = [worker.train(micro_batches, LOSS_WITHOUT_REFERENCE).draft for _ in range(40)]
    for number in (1, 2, 3):
        assert steps[-1][f"draft/accuracy_{number}"] > steps[0][f"draft/accuracy_{number}"] + 0.2
    assert steps[-1]["draft/loss"] < steps[0]["draft/loss"] - 0.3


def some_tokens(folder: Path, shape: Eagle3Shape, ids: list[int], model_path: Path) -> Eagle3Shape:
    """Write a head that drafts the tokens `ids`; its own size of the layer, and rows of `lm_head` drawn."""
    smaller = replace(shape, ffn_hidden_size=48, head_dim=16, draft_vocab_size=len(ids))
    head = Eagle3Head(smaller)
    head.draw(seed=11)
    generator = torch.Generator().manual_seed(12)
    head.lm_head.weight.data.normal_(std=0.2, generator=generator)
    d2t = torch.tensor(ids) - torch.arange(len(ids))
    write_head(folder, smaller, {**head.state_dict(), "d2t": d2t}, model_path)
    return smaller


@pytest.mark.parametrize("where", [layout(), layout(tp=2)], ids=lambda value: value.name)
def test_a_head_of_some_tokens_learns_their_distribution(pool, model, tmp_path, where):
    theirs, folder = model("llama")
    ids = [1, 2, 5, 20, 21, 30, 50]
    shape = some_tokens(tmp_path / "head", Eagle3Shape.of(load_shape(folder)), ids, folder)
    given = load_file(tmp_path / "head" / "model.safetensors")
    weights = {name: values.double() for name, values in given.items() if name != "d2t"}
    loss, accuracies = expected(theirs, shape, weights, ragged_batch(seed=0), 3, ids)
    config = policy_config(folder, layout=where, draft={"model_path": tmp_path / "head"})
    for steps, _, head in pool.run(where.world_size, steps_of, config, 3, 1):
        assert steps[0].draft["draft/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert steps[0].draft["draft/accuracy_3"] == pytest.approx(accuracies[2])
        assert torch.equal(head["d2t"], given["d2t"])


def saved(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig, source: Path | None, folder: Path
) -> list[TrainStats]:
    """Load a checkpoint if there is one, take a step and save."""
    worker = start_worker(rank, world_size, rendezvous, config)
    if source is not None:
        worker.load_checkpoint(source)
    mine = share(ragged_batch(seed=2 if source else 1), rank, config)
    worker.load_batch(mine)
    steps = [worker.train(partition(mine.num_sequences, 3), LOSS_WITHOUT_REFERENCE)]
    worker.copy_for_checkpoint()
    worker.write_copy(folder)
    worker.close()
    return steps


@pytest.mark.parametrize(
    ("here", "there"),
    [(layout(tp=2, sp=True), layout()), (layout(pp=2), layout(tp=2)), (layout(), layout(cp=2))],
    ids=lambda value: value.name,
)
def test_a_run_continues_under_another_layout(pool, model, tmp_path, here, there):
    folder = model("llama")[1]

    def after(where, source, name):
        config = policy_config(folder, layout=where, draft=DRAFT)
        found = pool.run(where.world_size, saved, config, source, tmp_path / name)
        return found[0][0], read_draft(tmp_path / name, LM_HEAD, range(53), {})

    after(here, None, "first")
    same, of_same = after(here, tmp_path / "first", "same")
    other, of_other = after(there, tmp_path / "first", "other")
    assert other.draft == pytest.approx(same.draft, rel=1e-4)
    assert of_same["updates"] == of_other["updates"] == 2
    assert of_same.keys() == of_other.keys()
    for name in of_same:
        torch.testing.assert_close(of_other[name], of_same[name], atol=1e-4, rtol=0)


def test_checkpoints_of_other_heads_are_refused(start_here, model, tmp_path):
    folder = model("llama")[1]
    worker = start_here(policy_config(folder))
    worker.save_checkpoint(tmp_path / "without")
    worker.close()
    worker = start_here(policy_config(folder, draft=DRAFT))
    worker.save_checkpoint(tmp_path / "with")
    with pytest.raises(
        UnfitCheckpoint, match=r"without holds no head for drafts: resume without policy\.draft"
    ):
        worker.load_checkpoint(tmp_path / "without")
    with pytest.raises(UnfitCheckpoint, match=r"norm.weight is \(64,\) there and \(32,\) here; set"):
        read_draft(tmp_path / "with", LM_HEAD, range(1), {"norm.weight": (32,)})


def test_an_export_is_the_head_that_was_trained(start_here, model, tmp_path):
    folder = model("llama")[1]
    config = policy_config(folder, draft=DRAFT)
    worker = start_here(config)
    worker.load_batch(ragged_batch())
    worker.train(partition(8, 3), LOSS_WITHOUT_REFERENCE)
    worker.save_checkpoint(tmp_path / "saved")
    export_draft(tmp_path / "saved", tmp_path / "head", config)
    shape = Eagle3Shape.of(load_shape(folder))
    assert Eagle3Shape.read(tmp_path / "head", num_layers=4) == shape
    state, written = worker._draft.state(), read_head(tmp_path / "head", shape)
    assert all(torch.equal(written[name], state[name]) for name in shape.tensors())
    with pytest.raises(UnsupportedModel, match=r"saved holds no head for drafts, since policy.draft is null"):
        export_draft(tmp_path / "saved", tmp_path / "none", policy_config(folder))
    # It continues from the folder.
    worker.close()
    again = start_here(policy_config(folder, draft={"model_path": tmp_path / "head"}))
    found = again._draft.state()
    assert all(torch.equal(found[name], written[name]) for name in written)


def sent(
    rank: int, world_size: int, rendezvous: str, config: PolicyConfig
) -> tuple[list[tuple[TensorSlice, Tensor]], set[str], dict[str, Tensor]]:
    """After a step: what engines get of the head and of the policy, and checkpoints of the head."""
    worker = start_worker(rank, world_size, rendezvous, config)
    mine = share(ragged_batch(), rank, config)
    worker.load_batch(mine)
    worker.train(partition(mine.num_sequences, 3), LOSS_WITHOUT_REFERENCE)
    weights = worker._sent_parameters()
    parts = [(part, local_view(weights, part).clone()) for part in worker.sender.describe().slices]
    head = [(part, values) for part, values in parts if part.name.startswith(SENT)]
    others = {part.name for part, _ in parts if not part.name.startswith(SENT)}
    state = {name: values.clone() for name, values in worker._draft.state().items()}
    worker.close()
    return head, others, state


@pytest.mark.parametrize(
    ("where", "lora"),
    [(layout(tp=2, sp=True), None), (layout(pp=2), {"rank": 2, "alpha": 4})],
    ids=["TP2", "PP2 with adapters"],
)
def test_engines_get_the_head_that_was_trained(pool, model, where, lora):
    folder = model("llama")[1]
    config = policy_config(folder, layout=where, draft=DRAFT, lora=lora)
    ranks = pool.run(where.world_size, sent, config)
    shape = load_shape(folder)
    whole = {name: torch.full(size, torch.nan) for name, size in Eagle3Shape.of(shape).sent_tensors().items()}
    for head, _, _ in ranks:
        for part, values in head:
            whole[part.name][part.box] = values
    saved_states = [state for _, _, state in ranks if state]
    state = {name: values for one in saved_states for name, values in one.items()}
    state[LM_HEAD] = torch.cat([one[LM_HEAD] for one in saved_states])  # ranks have rows of it
    assert all(torch.equal(values, state[name.removeprefix(SENT)]) for name, values in whole.items())
    assert set().union(*(others for _, others, _ in ranks)) >= hf_tensors(shape).keys()
