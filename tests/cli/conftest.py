"""The command line in this process, with a stand-in for what trains."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemorl.cli import main
from nemorl.config.experiment import Experiment
from tests.config.experiments import GRPO, write
from tests.plan.models import write_model


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    status: int
    out: str
    err: str


Nemorl = Callable[..., Outcome]


@pytest.fixture
def nemorl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nemorl:
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("NEMORL_TRACEBACK", raising=False)

    def run(*words: object) -> Outcome:
        try:
            status = main([str(word) for word in words])
        except SystemExit as usage:  # argparse ends the process for --help and wrong usage
            status = int(usage.code or 0)
        said = capsys.readouterr()
        return Outcome(status, said.out, said.err)

    return run


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The file of an experiment that could start."""
    model = write_model(tmp_path / "model")
    return write(tmp_path, GRPO.replace("models/arithmetic", str(model)))


@dataclass
class Trainer:
    """Replaces what trains, evaluates and exports: remembers its calls and fails on demand."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    failure: BaseException | None = None
    origin: str | None = None  # of the model that is evaluated

    def train(self, experiment: Experiment, resume: bool, replay: Path | None) -> SimpleNamespace:
        self._called("resume" if resume else "train", experiment.algorithm.num_steps)
        return SimpleNamespace(
            run_dir=experiment.run_dir, report=experiment.run_dir / "report.html", hf_dir=None
        )

    def evaluate(self, experiment: Experiment) -> SimpleNamespace:
        self._called("evaluate", experiment.seed)
        return SimpleNamespace(
            model=experiment.policy.model_path,
            origin=self.origin,
            metrics={"validation/reward": 0.75},
            samples=Path("samples.jsonl"),
        )

    def export_checkpoint(
        self,
        checkpoint: Path,
        out: Path,
        form: str,
        model: str,
        *,
        quantize: str | None,
        ignore: object,
        shard_bytes: int | None,
    ) -> None:
        quantized = "" if quantize is None else f" in {quantize} but {ignore}"
        sharded = "" if shard_bytes is None else f" in files of {shard_bytes}"
        self._called(f"export {model} as {form}{quantized}{sharded}", (checkpoint, out))

    def _called(self, name: str, argument: object) -> None:
        self.calls.append((name, argument))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """What the commands find in place of the real one."""
    stand_in = Trainer()
    monkeypatch.setattr("nemorl.run.train.train", stand_in.train)
    monkeypatch.setattr("nemorl.run.train.evaluate", stand_in.evaluate)
    monkeypatch.setattr("nemorl.run.checkpoints.export_checkpoint", stand_in.export_checkpoint)
    return stand_in
