"""What `nemorl eval` calls: measure a model on the validation tasks, without training it."""

import asyncio
import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from nemorl.algorithms.metrics import samples_of
from nemorl.config.experiment import Experiment
from nemorl.observe.files import write_atomically
from nemorl.observe.metrics import SampleWriter

from .checkpoints import Origin, full_disk_named
from .start import run_to_end, started_session
from .validation import validate, validation_sets


@dataclass(frozen=True)
class Evaluation:
    """Result of `nemorl eval`."""

    model: Path
    origin: Origin | None  # of a model that was exported from a run
    metrics: dict[str, float]
    samples: Path


def evaluate(experiment: Experiment) -> Evaluation:
    """Measure the model on the validation tasks. Raises NemorlError."""
    return run_to_end(_evaluate(experiment))


async def _evaluate(experiment: Experiment) -> Evaluation:
    folder = experiment.run_dir / "eval"
    evaluated = experiment.model_copy(update={"run_dir": folder})
    samples = folder / "samples.jsonl"
    with full_disk_named("The evaluation", experiment.run_dir.parent, "Make room, or set another run_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        samples.unlink(missing_ok=True)
    started = started_session(evaluated, policy=False, sampling=True, install_signals=_cancel_at_sigterm)
    async with started as session, session.generating():
        metrics, groups = await validate(session, evaluated, validation_sets(evaluated))
    writer = SampleWriter(samples)
    writer.write(list(samples_of(0, groups, "validation")))
    writer.close()
    model = experiment.policy.model_path
    origin = Origin.read(model)
    content = {"model": str(model), "origin": asdict(origin) if origin else None, "metrics": metrics}
    write_atomically(folder / "metrics.json", json.dumps(content, indent=2) + "\n")
    return Evaluation(model, origin, metrics, samples)


def _cancel_at_sigterm() -> None:
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
