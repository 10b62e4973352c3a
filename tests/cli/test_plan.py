"""`nemorl plan layouts` and `nemorl plan time` as a person sees them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemorl.commands import plan
from nemorl.plan.calibration import HERE, Calibration, write_calibration
from nemorl.plan.hardware import HARDWARE
from tests.cli.conftest import Nemorl
from tests.plan.models import write_model
from tests.plan.test_calibration import CPU, START, write_run


def test_layouts_are_listed_with_their_memory(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("plan", "layouts", experiment, "--gpus", "2", "--memory-gb", "80")

    assert outcome.status == 0
    title, header, *rows = outcome.out.splitlines()
    assert "in GB" in title
    assert header.split()[:4] == ["layout", "fits", "in", "all"]
    assert [row.split()[:2] for row in rows] == [
        ["DP2", "yes"],
        ["PP2", "yes"],
        ["CP2", "yes"],
        ["PP2", "VPP3"],
        ["TP2-SP", "yes"],
    ]
    assert outcome.err.startswith("5 layouts. Best first: those that fit")
    assert "--memory-gb" not in outcome.err
    cells = rows[0].split()[2:-2]  # of memory: the model has some megabytes
    assert all(float(cell) > 0 for cell in cells), cells


def test_a_memory_that_is_not_known_is_asked_for(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "read_machine", lambda: SimpleNamespace(gpus=()))

    outcome = nemorl("plan", "layouts", experiment, "--gpus", "1")

    assert "?" in outcome.out.splitlines()[2].split()
    assert outcome.err.startswith("1 layout. ")
    assert outcome.err.endswith("give --memory-gb to see which fit.\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (1234.56, "1234.6"), (12.34, "12.3"), (1.0, "1.0"), (0.0123, "0.012"), (3e-6, "0.0000030")],
)
def test_small_sizes_keep_two_digits(number: float, text: str) -> None:
    assert plan._digits(number) == text


def test_json_has_every_part_in_bytes(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("plan", "layouts", experiment, "--gpus", "2", "--json", "--memory-gb", "0.0001")

    listed = json.loads(outcome.out)
    assert listed[0]["layout"] == {"data_parallel_size": 2}
    assert not any(choice["fits"] for choice in listed)
    for choice in listed:
        memory = choice["memory"]
        assert sum(memory.values()) - memory["checkpoint"] == choice["memory_on_device"]


def test_overrides_change_what_is_valid(nemorl: Nemorl, experiment: Path) -> None:
    few = ("algorithm.num_prompts_per_step=1", "algorithm.num_generations_per_prompt=3")

    assert "DP2" not in nemorl("plan", "layouts", experiment, *few, "--gpus", "2").out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--gpus", "0", "argument --gpus: '0': expected an integer of at least 1"),
        ("--gpus", "2.5", "argument --gpus: '2.5': expected an integer of at least 1"),
        ("--memory-gb", "-1", "argument --memory-gb: '-1': expected a number above 0"),
        ("--memory-gb", "much", "argument --memory-gb: 'much': expected a number above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_wrong_usage(
    nemorl: Nemorl, experiment: Path, option: str, value: str, message: str
) -> None:
    outcome = nemorl("plan", "layouts", experiment, "--gpus", "2", f"{option}={value}")

    assert outcome.status == 2
    assert message in outcome.err


def test_a_number_that_no_layout_takes(nemorl: Nemorl, experiment: Path) -> None:
    few = ("algorithm.num_prompts_per_step=1", "algorithm.num_generations_per_prompt=2")

    outcome = nemorl("plan", "layouts", experiment, *few, "--gpus", "101")

    assert outcome.status == 2
    assert "takes 101 devices" in outcome.err


GPUS = (
    "policy.precision=bfloat16",
    "generation={backend: vllm, max_new_tokens: 8}",
    "cluster.gpus_per_node=8",
)


def test_time_shows_stages_with_what_bounds_them(nemorl: Nemorl, experiment: Path) -> None:
    price = ("--price-per-gpu-hour", "2.5")

    outcome = nemorl("plan", "time", experiment, *GPUS, "--hardware", "h100", *price)

    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("A step on 2 H100s: 11")
    assert lines[1].split() == ["stage", "seconds", "bound", "by", "of", "which"]
    assert [line.split()[0] for line in lines[2:6]] == ["generation", "training", "refit", "other"]
    for name in ("MFU of training", "idle: policy", "idle: generation", "cost of a million trained tokens"):
        assert name in outcome.out
    assert "These lengths are assumed: give --response-tokens." in outcome.err


def test_time_as_json(nemorl: Nemorl, experiment: Path) -> None:
    lengths = ("--prompt-tokens", "10", "--response-tokens", "6", "--spread", "0.5")

    outcome = nemorl("plan", "time", experiment, *GPUS, "--hardware", "gb200", *lengths, "--json")

    values = json.loads(outcome.out)
    assert values["hardware"] == "gb200"
    assert values["lengths"] == {
        "prompt": 10,
        "response": 6,
        "limit": 8,
        "sigma": 0.5,
        "quantiles": [],
        "scores_prompts": False,
        "shared": None,
    }
    assert values["trained_tokens"] == 4 * 8 * (10 + 6)
    stage = values["stages"]["training"]
    parts = ("compute", "memory", "link", "latency", "straggler", "bubble")
    assert stage["bound"] in parts
    assert values["seconds"] == pytest.approx(
        sum(stage[part] for stage in values["stages"].values() for part in parts)
    )
    assert "cost_per_million_tokens" not in values
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--response-tokens", "9"), "--response-tokens 9: policy.max_sequence_length and generation."),
        (
            ("policy.precision=float32",),
            "policy.precision = float32: the rates of h100 are of bfloat16 and FP8",
        ),
        (("policy.layout.tensor_parallel_size=3",), "policy.layout.tensor_parallel_size"),
        (("--price-per-gpu-hour", "0"), "argument --price-per-gpu-hour: '0': expected a number above 0"),
    ],
)
def test_time_refuses_what_has_no_plan(
    nemorl: Nemorl, experiment: Path, words: tuple[str, ...], message: str
) -> None:
    outcome = nemorl("plan", "time", experiment, *GPUS, "--hardware", "h100", *words)

    assert outcome.status != 0
    assert message in " ".join(outcome.err.split())


def test_time_reports_a_policy_that_does_not_fit(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", "time", experiment, *GPUS, "--hardware", "h100")
    needed = json.loads(nemorl(*words, "--json").out)["memory_on_device"]
    outcomes = {}
    for share in (0.85, 0.95, 1.05):
        small = replace(HARDWARE["h100"], memory_bytes=int(needed / share))
        monkeypatch.setitem(HARDWARE, "h100", small)
        outcomes[share] = nemorl(*words)
        fits = json.loads(nemorl(*words, "--json").out)["fits"]
        assert (outcomes[share].status, fits) == ((0, True) if share < 1 else (1, False))
        assert "trained tokens per second" in outcomes[share].out

    lists = "`nemorl plan layouts` lists layouts that fit.\n"
    assert "The policy" not in outcomes[0.85].err
    assert "GB (85%)" in outcomes[0.85].out
    assert "GB, less than the margin of 10%: " + lists in outcomes[0.95].err
    assert "The policy leaves 5% of " in outcomes[0.95].err
    assert "The policy needs " in outcomes[1.05].err
    assert lists in outcomes[1.05].err


def test_the_chosen_recomputation_is_shown(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = "policy.recompute={name: auto}"
    words = ("plan", "time", experiment, *GPUS, auto, "policy.micro_batch_tokens=4096", "--hardware", "h100")

    roomy = nemorl(*words)
    needed = json.loads(nemorl(*words, "--json").out)["memory_on_device"]
    small = replace(HARDWARE["h100"], memory_bytes=int(0.999 * needed / 0.9))
    monkeypatch.setitem(HARDWARE, "h100", small)
    tight = json.loads(nemorl(*words, "--json").out)

    (line,) = (line for line in roomy.out.splitlines() if line.startswith("recomputed"))
    assert line.split(maxsplit=1)[1] == "nothing (chosen by the plan)"
    assert tight["recompute"]["name"] != "none"
    assert tight["memory_on_device"] <= 0.9 * small.memory_bytes


def test_the_chosen_offloading_is_shown(
    nemorl: Nemorl, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a link as fast as the device's memory nothing has to be recomputed."""
    auto = ("policy.recompute={name: auto}", "policy.offload_activations={layers: auto}")
    words = (*GPUS, *auto, "policy.micro_batch_tokens=4096", "policy.precision=bfloat16")
    needed = json.loads(nemorl("plan", "time", experiment, *words, "--hardware", "h100", "--json").out)
    assert needed["offload_activations"] is None
    size = int(0.995 * needed["memory_on_device"] / 0.9)
    fast = replace(HARDWARE["h100"], memory_bytes=size, host_rate=1e12)
    monkeypatch.setitem(HARDWARE, "h100", fast)

    shown = nemorl("plan", "time", experiment, *words, "--hardware", "h100").out
    options = ("--hardware", "h100", "--memory-gb", str(0.9 * size / 1e9))
    listed = nemorl("plan", "layouts", experiment, *words, "--gpus", "1", *options)
    (as_json,) = json.loads(
        nemorl("plan", "layouts", experiment, *words, "--gpus", "1", *options, "--json").out
    )

    lines = dict(
        line.split("  ", 1) for line in shown.splitlines() if line.startswith(("recomputed", "activ"))
    )
    assert lines["recomputed"].strip() == "nothing (chosen by the plan)"
    layers = as_json["offload_activations"]["layers"]
    assert lines["activations offloaded"].strip().startswith("the first ")
    assert "without offloading" in as_json["choice"]
    assert as_json["choice"] in listed.err
    assert f"nothing; offloaded: the first {layers if layers > 1 else ''} layer".replace(
        "  ", " "
    ) in " ".join(listed.out.split())


