"""A run that is rewarded by a reward model, which has the policy's devices by turns."""

import json
from pathlib import Path

import pytest
import torch

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import load_tokenizer
from tests.run.runs import finish, lines, start, tiny_model, write_experiment


def reward_model(folder: Path, model: Path) -> Path:
    """A random classifier of one label with the tokenizer of the policy, but not its sizes."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(2)
    network = LlamaForSequenceClassification(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=32, num_labels=1,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None,
        )
    )  # fmt: skip
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_policy_is_rewarded_by_a_reward_model_of_the_run(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    taste = reward_model(tmp_path / "taste", model)
    path = write_experiment(
        tmp_path,
        model,
        "paid",
        rewards=[
            {
                "kind": "local_model",
                "name": "taste",
                "model_path": str(taste),
                "weight": 2.0,
                "batch_size": 3,
                "devices": "policy",
                "offload": {"weights": True},
            },
            {
                "kind": "local_model",
                "name": "process",
                "model_path": str(taste),
                "devices": "policy",
                "offload": {"weights": True},
                "steps": {"separator": "", "reduce": "prod"},
            },
            {"function": "length_penalty", "arguments": {"max_length": 6}},
        ],
        policy={"layout": {}, "offload": {"weights": True}},
        algorithm={"num_steps": 2, "validation": {}, "kl": {}},
        logger={"console": "plain", "samples_per_step": 16},
    )

    status, output = finish(start("train", path))

    assert status == 0, output
    steps = lines(tmp_path / "paid")
    for step in steps:
        assert step.values["reward_errors/taste"] == step.values["reward_retries/taste"] == 0
        assert step.values["reward_std/taste"] > 0
        assert step.values["grad_norm"] > 0
        paid = 2 * step.values["reward/taste"] + step.values["reward/length_penalty"]
        paid += step.values["reward/process"]
        assert step.values["reward/mean"] == pytest.approx(paid, abs=1e-6)
    experiment = load_experiment(path)
    known = metric_names(experiment.algorithm, experiment.env, experiment.rewards)
    assert {name for step in steps for name in step.values} <= known
    samples = [json.loads(line) for line in (tmp_path / "paid" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 32
    check_scores(samples, taste)


def check_scores(samples: list[dict], folder: Path) -> None:
    """As transformers computes them: of the sum, the answer and an end token; of the tokens of the answer."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(PolicyConfig(model_path=folder))
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.decode([tokenizer.eos_token_id])
    for sample in samples:
        said = sample["completion"].removesuffix(end)
        ids = [*tokenizer.encode_document(sample["prompt"]), *tokenizer.encode(said), tokenizer.eos_token_id]
        with torch.no_grad():
            expected = network(torch.tensor([ids])).logits.item()
        assert sample["rewards"]["taste"] == pytest.approx(expected, abs=1e-4)
        start, count = len(tokenizer.encode_document(sample["prompt"])), len(tokenizer.encode(said))
        with torch.no_grad():
            values = network.score(network.model(torch.tensor([ids])).last_hidden_state)[0, start:, 0]
        product = float(torch.sigmoid(values[: max(count, 1)]).prod())
        assert sample["rewards"]["process"] == pytest.approx(product, abs=1e-4)
