"""Adapters against PEFT in one process, and under every layout against one process."""

import itertools
import json

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model

from nemorl.config.policy import FullRecompute, LoraConfig
from nemorl.megatron.checkpoint_files import SavedState, UnfitCheckpoint
from nemorl.megatron.export import export_adapter, export_hf
from nemorl.models.adapters import TrainedWeights, adapter_tensors
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.registry import load_shape
from nemorl.models.tensors import local_view, merge_adapter
from nemorl.weights.messages import ReceiverLayout, SenderLayout
from nemorl.weights.plan import plan_transfers
from tests.megatron.cases import LOSS, live, partition, share, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch, random_model, reference_logprobs
from tests.selection import in_all

ALL = LoraConfig(rank=4, alpha=8)
SOME = LoraConfig(rank=3, alpha=3, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
STEPS = 5


@pytest.fixture
def worker(model, tmp_path):
    """A worker in this process; call it with a family and the adapters."""
    started = []

    def start(family, lora, **fields):
        config = policy_config(model(family)[1], lora=lora, **fields)
        started.append(start_worker(0, 1, f"file://{tmp_path}/rendezvous", config))
        return started[0]

    yield start
    for each in started:
        each.close()


def adapters_of(worker):
    """The adapters by PEFT's names: views of one process' parameters."""
    parameters = worker.parameters()
    return {part.name: local_view(parameters, part) for part in worker.adapter_slices()}


def beside(model, lora, adapters):
    """A new copy of transformers' model with PEFT's adapters of these values."""
    targets = sorted({name.split(".")[-3] for name in adapters})
    config = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
    peft = get_peft_model(model, config)
    values = {name.replace(".weight", ".default.weight"): value for name, value in adapters.items()}
    there = {name for name, p in peft.named_parameters() if p.requires_grad}
    assert there == set(values)
    peft.load_state_dict(values, strict=False)
    return peft


@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3", ALL), ("llama-tied", SOME), ("gemma3", ALL), ("deepseek-v3", ALL), ("qwen3-moe", ALL)],
    ids=["all-linear", "some, tied", "gemma3", "latent attention", "experts"],
)
def test_logprobs_and_gradients_equal_peft(worker, family, lora):
    batch = ragged_batch()
    policy = worker(family, lora, optimizer={"name": "sgd", "lr": 0.25, "momentum": 0.0}, max_grad_norm=None)
    adapters = adapters_of(policy)
    generator = torch.Generator().manual_seed(3)
    for name, values in adapters.items():
        if name.endswith("lora_B.weight"):
            values.normal_(0, 0.1, generator=generator)
    policy.optimizer.weights_changed()
    before = {name: values.clone() for name, values in adapters.items()}
    theirs = beside(random_model(family), lora, before)

    policy.load_batch(batch)
    policy.compute_logprobs(partition(8, 3), old=True, reference=True)
    torch.testing.assert_close(
        policy.batch.old_logprobs, reference_logprobs(theirs, batch), atol=1e-4, rtol=0
    )
    with theirs.disable_adapter():
        base = reference_logprobs(theirs, batch)
    torch.testing.assert_close(policy.batch.reference_logprobs, base, atol=1e-4, rtol=0)
    assert (policy.batch.old_logprobs - base).abs().max() > 0.1

    stats = policy.train(partition(8, 3), LOSS)
    loss = LOSS(policy.batch, *logprobs_and_entropy(theirs, batch)).loss
    loss.backward()
    assert stats.sums["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
    grads = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert set(grads) == set(adapters) == set(adapter_tensors(load_shape(policy._config.model_path), lora))
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-5, name
        torch.testing.assert_close(
            (before[name] - adapters[name]) / 0.25, grad, atol=2e-6, rtol=1e-4, msg=name
        )


def logprobs_and_entropy(model, batch):
    """[N] each by transformers, one sequence at a time, with their graph."""
    logprobs, entropies = [], []
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.tokens[start:end]
        log_p = model(input_ids=tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        first = torch.zeros(1)
        logprobs += [first, log_p.gather(1, tokens[1:, None]).squeeze(1)]
        entropies += [first, -(log_p.exp() * log_p).sum(-1)]
    return torch.cat(logprobs) * batch.loss_mask, torch.cat(entropies) * batch.loss_mask


def test_first_values_are_pefts(worker):
    adapters = adapters_of(worker("llama", LoraConfig(rank=16, alpha=16)))
    for name, values in adapters.items():
        if name.endswith("lora_B.weight"):
            assert not values.any()
        else:
            # kaiming_uniform_(a=sqrt(5)) of a matrix with `in` columns: 1 / sqrt(in) is its bound
            bound = values.shape[1] ** -0.5
            assert 0.95 * bound < values.abs().max() <= bound
            assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    drawn = [values for name, values in adapters.items() if "q_proj.lora_A" in name]
    assert not torch.equal(drawn[0], drawn[1])


def test_frozen_weights_cost_no_gradients_and_no_optimizer_state(worker):
    policy = worker("qwen3", ALL)
    expected = sum(a * b for a, b in adapter_tensors(load_shape(policy._config.model_path), ALL).values())
    shards = policy.optimizer.shards("exp_avg")
    assert {name for name in policy.parameters() if ".lora." in name} == set(shards)
    assert sum(shard.values.numel() for shard in shards.values()) == expected
    gradients = sum(buffer.grad_data.numel() for chunk in policy._chunks for buffer in chunk.buffers)
    assert expected <= gradients < 1.2 * expected  # the buffers are padded
    assert policy._reference is policy._adapters


LAYOUTS = {
    "TP2": layout(tp=2),
    "TP2-SP": layout(tp=2, sp=True),
    "TP2-PP2": layout(tp=2, pp=2),
    "DP2": layout(dp=2),
    "TP2-SP-EP2": layout(tp=2, sp=True, ep=2),
    "TP2-SP-CP2": layout(tp=2, sp=True, cp=2),
    "PP2-VPP2": layout(pp=2, vpp=2),
}
IN_CI = ("TP2-SP-CP2", "PP2-VPP2", "DP2")


@pytest.fixture(scope="module")
def alone(pool, model):
    """Five steps in one process, by adapters."""
    lives = {}

    def of(family, lora):
        if (family, lora) not in lives:
            (lives[family, lora],) = run(pool, model, family, lora, layout())
        return lives[family, lora]

    return of


def run(pool, model, family, lora, where, **fields):
    config = policy_config(model(family)[1], layout=where, lora=lora, **fields)
    batches = [ragged_batch(seed=seed) for seed in range(STEPS)]
    return pool.run(where.world_size, live, config, batches, 2)


@pytest.mark.parametrize("name", [*IN_CI, *in_all("TP2", "TP2-SP", "TP2-PP2")])
def test_five_steps_equal_one_process(pool, model, alone, name):
    for life in run(pool, model, "qwen3", ALL, LAYOUTS[name]):
        assert_same_course(life, alone("qwen3", ALL))


@pytest.mark.parametrize(
    ("family", "lora", "name"),
    [
        ("llama-tied", SOME, "TP2-SP"),
        *in_all(
            ("llama-tied", SOME, "TP2-PP2"), ("deepseek-v3", ALL, "TP2-SP"), ("qwen3-moe", ALL, "TP2-SP-EP2")
        ),
    ],
)
def test_five_steps_of_other_models_equal_one_process(pool, model, alone, family, lora, name):
    for life in run(pool, model, family, lora, LAYOUTS[name]):
        assert_same_course(life, alone(family, lora))


@pytest.mark.parametrize("where", [layout(), layout(tp=2, pp=2)], ids=["one process", "TP2-PP2"])
def test_five_steps_with_recomputed_layers_equal_one_process(pool, model, alone, where):
    for life in run(pool, model, "qwen3", ALL, where, recompute=FullRecompute(name="full")):
        assert_same_course(life, alone("qwen3", ALL))


def assert_same_course(life, alone):
    for mine, its in zip(life.steps, alone.steps, strict=True):
        assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
        assert mine.sums["kl/reference"] == pytest.approx(its.sums["kl/reference"], rel=1e-4, abs=1e-6)
        assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)
        assert mine.grad_norm > 0.01


def train(worker, rank, config, seeds):
    steps = []
    for seed in seeds:
        batch = share(ragged_batch(seed=seed), rank, config)
        worker.load_batch(batch)
        worker.compute_logprobs(partition(batch.num_sequences, 2), old=True, reference=True)
        steps.append(worker.train(partition(batch.num_sequences, 2), LOSS))
    return steps


def save_in_the_middle(rank, world_size, rendezvous, config, folder):
    """Two steps, a checkpoint, two steps; what generation would get at the checkpoint, by slice."""
    worker = start_worker(rank, world_size, rendezvous, config)
    train(worker, rank, config, range(2))
    worker.save_checkpoint(folder)
    merged = worker.merged_parameters()
    handed_over = [(part, local_view(merged, part).clone()) for part in worker.slices()]
    steps = train(worker, rank, config, range(2, 4))
    adapters = {name: p.clone() for name, p in worker.parameters().items() if ".lora." in name}
    worker.close()
    return steps, adapters, handed_over


def continue_from(rank, world_size, rendezvous, config, folder):
    """The checkpoint, two steps."""
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_checkpoint(folder)
    steps = train(worker, rank, config, range(2, 4))
    adapters = {name: p.clone() for name, p in worker.parameters().items() if ".lora." in name}
    worker.close()
    return steps, adapters


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def saved(pool, model, tmp_path_factory, request):
    """A checkpoint of TP2-DP2 in either precision, with what the ranks saw."""
    folder = tmp_path_factory.mktemp("adapters")
    config = policy_config(
        model("llama-tied")[1], lora=SOME, layout=layout(tp=2, dp=2), precision=request.param
    )
    return config, folder, pool.run(4, save_in_the_middle, config, folder)


def test_the_same_layout_continues_bit_by_bit(pool, saved):
    config, folder, lives = saved
    for life, (steps, adapters) in zip(lives, pool.run(4, continue_from, config, folder), strict=True):
        assert steps == life[0]
        assert all(torch.equal(adapters[name], values) for name, values in life[1].items())


@pytest.mark.parametrize("saved", ["float32"], indirect=True)  # roundings to bfloat16 would hide a difference
def test_another_layout_continues_the_same_run(pool, saved):
    config, folder, lives = saved
    there = replace_layout(config, layout(tp=2, pp=2, sp=True))
    for steps, _ in pool.run(4, continue_from, there, folder):
        for mine, its in zip(steps, lives[0][0], strict=True):
            assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
            assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)