def test_an_h100_has_one_size(nemorl: Nemorl, experiment: Path) -> None:
    as_json = json.loads(nemorl("plan", "time", experiment, *GPUS, "--hardware", "h100", "--json").out)

    assert as_json["device_memory"] == 81559 * 2**20  # MiB, as nvidia-smi reports it
    assert "default: 85.5, an H100's" in " ".join(nemorl("plan", "rehearse", "--help").out.split())
    assert " of 85.5 GB (" in nemorl("plan", "time", experiment, *GPUS, "--hardware", "h100").out


def test_plans_read_config_json_only(nemorl: Nemorl, experiment: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()

    assert nemorl("plan", "time", experiment, *GPUS, "--hardware", "h100").status == 0
    assert nemorl("plan", "layouts", experiment, "--gpus", "2").status == 0


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "layouts", "--gpus", "2"),
        ("plan", "time", "--hardware", "h100"),
        ("plan", "suggest", "--hardware", "h100", "--gpus", "2"),
        ("plan", "rehearse"),
        ("simulate", "--hardware", "h100"),
        ("check",),
        ("check", "--no-weights"),
    ],
)
def test_a_model_folder_that_is_missing_is_an_error_of_its_field(
    nemorl: Nemorl, experiment: Path, words: tuple[str, ...]
) -> None:
    outcome = nemorl(*words, experiment, "policy.model_path=absent")

    assert outcome.status == 2
    assert f"{experiment}: 1 configuration error\n" in outcome.err
    assert "policy.model_path = absent  (command line)\n      there is no such folder" in outcome.err


