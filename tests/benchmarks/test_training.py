"""The training benchmark: its sides compute the same, and its metrics mean what they are called."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from meter import Memory, Span, measured
from torch.utils.flop_counter import FlopCounterMode
from training import check_agreement
from training_metrics import RATIOS, summary, verdict
from training_sides import Metrics, Setting, run_step, start
from training_work import Work, equal_work, growth, padding_waste, rollout_work, training_flops
from transformers import AutoModelForCausalLM

from nemorl.megatron import parallel
from nemorl.models.registry import load_shape
from tests.megatron.examples import VOCABULARY, random_model

SIDES = (
    "nemorl",
    "nemorl:grpo",
    "megatron",
    "megatron-stock",
    "transformers",
    "transformers:sorted",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-tied")
    random_model("llama-tied").save_pretrained(folder)
    return folder


def metrics(seconds: float = 1.0, loss: float = 2.0, grad_norm: float = 3.0) -> Metrics:
    memory = Memory(before_bytes=10, peak_bytes=30)
    return Metrics(loss, grad_norm, Span(seconds, seconds), memory, Span(0.1, 0.1), 64)


def test_all_sides_have_the_same_loss_and_gradient(model: Path):
    setting = Setting(model, "cpu", "float32", threads=1, max_sequence_length=512)
    for work in (rollout_work(7, 400, VOCABULARY), equal_work(3, 16, 32, VOCABULARY)):
        assert len(work.packed(64)) > 1
        seen = {}
        for name in SIDES:
            side, _, variant = name.partition(":")
            try:
                seen[name] = run_step(setting, start(side, setting), work, variant)
            finally:
                if side != "transformers":
                    parallel.leave()
        check_agreement(seen, 2e-5)
        assert seen["nemorl"].optimizer.seconds > 0
        assert all(one.span.seconds > 0 and one.memory.work_bytes >= 0 for one in seen.values())


@pytest.mark.parametrize("other", [metrics(loss=2.001), metrics(grad_norm=2.99), metrics(loss=float("nan"))])
def test_sides_that_compute_otherwise_are_not_compared(other: Metrics):
    check_agreement({"nemorl": metrics(), "megatron": metrics(loss=2.0001)}, 1e-4)
    with pytest.raises(RuntimeError, match=r"megatron has the .* cannot be compared"):
        check_agreement({"nemorl": metrics(), "megatron": other}, 1e-4)


def test_ratios_say_how_much_longer_the_others_take():
    work = equal_work(2, 10, 20, VOCABULARY)
    ours = [metrics(1.0), metrics(2.0), metrics(1.0)]
    theirs = [metrics(2.0), metrics(3.0), metrics(3.0)]
    seen = summary("transformers", theirs, ours, work, flops=300.0, peak=1000.0)
    assert seen["seconds_over_ours"] == 2.0
    assert seen["seconds_over_ours_range"] == [1.5, 3.0]
    assert seen["tokens_per_second"] == pytest.approx(20 / 3)
    assert seen["mfu"] == pytest.approx(0.1)
    assert seen["work_bytes"] == 20
    assert seen["best_seconds_over_our_best"] == 2.0


def test_verdicts_are_overheads_over_megatron_and_the_speed_over_transformers():
    by_side = {"megatron": 1.25, "megatron-stock": 2.0, "transformers": 1.8}
    sides = {"sides": [{"side": side, **dict.fromkeys(RATIOS, ratio)} for side, ratio in by_side.items()]}
    seen_by_bound = {str(v["what"]): v["seen"] for v in verdict(sides, sides)}
    assert seen_by_bound["overhead over megatron, ragged lengths"] == pytest.approx(-0.2)
    assert seen_by_bound["overhead over megatron-stock, equal lengths"] == pytest.approx(-0.5)
    assert seen_by_bound["speed over transformers, ragged lengths"] == 1.8


def test_padding_is_what_fills_each_chunk_up_to_its_longest():
    work = Work((1,) * 5, (2, 8, 4, 3, 3), micro_batch_tokens=10, vocab_size=VOCABULARY)
    arrival = work.chunks(2, by_length=False)
    assert arrival == [[0, 1, 2], [3, 4]]
    assert padding_waste(work.lengths, arrival) == pytest.approx(1 - 20 / (3 * 8 + 2 * 3))
    by_length = work.chunks(2, by_length=True)
    assert by_length == [[0, 3, 4], [2, 1]]
    assert padding_waste(work.lengths, by_length) == pytest.approx(1 - 20 / (3 * 3 + 2 * 8))


def test_padded_rows_score_the_places_before_learned_tokens():
    work = Work((3, 2), (5, 4), micro_batch_tokens=10, vocab_size=VOCABULARY)
    (rows,) = work.padded([[0, 1]], torch.device("cpu"))
    first, second = (torch.from_numpy(example.tokens) for example in work.examples())
    assert rows.predicting.tolist() == [1, 2, 3]
    assert rows.tokens[1].tolist() == [*second.tolist(), 0]
    assert rows.attention.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert rows.labels.tolist() == [first[2:].tolist(), [*second[2:].tolist(), 0]]
    assert rows.weights.tolist() == [[0, 0.25, 0.25], [0.25, 0.25, 0]]


def test_lengths_of_rollouts_vary_within_their_limits():
    work = rollout_work(4000, 4096, VOCABULARY)
    completions = torch.tensor([n - p for n, p in zip(work.lengths, work.prompts, strict=True)]).float()
    assert completions.min() >= 4
    assert completions.max() == 320
    assert completions.median().item() == pytest.approx(64, rel=0.05)
    within_one_sigma = (completions < 64 * math.exp(0.8)).float().mean().item()
    assert within_one_sigma == pytest.approx(0.841, abs=0.02)
    assert work == rollout_work(4000, 4096, VOCABULARY)
    assert work.lengths != rollout_work(4000, 4096, VOCABULARY, seed=1).lengths


def test_operations_are_those_that_torch_counts(model: Path):
    """Torch counts all pairs of tokens in attention, of which a causal one needs half."""
    length = 32
    work, shape = equal_work(1, length, length, VOCABULARY), load_shape(model)
    theirs = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    (rows,) = work.padded([[0]], torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        theirs(rows.tokens, logits_to_keep=rows.predicting).logits.sum().backward()
    unseen = 3 * 2 * shape.num_layers * shape.num_attention_heads * shape.head_dim * length**2
    assert training_flops(shape, work) == counter.get_total_flops() - unseen


def test_an_exponent_is_found_again():
    assert growth([100, 200, 400], [3 * n**1.5 for n in (100, 200, 400)]) == pytest.approx(1.5)


def test_peak_memory_is_that_of_the_work_alone():
    size = 64 << 20

    def work(count: int) -> float:
        return float(torch.ones(count // 4).sum())

    work(4 * size)  # a higher peak before
    result, span, memory = measured("cpu", lambda: work(size))
    assert result == size // 4
    assert span.seconds > 0
    assert memory.work_bytes == pytest.approx(size, rel=0.1)


@pytest.mark.slow
def test_the_benchmark_runs_whole(model: Path, tmp_path: Path):
    options = ["--rounds", "1", "--sequences", "4", "--length", "16", "--growth", "2", "--threads", "1"]
    command = [sys.executable, Path("benchmarks/training.py").resolve(), "--model", model, *options]
    out = subprocess.run(
        [*command, "--json", tmp_path / "out.json"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["verdicts"]) == 4
    assert [side["side"] for side in written["equal"]["sides"]] == [
        "nemorl",
        "megatron",
        "megatron-stock",
        "transformers",
    ]
    assert [p["tokens"] for p in written["growth"]["length"]["points"]] == [16, 32]
    assert "overhead over megatron" in out
