"""Adapters that PEFT wrote: the start of training, merged on import, and refused where not implemented."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemorl.config.policy import LoraConfig
from nemorl.megatron.export import export_adapter, export_hf
from nemorl.models.hf_config import UnsupportedModel
from nemorl.models.hf_writer import import_model
from nemorl.models.peft_adapter import read_peft_adapter, start_problem
from nemorl.models.registry import load_shape
from tests.megatron.cases import partition, start_worker
from tests.megatron.examples import layout, policy_config, ragged_batch, random_model, reference_logprobs

TARGETS = ["q_proj", "v_proj", "down_proj"]


def write_adapter(folder: Path, family: str = "qwen3", **fields: object) -> Path:
    """An adapter that PEFT itself writes, with a B that is not zero."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "lora_dropout": 0.05} | fields
    torch.manual_seed(11)
    model = get_peft_model(random_model(family), PeftConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "lora_B" in name:
                values.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def its_logprobs(adapter: Path, family: str = "qwen3") -> torch.Tensor:
    model = PeftModel.from_pretrained(random_model(family), adapter)
    return reference_logprobs(model.eval(), ragged_batch())


def logprobs_and_save(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.load_batch(ragged_batch())
    worker.compute_logprobs(partition(8, 3), old=True, reference=True)
    logprobs = worker.batch.old_logprobs.clone(), worker.batch.reference_logprobs.clone()
    worker.save_checkpoint(folder)
    worker.close()
    return logprobs


@pytest.mark.ci
@pytest.mark.parametrize("where", [layout(), layout(tp=2), layout(pp=2)], ids=["one", "TP2", "PP2"])
def test_training_starts_from_an_adapter_of_peft_and_gives_it_back(pool, model, tmp_path, where):
    adapter = write_adapter(tmp_path / "theirs", use_rslora=True)
    shape = load_shape(model("qwen3")[1])
    found = read_peft_adapter(adapter, shape).lora
    assert (found.rank, found.alpha, set(found.targets)) == (4, 16.0, set(TARGETS))  # 8 / sqrt(4) = 16 / 4
    lora = LoraConfig(rank=4, alpha=16, targets=tuple(TARGETS), start=adapter)
    config = policy_config(model("qwen3")[1], lora=lora, layout=where)
    logprobs, reference = pool.run(where.world_size, logprobs_and_save, config, tmp_path / "saved")[-1]
    torch.testing.assert_close(logprobs, its_logprobs(adapter), atol=1e-4, rtol=0)
    base = reference_logprobs(random_model("qwen3"), ragged_batch())
    torch.testing.assert_close(reference, base, atol=1e-4, rtol=0)
    assert (logprobs - base).abs().max() > 0.01

    export_adapter(tmp_path / "saved", tmp_path / "ours", config)
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", adapter)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.testing.assert_close(its_logprobs(tmp_path / "ours"), its_logprobs(adapter), atol=1e-6, rtol=0)


def test_exported_adapter_and_merged_model_give_equal_logits(pool, model, tmp_path):
    adapter = write_adapter(tmp_path / "theirs")
    lora = LoraConfig(rank=4, alpha=8, targets=tuple(TARGETS), start=adapter)
    config = policy_config(model("qwen3")[1], lora=lora)
    pool.run(1, logprobs_and_save, config, tmp_path / "saved")
    export_adapter(tmp_path / "saved", tmp_path / "adapter", config)
    export_hf(tmp_path / "saved", tmp_path / "merged", config)
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")(tokens).logits
        peft = PeftModel.from_pretrained(random_model("qwen3"), tmp_path / "adapter").eval()(tokens).logits
    torch.testing.assert_close(merged, peft, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek-v3"])
def test_an_adapter_is_merged_on_import_as_peft_merges_it(model, tmp_path, family):
    targets = ["q_a_proj", "o_proj"] if family == "deepseek-v3" else TARGETS
    adapter = write_adapter(tmp_path / "theirs", family, target_modules=targets)
    import_model(model(family)[1], tmp_path / "out", adapter)
    peft = PeftModel.from_pretrained(random_model(family), adapter)
    peft.merge_and_unload().save_pretrained(tmp_path / "expected")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert ours.keys() == theirs.keys()
    changed = 0
    source = load_file(model(family)[1] / "model.safetensors")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-5, msg=name)
        changed += not torch.equal(tensor, source[name])
    assert changed == 4 * len(targets)  # layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is true: DoRA has a magnitude for each row; merge it into the model"),
        ({"rank_pattern": {"v_proj": 2}}, r'rank_pattern is {"v_proj": 2}: adapters here have one rank'),
        ({"alpha_pattern": {"v_proj": 2}}, "alpha_pattern is"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save is \["lm_head"\]'),
        ({"bias": "all"}, 'bias is "all": biases are not trained'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa": this way to draw an adapter'),
        ({"layers_to_transform": [0]}, r"layers_to_transform is \[0\]: every layer has adapters here"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has adapters of lm_head: in this model q_proj, "),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]: single embeddings"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_implemented_is_refused_with_the_field_and_the_fix(model, tmp_path, fields, message):
    adapter = write_adapter(tmp_path / "theirs", **fields)
    with pytest.raises(UnsupportedModel, match=message):
        read_peft_adapter(adapter, load_shape(model("qwen3")[1]))
    with pytest.raises(UnsupportedModel, match=message):
        import_model(model("qwen3")[1], tmp_path / "out", adapter)
    assert not (tmp_path / "out").exists()


def test_other_folders_and_models_are_refused(model, tmp_path):
    shape = load_shape(model("qwen3")[1])
    adapter = write_adapter(tmp_path / "theirs")
    with pytest.raises(UnsupportedModel, match=r"holds no adapter_config.json: name a folder that PEFT's"):
        read_peft_adapter(tmp_path, shape)
    with pytest.raises(UnsupportedModel, match=r"does not fit the model: .*; name the model that it was"):
        read_peft_adapter(adapter, load_shape(model("llama")[1]))
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"12345678not json")
    with pytest.raises(UnsupportedModel, match="is not a complete safetensors file"):
        read_peft_adapter(damaged, shape)
    (damaged / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="save it as safetensors"):
        read_peft_adapter(damaged, shape)
    settings = json.loads((adapter / "adapter_config.json").read_text()) | {"peft_type": "LOHA"}
    (damaged / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match='peft_type is "LOHA": only LORA is implemented'):
        read_peft_adapter(damaged, shape)


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({}, None, None),
        ({"rank": 8}, "policy.lora.rank", "has rank 4: set it to that"),
        ({"alpha": 4}, "policy.lora.alpha", "is scaled by 2: set alpha to 8"),
        ({"targets": ("q_proj",)}, "policy.lora.targets", "q_proj, v_proj, down_proj]: name these"),
    ],
)
def test_the_config_agrees_with_the_adapter(model, tmp_path, fields, field, fix):
    start = write_adapter(tmp_path / "theirs")
    lora = LoraConfig(**({"rank": 4, "alpha": 8, "targets": tuple(TARGETS), "start": start} | fields))
    problem = start_problem(lora, load_shape(model("qwen3")[1]), "policy.lora")
    assert (problem and problem.field) == field
    assert fix is None or fix in problem.fix