def test_staleness_is_not_negative(nemorl: Nemorl, experiment: Path) -> None:
    outcome = nemorl("plan", "suggest", experiment, "--hardware", "h100", "--gpus", "2", "--staleness", "-1")

    assert outcome.status == 2
    message = "argument --staleness: '-1': expected integers of at least 0, separated by commas, as in 0,1"
    assert message in outcome.err


def test_suggestions_are_ranked_with_reasons_and_fields(nemorl: Nemorl, experiment: Path) -> None:
    words = ("plan", "suggest", experiment, *GPUS, "--hardware", "h100", "--gpus", "2")

    outcome = nemorl(*words, "--simulate", "1")
    as_json = json.loads(nemorl(*words, "--staleness", "0,1,2", "--json").out)
    torch = nemorl(*words[:-4], "generation={backend: torch}", *words[-4:])

    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[1].split() == [
        *("seconds", "simulated", "placement", "policy", "GB", "recomputed"),
        *("engines", "staleness", "reason"),
    ]
    assert "(1%)" in lines[2].split()  # of the device
    assert "nothing" in lines[2].split()
    assert "of the 85.5 GB of a device 10% stay free" in outcome.err
    assert "These lengths are assumed: give --response-tokens." in outcome.err
    assert all(row["memory_on_device"] < row["device_memory"] for row in as_json)
    assert {row["recompute"]["name"] for row in as_json} == {"none"}
    assert "Fields of the first:" in lines
    assert lines[-1].strip().startswith("algorithm.max_staleness=")
    assert [row["seconds"] for row in as_json] == sorted(row["seconds"] for row in as_json)
    assert {row["overrides"][-1] for row in as_json} == {f"algorithm.max_staleness={n}" for n in range(3)}
    assert torch.status == 2
    assert "choose one whose engines have" in torch.err