def replace_layout(config, where):
    return config.model_copy(update={"layout": where})


def test_the_checkpoint_holds_adapters_only(saved):
    config, folder, _ = saved
    shape = load_shape(config.model_path)
    held = json.loads((folder / "policy.json").read_text())["tensors"]
    assert set(held) == set(adapter_tensors(shape, SOME))
    assert held["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == [3, 64]
    states = sum(file.stat().st_size for file in folder.glob("*.safetensors") if "random" not in file.name)
    adapters = sum(a * b for a, b in held.values())
    assert states < 2 * 3 * 4 * adapters  # weights and two moments in float32; copies and headers besides


def test_the_merged_export_is_what_generation_gets(saved, tmp_path):
    config, folder, lives = saved
    export_hf(folder, tmp_path / "merged", config)
    exported, source = HfFolder(tmp_path / "merged"), HfFolder(config.model_path)
    for _, _, handed_over in lives:
        for part, values in handed_over:
            assert torch.equal(exported.tensor(part.name, part.shape)[part.box], values), part.name
    extents = hf_tensors(load_shape(config.model_path))
    for name in source.names():
        merged = exported.tensor(name, extents[name])
        frozen = source.tensor(name, extents[name]).to(merged.dtype)
        changed = name.split(".")[-2] in SOME.targets
        assert torch.equal(merged, frozen) != changed, name


def test_peft_loads_the_exported_adapter(saved, tmp_path):
    """PEFT's own merge gives our merged folder up to rounding."""
    config, folder, _ = saved
    export_adapter(folder, tmp_path / "adapter", config)
    export_hf(folder, tmp_path / "merged", config)
    base = random_model("llama-tied").to(getattr(torch, config.precision))
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    exported = HfFolder(tmp_path / "merged")
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2}[config.precision]
    for name in exported.names():
        ours = exported.tensor(name, tuple(theirs[name].shape))
        torch.testing.assert_close(ours, theirs[name], atol=tolerance, rtol=tolerance, msg=name)


