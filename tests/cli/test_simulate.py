"""`nemorl simulate` as a person sees it."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Nemorl


def test_the_output_has_the_assumptions_and_the_prediction(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("simulate", experiment, "algorithm.max_staleness=1", "--gpus", 5, "--steps", 2)

    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Assumptions (defaults)")
    assert any(line.startswith("seconds of an engine's step, plus") for line in lines)
    assert any(line.startswith("Prediction: 5 devices, max_staleness 1") for line in lines)
    for name in ("step ", "trained tokens per second", "time of the policy", "age of sampled tokens"):
        assert any(line.startswith(name) for line in lines), name
    assert outcome.err.startswith("bottleneck: ")
    assert "2 steps simulated in" in outcome.err
    assert "give --trace RUN_DIR" in outcome.err


def test_json_has_all_values_and_a_seed_repeats_them(nemorl: Nemorl, experiment: Path) -> None:
    words = ("simulate", experiment, "--json", "--steps", 2, "--failure-hours", 0.1, "--seed")

    first, again = (nemorl(*words, 3).out for _ in range(2))

    listed = json.loads(first)
    assert first == again
    assert listed["steps"] == 2
    assert listed["ages"] == {"0": 1.0}
    assert listed["assumptions"]["seconds between failures of one engine"] == "360"
    assert sum(listed["shares"]["policy"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", 1), "--gpus 1: the policy takes 1 and an engine 1; give at least 2"),
        (("generation.backend=megatron",), "the simulator requires engines of the run"),
        (("--trace", "nowhere"), "--trace nowhere: expected the folder of a run"),
        (("--failure-hours", "0"), "'0': expected a number above 0"),
        (("--seed", "-1"), "'-1': expected an integer of at least 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    nemorl: Nemorl, experiment: Path, words: tuple[object, ...], message: str
) -> None:
    outcome = nemorl("simulate", experiment, *words)

    assert outcome.status == 2
    assert message in outcome.err


def test_speeds_of_a_hardware(nemorl: Nemorl, experiment: Path) -> None:
    gpus = (
        "policy.precision=bfloat16",
        "generation={backend: vllm, max_new_tokens: 8}",
        "cluster.gpus_per_node=8",
    )

    outcome = nemorl("simulate", experiment, *gpus, "--hardware", "h100", "--steps", "2")
    refused = nemorl("simulate", experiment, "--hardware", "h100")

    assert outcome.status == 0
    assert "Assumptions (planned for h100)" in outcome.out
    assert "give --trace RUN_DIR" not in outcome.err
    assert refused.status == 2
    assert "policy.precision = float32" in refused.err


def test_speeds_of_a_file(nemorl: Nemorl, experiment: Path, tmp_path: Path) -> None:
    """A file of `plan time -o` is as the hardware that it was made of; half of its rates take longer."""
    gpus = (
        "policy.precision=bfloat16",
        "generation={backend: vllm, max_new_tokens: 8}",
        "cluster.gpus_per_node=8",
    )
    file = tmp_path / "mine.yaml"
    assert nemorl("plan", "time", experiment, *gpus, "--hardware", "h100", "-o", file).status == 0

    def step(hardware: object) -> float:
        words = ("simulate", experiment, *gpus, "--hardware", hardware, "--steps", "2", "--json")
        return float(json.loads(nemorl(*words).out)["step_seconds"])

    as_named = step("h100")
    assert step(file) == pytest.approx(as_named, rel=1e-9)
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    for name in ("operations", "memory_rate"):
        document["hardware"][name] /= 100
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert step(file) > as_named

    shown = nemorl("simulate", experiment, *gpus, "--hardware", file, "--steps", "2")
    assert f"Assumptions (planned for {file})" in " ".join(shown.out.split())
    refused = nemorl("simulate", experiment, *gpus, "--hardware", tmp_path / "gone.yaml")
    assert refused.status == 2
    assert "gone.yaml" in refused.err
