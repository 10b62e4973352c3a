"""`nemorl plan rehearse` as a person sees it."""

import json
from pathlib import Path

import pytest

from nemorl.rehearsal.worker import RankReport
from tests.cli.conftest import Nemorl
from tests.rehearsal.experiments import write


def test_peaks_and_waits_are_printed(nemorl: Nemorl, tmp_path: Path) -> None:
    file = write(tmp_path / "model")

    outcome = nemorl("plan", "rehearse", file, "policy.layout={tensor_parallel_size: 2}", "--ranks", "1")

    assert outcome.status == 0, outcome.err
    title, header, row, *rest = outcome.out.splitlines()
    assert "not run on hardware" in title
    assert header.split()[:5] == ["rank", "stage", "peaks", "in", "GB"]
    assert row.split()[:3] == ["1", "0", "train"]
    assert "yes" in row.split()
    text = "\n".join(rest)
    assert "Waits of the host for the device:" in text
    assert "metrics" in text
    assert "While the policy is offloaded, a device keeps up to 0.0" in text
    assert "rank 1 of 2 rehearsed in " in outcome.err


def test_json_has_every_peak_and_wait(nemorl: Nemorl, tmp_path: Path) -> None:
    outcome = nemorl("plan", "rehearse", write(tmp_path / "model"), "--json")

    (rank,) = json.loads(outcome.out)
    assert (rank["rank"], rank["stage"], rank["faults"]) == (0, 0, [])
    highest = max(rank["peaks"].values(), key=lambda peak: peak["num_bytes"])
    assert rank["plan"]["measured"] == highest["num_bytes"]
    assert rank["peaks"][rank["plan"]["phase"]] == highest
    assert all(wait["reason"] for wait in rank["waits"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--ranks", "4"), "rank 4 does not exist, the layout has 1 ranks from 0"),
        (("--ranks", "first"), "'first': expected integers"),
        (("policy.layout={tensor_parallel_size: 3}",), "it must divide the model's 8 attention heads"),
        (("policy.model_path=org/absent",), "run `hf download org/absent` where there is a network"),
        (("policy.model_path=absent",), "policy.model_path = absent  (command line)"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    nemorl: Nemorl, tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    outcome = nemorl("plan", "rehearse", write(tmp_path / "model"), *words)

    assert outcome.status == 2
    assert problem in outcome.err


def test_a_fault_makes_the_command_fail(
    nemorl: Nemorl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemorl.rehearsal import ranks
    from nemorl.rehearsal.execution import Event
    from nemorl.rehearsal.memory import Peak

    fault = Event(
        "train", "add of (3,) on pretended, (3,) on cpu", "my_losses.py:12 (loss)", "my_run.py:3 (f)"
    )
    report = RankReport(0, 0, peaks={"train": Peak(10**9)}, wrong_devices=[(fault, 1)])
    monkeypatch.setattr(ranks, "rehearse_all", lambda *_: [report])

    outcome = nemorl("plan", "rehearse", write(tmp_path / "model"))

    assert outcome.status == 1
    expected = (
        "my_losses.py:12 (loss): add of (3,) on pretended, (3,) on cpu, called from my_run.py:3 (f) (train)"
    )
    assert expected in outcome.err
