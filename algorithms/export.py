"""The weights of a run's checkpoints, in the forms that others read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.load import load_experiment
from nemorl.config.policy import PolicyConfig
from nemorl.errors import ConfigError, RunError
from nemorl.megatron.checkpoint_store import CheckpointStore, verify
from nemorl.megatron.export import export_adapter, export_hf
from nemorl.observe.run_folder import RunPaths
from nemorl.session.models import folder_of

from .full_disk import full_disk_named
from .origin import Origin


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    form: Literal["hf", "adapter", "megatron"] = "hf",
    model: str = "policy",
) -> None:
    """Write the weights of a checkpoint of a run folder as a Hugging Face folder, its adapters as PEFT keeps
    them, or a checkpoint of megatron-core. Of several models that learn, `model` is one. Raises NemorlError.
    """
    _refuse_what_is_no_checkpoint(checkpoint)
    step = verify(checkpoint).step
    run_dir = checkpoint.absolute().parents[1]
    config = RunPaths(run_dir).config
    if not config.exists():
        raise RunError(
            f"{checkpoint} does not lie in the `checkpoints` of a run folder: {config}, which says what "
            "model it is of, does not exist. Name a folder such as RUN_DIR/checkpoints/step_00000010."
        )
    section = _model_of_run(config, model)
    with full_disk_named(f"The weights of {checkpoint}", out.parent, "Make room, or name another folder."):
        _exporter(form)(folder_of(checkpoint, model), out, section)
        Origin(str(run_dir), step).write(out)


def replace_hf(checkpoint: Path, step: int, hf_dir: Path, experiment: Experiment) -> None:
    """Write `hf_dir` anew; what an earlier run left there stays until the new folder is whole."""
    mend = f"All checkpoints are whole: make room, then `nemorl models export {checkpoint} {hf_dir}`."
    fresh = hf_dir.with_name(".hf.new")
    with full_disk_named("The Hugging Face folder of checkpointing.save_hf", hf_dir.parent, mend):
        shutil.rmtree(fresh, ignore_errors=True)
        export_hf(checkpoint, fresh, experiment.policy)
        Origin(str(experiment.run_dir.absolute()), step).write(fresh)
        shutil.rmtree(hf_dir, ignore_errors=True)
        fresh.rename(hf_dir)


def _model_of_run(config: Path, name: str) -> PolicyConfig:
    """A model that learns by a run's config.yaml, which an older version may have written."""
    try:
        models = {model.name: model.config for model in models_of(load_experiment(config)) if model.trains}
    except ConfigError as error:
        raise RunError(
            f"{error}\nIt says which model the checkpoint is of, in the fields of the version that wrote it. "
            "Keep a copy of it, correct these fields in it (remove those that are no more) and export again."
        ) from error
    if name not in models:
        raise RunError(f"no {name} learns in the run of {config}: take --model {' or '.join(models)}")
    return models[name]


def _exporter(form: str) -> Callable[[Path, Path, PolicyConfig], None]:
    if form == "megatron":
        from nemorl.megatron.checkpoint import export_megatron  # imports Megatron, which takes seconds

        return export_megatron
    return export_adapter if form == "adapter" else export_hf


def _refuse_what_is_no_checkpoint(folder: Path) -> None:
    """Name the newest checkpoint to a person who named the run, its `checkpoints`, or what is not there."""
    if not folder.exists():
        beside = CheckpointStore(folder.parent)
        mend = "name one such as RUN_DIR/checkpoints/step_00000010"
        if steps := beside.steps():
            mend = f"the newest there is {beside.path(steps[-1])}"
        raise RunError(f"there is no checkpoint {folder}: {mend}")
    for place in (folder / "checkpoints", folder):
        store = CheckpointStore(place)
        if steps := store.steps():
            raise RunError(
                f"{folder} holds checkpoints: name one of them; the newest is {store.path(steps[-1])}"
            )
    if RunPaths(folder).holds_run:
        raise RunError(f"{folder} is a run without a checkpoint yet: there are no weights to export")
