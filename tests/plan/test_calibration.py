"""Constants fitted to runs that were made from known ones, files of hardware, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemorl.errors import ConfigError, UsageError
from nemorl.models.registry import load_shape
from nemorl.observe.index import IndexWriter, TrajectoryRow
from nemorl.plan.calibration import (
    Calibration,
    calibrate,
    load_planned,
    measure_machine,
    read_calibration,
    read_run,
    write_calibration,
)
from nemorl.plan.costs import Attained
from nemorl.plan.hardware import HARDWARE, Hardware
from nemorl.plan.memory import policy_memory
from nemorl.plan.step_time import RunPlan
from nemorl.plan.training_time import Lengths
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model

CPU = Hardware(
    *("made-up", "cpu", 1e11, 1e11, 2, 8 * 10**9, 2e10, 2, 1e10, 1e10, 1e10),
    operations_float32=1e11,
    cores=2,
    tile=16,
)
START = Attained(launch=1e-3, decode_layer=4e-4, sequence=2e-4, step=0.1, call=0.05, refit_call=0.1)
KNOWN = replace(START, launch=3e-3, decode_layer=1e-3, step=0.3, call=0.1, refit_call=0.25)
LENGTHS = Lengths(prompt=6, response=6, limit=8, sigma=1.0, scores_prompts=False)


def write_run(folder: Path, model: Path, *overrides: str, steps: int = 3, **changes: float) -> Path:
    """A run on `CPU` whose stages take what `KNOWN` plans; the first step takes 10 times as long."""
    folder.mkdir()
    config = write(folder, GRPO.replace("models/arithmetic", str(model)), "config.yaml")
    text = config.read_text(encoding="utf-8")
    for override in overrides:
        old, new = override.split("=")
        assert old in text
        text = text.replace(old, new)
    config.write_text(text, encoding="utf-8")
    experiment, shape = load_planned(config)
    step = RunPlan(experiment, shape, CPU, LENGTHS, KNOWN).step()
    seconds = {f"time/{name}": cost.seconds for name, cost in step.stages.items() if name != "other"}
    values = {**seconds, "time/step": step.seconds, "length/mean": LENGTHS.response}
    values |= {"tokens/trained": step.trained_tokens, **changes}
    lines = []
    for number in range(1, steps + 1):
        scale = 10 if number == 1 else 1
        timed = {name: value * scale if name.startswith("time/") else value for name, value in values.items()}
        lines.append(json.dumps({"step": number, "version": number, **timed}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_the_fit_recovers_the_constants_of_runs(tmp_path: Path, model: Path) -> None:
    changes = [(), ("num_prompts_per_step: 4=num_prompts_per_step: 16",), ("tokens: 512=tokens: 64",)]
    folders = [write_run(tmp_path / f"run{n}", model, *one) for n, one in enumerate(changes)]
    runs = [read_run(folder, load_shape(model)) for folder in folders]
    assert runs[0].steps == 2
    assert runs[0].lengths == LENGTHS

    fitted = calibrate(runs, Calibration(CPU, START))

    for run in runs:
        for stage, seconds in run.predicted(fitted).items():
            assert seconds == pytest.approx(run.seconds[stage], rel=0.1), (run.name, stage)
    # Launches of layers and the host's work for sequences act on the same seconds of decoding: these runs
    # determine their sum, which the stages above show, and not each of them.
    for name in ("launch", "step", "refit_call"):
        assert getattr(fitted.attained, name) == pytest.approx(getattr(KNOWN, name), rel=0.25), name


def test_a_file_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "made-up.yaml"
    write_calibration(Calibration(CPU, KNOWN), file, ["Fitted to run0."])
    assert read_calibration(str(file)) == Calibration(CPU, KNOWN)
    assert file.read_text(encoding="utf-8").startswith("# Fitted to run0.\n")
    assert read_calibration("h100") == Calibration(HARDWARE["h100"])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("cores: 2", "core: 2", "hardware.core = 2"),
        ("memory_rate: 2e+10", "memory_rate: .nan", "expected a finite number"),
        ("cores: 2", "cores: 2.5", "expected an integer"),
        ("matmul: 0.73", "matmul: 7", "expected a share above 0 and at most 1"),
        ("operations: 1e+11", "operations: 0", "expected a number above 0"),
        ('  name: "made-up"\n', "", "hardware.name is not given"),
        ("attained:", "constants:", "the sections are `hardware` and `attained`"),
    ],
)
def test_a_file_that_is_not_sound_is_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    file = tmp_path / "made-up.yaml"
    write_calibration(Calibration(CPU, START), file)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_calibration(str(file))
    assert problem in str(refused.value)


def test_hardware_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--hardware h10: unknown; did you mean .*h100.*`nemorl plan time"):
        read_calibration("h10")


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError, match=r"expected the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match=r"has 1 step of training: the first 1 of a run are skipped"):
        read_run(write_run(tmp_path / "short", model, steps=1))
    other = write_model(tmp_path / "other", hidden_size=64)
    with pytest.raises(UsageError, match=r"policy\.model_path = .*model: its shape is not that of CONFIG"):
        read_run(write_run(tmp_path / "of_model", model), load_shape(other))
    broken = write_run(tmp_path / "broken", model)
    lines = (broken / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = json.loads(lines[-1]) | {"time/training": None, "nonfinite": {"time/training": "nan"}}
    (broken / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"time/training = nan in step 3: expected a finite number"):
        read_run(broken)


def test_processes_share_a_machine_and_no_accelerator() -> None:
    half = CPU.shared_by(2)
    assert (half.operations_float32, half.memory_rate, half.memory_bytes) == (5e10, 1e10, 4 * 10**9)
    assert CPU.shared_by(1, threads=1).operations_float32 == 5e10
    assert CPU.in_precision("float32").element_bytes == 4
    assert HARDWARE["h100"].shared_by(8) is HARDWARE["h100"]


@pytest.mark.ci
def test_this_machine_is_measured() -> None:
    found = measure_machine().hardware
    assert found.cores >= 1
    assert 1e8 < found.operations_float32 < 1e14
    assert 1e8 < found.memory_rate < 1e13


def test_a_run_says_what_shared_prefixes_leave_out(tmp_path: Path, model: Path) -> None:
    folder = write_run(tmp_path / "run", model, **{"packing/shared": 0.75})
    run = read_run(folder, load_shape(model))
    assert run.lengths == replace(LENGTHS, shared=0.75)
    # A quarter of the 12 tokens of a sequence; without that a prompt for each group of 8.
    assert run.plan(Calibration(CPU, KNOWN)).training.lengths.sequence == pytest.approx(3)
    unknown = replace(run, lengths=LENGTHS)
    assert unknown.plan(Calibration(CPU, KNOWN)).training.lengths.sequence == pytest.approx(6 + 6 / 8)


def test_a_run_says_how_long_its_responses_were(tmp_path: Path, model: Path) -> None:
    folder = write_run(tmp_path / "run", model)
    row = TrajectoryRow(2, "training", 0, 0, 0, 1, 9, 3, 1.0, "stop", 0, 0, 1.0, 0.0)
    others = ({"step": 1}, {"phase": "validation"}, {"step": 3, "sampled": 7})
    rows = [replace(row, **changes) for changes in ({}, {}, {"sampled": 5}, *others)]
    IndexWriter(folder / "trajectories").append(rows)

    lengths = read_run(folder).lengths

    # 3, 3 and 5 of the second step, 7 of the third
    assert lengths.quantiles[::64] == (5, 5, 6)
    assert len(lengths.quantiles) == 129
    assert read_run(write_run(tmp_path / "other", model)).lengths.quantiles == ()


def test_memory_is_planned_by_the_tokens_that_a_run_computed(tmp_path: Path, model: Path) -> None:
    """Of 480 trained tokens 120 are computed, and with padding 160, in two updates on one copy."""
    shares = {"tokens/trained": 480.0, "packing/shared": 0.75, "packing/padding": 0.25}
    two = "num_prompts_per_step: 4=num_minibatches: 2\n  num_prompts_per_step: 4"
    run = read_run(write_run(tmp_path / "run", model, two, **shares))
    plain = read_run(write_run(tmp_path / "plain", model, two))

    assert run.computed_tokens == 80
    assert run.lengths.shared == pytest.approx(1 - 160 / 480)
    assert run.memory == policy_memory(run.experiment, run.shape, 80)
    assert plain.computed_tokens is None
    assert plain.memory == policy_memory(plain.experiment, plain.shape)
