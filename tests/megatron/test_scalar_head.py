"""Critics and reward models against transformers' sequence classification, and under every layout."""

import itertools
import json
import math
import shutil
from dataclasses import dataclass

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from nemorl.config.policy import LoraConfig
from nemorl.data.losses import LossOutput
from nemorl.megatron.export import export_adapter, export_hf
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.registry import load_shape, policy_shape
from tests.megatron.cases import LOSS, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch, random_model

STEPS = 5
ADAPTERS = LoraConfig(rank=4, alpha=8, targets=("q_proj", "o_proj", "gate_proj"))


@dataclass(frozen=True)
class SquaredError:
    """Values against targets, which lie in `advantages`; the mean over the tokens of the loss mask."""

    needs_entropy: bool = False

    def __call__(self, batch, values, entropy):
        assert entropy is None
        loss = (batch.weights * (values - batch.advantages).square()).sum()
        sums = {"loss/value": loss.detach(), "values": values.detach().sum()}
        return LossOutput(loss, sums, {"values/max": values.detach().max()})


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    """transformers' model of a family with one label, and its folder; made once."""
    made = {}

    def of(family):
        if family not in made:
            config = random_model(family).config
            config.num_labels = 1
            config.pad_token_id = None  # torch's embedding gives the row of a padding token no gradient
            torch.manual_seed(7)
            model = AutoModelForSequenceClassification.from_config(config)
            made[family] = model, tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family][1])
        return made[family]

    return of


def critic_config(folder, **fields):
    return policy_config(folder, head="scalar", max_grad_norm=None, **fields)


def their_values(model, batch):
    """[N] by transformers, one sequence at a time: the head on the hidden state of every token."""
    values = []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        hidden = model.model(input_ids=batch.tokens[start:end].unsqueeze(0)).last_hidden_state
        values.append(model.score(hidden)[0, :, 0])
    return torch.cat(values)


@pytest.fixture
def worker(tmp_path):
    """A worker in this process; call it with its config."""
    started = []

    def start(config):
        started.append(start_worker(0, 1, f"file://{tmp_path}/rendezvous", config))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "gemma3"])
def test_values_and_a_step_equal_transformers(worker, critic, family):
    theirs, folder = critic(family)
    batch = ragged_batch()
    policy = worker(critic_config(folder))
    policy.load_batch(batch)
    stats = policy.compute_values(partition(batch.num_sequences, 3))

    values = their_values(theirs, batch)
    torch.testing.assert_close(policy.batch.values, values.detach(), atol=1e-4, rtol=0)
    assert values.std() > 0.1
    assert stats.mean == pytest.approx(values[batch.loss_mask].mean().item(), abs=1e-5)
    assert stats.num_tokens == int(batch.loss_mask.sum())
    whole = theirs(input_ids=batch.tokens[: batch.lengths[0]].unsqueeze(0)).logits
    assert policy.batch.values[batch.lengths[0] - 1].item() == pytest.approx(whole.item(), abs=1e-4)

    loss = (batch.weights * (values - batch.advantages).square()).sum()
    grads = torch.autograd.grad(loss, list(theirs.parameters()))
    step = policy.train(partition(batch.num_sequences, 3), SquaredError())
    assert step.sums["loss/value"] == pytest.approx(loss.item(), rel=1e-5)
    assert step.grad_norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in grads)), rel=1e-4)


def test_values_are_normalized_by_the_numbers_of_the_folder(worker, critic, tmp_path):
    """(value - mean) / std, and its gradient: OpenRLHF's `normalize_reward`."""
    theirs, folder = critic("llama-tied")
    own = tmp_path / "normalized"
    shutil.copytree(folder, own)
    fields = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(fields | {"mean": 0.5, "std": 2.0}))
    batch = ragged_batch()
    policy = worker(critic_config(own, normalize_values=True))
    policy.load_batch(batch)
    policy.compute_values(partition(batch.num_sequences, 3))

    values = (their_values(theirs, batch) - 0.5) / 2
    torch.testing.assert_close(policy.batch.values, values.detach(), atol=1e-4, rtol=0)
    loss = (batch.weights * (values - batch.advantages).square()).sum()
    grads = torch.autograd.grad(loss, list(theirs.parameters()))
    step = policy.train(partition(batch.num_sequences, 3), SquaredError())
    assert step.sums["loss/value"] == pytest.approx(loss.item(), rel=1e-5)
    assert step.grad_norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in grads)), rel=1e-4)


def test_a_folder_without_these_numbers_is_refused(critic):
    _, folder = critic("llama-tied")
    with pytest.raises(UnsupportedModel, match="requires the numbers `mean` and `std`"):
        policy_shape(critic_config(folder, normalize_values=True))