def test_time_is_calibrated_and_written_to_a_file(nemorl: Nemorl, tmp_path: Path) -> None:
    model = write_model(tmp_path / "small")
    run = write_run(tmp_path / "run", model)
    write_calibration(Calibration(CPU, START), tmp_path / "cpu.yaml")
    words = ("plan", "time", run / "config.yaml")

    outcome = nemorl(*words, "--hardware", "cpu.yaml", "--calibrate", run, "-o", "fitted.yaml")
    planned = nemorl(*words, "--hardware", "fitted.yaml", "--json")
    refused = nemorl(*words, "--hardware", "cpu.yaml", "--calibrate", tmp_path)

    assert (outcome.status, planned.status, refused.status) == (0, 0, 2)
    assert "Measured runs, in seconds (medians)" in outcome.out
    assert "Fitted to run; median error" in (tmp_path / "fitted.yaml").read_text(encoding="utf-8")
    assert json.loads(planned.out)["hardware"] == "made-up"
    assert "expected the folder of a run" in refused.err


def test_a_machine_that_was_measured_is_called_this_one(nemorl: Nemorl, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", write_model(tmp_path / "small"))
    write_calibration(Calibration(replace(CPU, name=HERE), START), tmp_path / "here.yaml")
    title, *_ = nemorl("plan", "time", run / "config.yaml", "--hardware", "here.yaml").out.splitlines()
    assert re.match(r"A step on (1 device|\d+ devices) of this machine", title)


def test_equal_lengths_have_a_spread_of_0(nemorl: Nemorl, experiment: Path) -> None:
    words = ("plan", "time", experiment, *GPUS, "--hardware", "h100", "--json", "--response-tokens", "4")
    equal, spread = (json.loads(nemorl(*words, "--spread", size).out) for size in ("0", "1"))
    assert equal["lengths"]["sigma"] == 0
    # A step waits for the longest response of its batch, which then is as long as the others.
    assert equal["stages"]["generation"] != spread["stages"]["generation"]
    assert equal["seconds"] < spread["seconds"]
    refused = nemorl(*words, "--spread", "-1")
    assert "argument --spread: '-1': expected a number of at least 0" in refused.err


def test_numbers_of_a_table_have_one_style(nemorl: Nemorl, experiment: Path) -> None:
    words = ("plan", "time", experiment, *GPUS, "--hardware", "h100", "--price-per-gpu-hour", "3")
    out = nemorl(*words).out
    cells = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines()]
    rows = dict(pair for pair in cells if len(pair) == 2)
    whole, each = rows["trained tokens per second"], rows["for each device"]
    for shown in (whole, each):
        assert re.fullmatch(r"\d{1,2}\.\d|\d{1,3}(,\d{3})*", shown)
    assert "e-" not in out
    assert "e+" not in out