def test_exports_and_checkpoints_of_another_kind_are_refused(saved, tmp_path):
    config, folder, _ = saved
    without = config.model_copy(update={"lora": None})
    with pytest.raises(UnsupportedModel, match=r"policy.lora is null in its run: leave out --adapter"):
        export_adapter(folder, tmp_path / "adapter", without)
    shape = load_shape(config.model_path)
    for lora in (None, ALL):
        with pytest.raises(
            UnfitCheckpoint, match=r"is of another model: .* here; set policy.model_path, policy.lora"
        ):
            SavedState(folder, TrainedWeights(shape, lora))
    stronger = SOME.model_copy(update={"alpha": 6})
    with pytest.raises(UnfitCheckpoint, match=r"alpha / rank = 1; policy.lora says 2: set policy.lora.alpha"):
        SavedState(folder, TrainedWeights(shape, stronger))


def test_each_weight_is_merged_once_for_a_refit(worker, monkeypatch):
    """Slices of one weight are asked for in a row, and one merged weight exists at a time."""
    policy = worker("qwen3", ALL)
    merges = []
    counted = "nemorl.megatron.lora.merge_adapter"
    monkeypatch.setattr(counted, lambda *args: (merges.append(1), merge_adapter(*args)))
    merged = policy.merged_parameters()
    engine = policy_slices(policy._shape, PolicyRank())
    plan = plan_transfers(
        [SenderLayout(tuple(policy.slices()))],
        [ReceiverLayout(tuple(engine), ("float32",) * len(engine))],
        bucket_bytes=10_000,
    )
    for bucket in plan.sender_parts(1)[0].buckets:
        for part in bucket.slices:
            local_view(merged, part)
    groups = policy._shape.num_key_value_heads  # of rows of q, k and v that lie in turns
    assert len(merges) == 4 * (3 * groups + 1 + 2 + 1)  # qkv, o; gate and up, down: in 4 layers


def test_the_header_names_the_adapters(worker):
    header = worker("llama-tied", SOME).header()
    assert header["adapters"] == "rank 3, alpha 3, on q_proj, v_proj, up_proj, down_proj"