def test_a_language_model_gets_a_head_of_zeros_that_learns(worker, model):
    policy = worker(critic_config(model("qwen2")[1]))
    policy.load_batch(ragged_batch())
    assert policy.compute_values(partition(8, 3)).mean == 0
    for _ in range(2):
        policy.train(partition(8, 3), SquaredError())
    assert policy.compute_values(partition(8, 3)).mean > 0.01


LAYOUTS = {
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sp=True),
    "TP2-PP2": layout(tp=2, pp=2),
    "DP2": layout(dp=2),
    "TP2-SP-CP2": layout(tp=2, sp=True, cp=2),
    "PP2-VPP2": layout(pp=2, vpp=2),
}


@dataclass(frozen=True)
class Course:
    """What one rank saw."""

    means: list[float]
    steps: list


def learn(rank, world_size, rendezvous, config, folder=None):
    """Five steps towards targets; the values before each."""
    worker = start_worker(rank, world_size, rendezvous, config)
    course = Course([], [])
    for seed in range(STEPS):
        batch = share(ragged_batch(seed=seed), rank, config)
        micro_batches = partition(batch.num_sequences, 2)
        worker.load_batch(batch)
        course.means.append(worker.compute_values(micro_batches).mean)
        course.steps.append(worker.train(micro_batches, SquaredError()))
    if folder is not None:
        worker.save_checkpoint(folder)
    worker.close()
    return course


@pytest.fixture(scope="module")
def alone(pool, critic):
    """The course of one process, with and without adapters."""
    courses = {}

    def of(lora):
        if lora not in courses:
            (courses[lora],) = pool.run(1, learn, critic_config(critic("llama-tied")[1], lora=lora))
        return courses[lora]

    return of


@pytest.mark.parametrize(
    ("name", "lora"), [(name, None) for name in LAYOUTS] + [("TP2-SP", ADAPTERS), ("TP2-PP2", ADAPTERS)]
)
def test_five_steps_equal_one_process(pool, critic, alone, name, lora):
    config = critic_config(critic("llama-tied")[1], layout=LAYOUTS[name], lora=lora)
    expected = alone(lora)
    assert expected.steps[-1].sums["loss/value"] < expected.steps[0].sums["loss/value"]
    for course in pool.run(config.layout.world_size, learn, config):
        assert course.means == pytest.approx(expected.means, rel=1e-5, abs=1e-6)
        for mine, its in zip(course.steps, expected.steps, strict=True):
            assert mine.sums["loss/value"] == pytest.approx(its.sums["loss/value"], rel=1e-5)
            assert mine.maxima["values/max"] == pytest.approx(its.maxima["values/max"], rel=1e-4)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


def values_of(rank, world_size, rendezvous, config, checkpoint, batch):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_checkpoint(checkpoint)
    worker.load_batch(batch)
    worker.compute_values(partition(batch.num_sequences, 3))
    values = worker.batch.values
    worker.close()
    return values


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["whole", "adapters"])
def test_what_was_trained_loads_under_another_layout_and_in_transformers(pool, model, tmp_path, lora):
    folder = model("llama-tied")[1]
    config = critic_config(folder, lora=lora, layout=layout(tp=2, sp=True))
    pool.run(2, learn, config, tmp_path / "checkpoint")
    batch = ragged_batch()
    there = config.model_copy(update={"layout": layout(pp=2)})
    values, _ = pool.run(2, values_of, there, tmp_path / "checkpoint", batch)

    export_hf(tmp_path / "checkpoint", tmp_path / "hf", config)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    assert theirs.config.num_labels == 1
    torch.testing.assert_close(their_values(theirs, batch).detach(), values, atol=1e-4, rtol=0)
    assert values.abs().max() > 0.05
    if lora is not None:
        export_adapter(tmp_path / "checkpoint", tmp_path / "adapter", config)
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        torch.testing.assert_close(their_values(adapted, batch).detach(), values, atol=1e-4, rtol=0)


def test_what_a_head_cannot_do_is_refused(worker, critic, model):
    policy = worker(critic_config(critic("llama-tied")[1]))
    policy.load_batch(ragged_batch())
    with pytest.raises(RuntimeError, match=r"compute_logprobs requires a model with policy.head 'lm'"):
        policy.compute_logprobs(partition(8, 3), old=True, reference=False)
    with pytest.raises(
        RuntimeError, match=r"a loss that needs the entropy requires a model with policy.head 'lm'"
    ):
        policy.train(partition(8, 3), LOSS)
    with pytest.raises(UnsupportedModel, match=r"'LlamaForSequenceClassification', which has no head for"):
        load_shape(critic("llama-tied")[1])
