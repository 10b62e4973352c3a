"""NeMo-RL's x_token: its three losses, their teachers, and texts without prompts."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import AlignedLossConfig, CommonKlLossConfig, ProjectedKlLossConfig
from nemorl.config.experiment import Experiment
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from nemorl.importing.rules import CannotImport
from tests.importing.contexts import ALIGNED, OPTIONS
from tests.importing.recipes import recipes


def experiment_of(values: dict[str, Any], folder: Path) -> Experiment:
    imported = import_values(PROJECTS["nemo-rl"], values, OPTIONS)
    return checked(to_text(imported, PROJECTS["nemo-rl"], "x"), folder, Path("x.yaml"), imported)


def loss_of(values: dict[str, Any], folder: Path) -> AlignedLossConfig:
    algorithm = experiment_of(ALIGNED | values, folder).algorithm
    assert isinstance(algorithm, AlignedDistillationConfig)
    return algorithm.loss


def test_each_loss(tmp_path: Path) -> None:
    shared = {"loss_fn.vocab_topk": 100, "loss_fn.temperature": 2.0, "loss_fn.reverse_kl": True}
    ours: dict[str, Any] = {"tokens": 100, "temperature": 2.0, "reverse": True}
    assert loss_of(shared, tmp_path) == ProjectedKlLossConfig(**ours)
    gold = shared | {"loss_fn.gold_loss": True, "loss_fn.uncommon_topk": 7}
    ours |= {"name": "common_kl", "rest_tokens": 7}
    assert loss_of(gold, tmp_path) == CommonKlLossConfig(**ours)
    pieces = gold | {"loss_fn.xtoken_loss": True}
    assert loss_of(pieces, tmp_path) == CommonKlLossConfig(**ours, common="likeliest")


def test_a_teachers_own_loss_is_that_of_all(tmp_path: Path) -> None:
    gold = {"model_name": "org/a", "gold_loss": True, "xtoken_loss": True, "weight": 0.5}
    same = {"model_name": "org/b"}  # which has the policy's tokens
    experiment = experiment_of(ALIGNED | {"teachers": [gold, same]}, tmp_path)
    algorithm = experiment.algorithm
    assert isinstance(algorithm, AlignedDistillationConfig)
    assert algorithm.teacher_weights == {"teacher_0": 0.5}
    assert isinstance(algorithm.loss, CommonKlLossConfig)
    assert algorithm.loss.common == "likeliest"
    other = {"model_name": "org/b", "projection_matrix_path": "b.pt"}
    with pytest.raises(CannotImport, match="they have several losses"):
        import_values(PROJECTS["nemo-rl"], ALIGNED | {"teachers": [gold, other]}, OPTIONS)
    with pytest.raises(CannotImport, match="xtoken_loss = true: it is a variant of gold_loss"):
        import_values(PROJECTS["nemo-rl"], ALIGNED | {"loss_fn.xtoken_loss": True}, OPTIONS)


def test_a_recipe_trains_on_texts_with_its_layouts(tmp_path: Path) -> None:
    (name,) = [one for one in recipes("nemo-rl") if "xtoken" in one and "multiteacher-qwen3" in one]
    experiment = experiment_of(dict(recipes("nemo-rl")[name]), tmp_path)
    algorithm, (first, second) = experiment.algorithm, experiment.teachers.values()
    assert isinstance(algorithm, AlignedDistillationConfig)
    assert (algorithm.train_on, algorithm.match_sft, algorithm.batch_size) == ("all", True, 8)
    assert not algorithm.generates
    assert not experiment.data.chat
    assert experiment.policy.layout.name == "TP4 CP2"
    for teacher in (first, second):
        assert teacher.kind == "model"
        assert teacher.worker_config(experiment.policy).layout.name == "TP2 CP2 DP2"
