"""NeMo-RL's x_token: its three losses, their teachers, and texts without prompts."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import (
    AlignedLossConfig,
    AverageConfig,
    CombinationConfig,
    CommonKlLossConfig,
    ProjectedKlLossConfig,
    SelectConfig,
    SumConfig,
    TrustConfig,
)
from nemorl.config.data import TextsDataset
from nemorl.config.experiment import Experiment
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from nemorl.importing.rules import CannotImport
from tests.importing.contexts import ALIGNED, OPTIONS, SFT
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


TWO = {"teachers": [{"model_name": "org/a", "weight": 0.5}, {"model_name": "org/b"}]}


@pytest.mark.parametrize(
    ("values", "combination", "weights"),
    [
        ({"loss_fn.kd_loss_mode": "sum"}, SumConfig(), {"teacher_0": 0.5}),
        (
            {"loss_fn.normalize_teacher_by_vocab": True},
            SumConfig(scale_by_vocabulary=True),
            {"teacher_0": 0.5},
        ),
        ({"loss_fn.kd_loss_mode": "select_teacher"}, SelectConfig(name="select"), {}),
        ({"loss_fn.kd_loss_mode": "averaged_logits"}, AverageConfig(name="average"), {"teacher_0": 0.5}),
        (
            {"loss_fn.sum_weights_metric": "max_prob", "loss_fn.alpha": 2.0},
            TrustConfig(name="trust", score="max_probability", sharpness=2.0),
            {},
        ),
    ],
)
def test_each_combination_of_teachers(
    values: dict[str, Any], combination: CombinationConfig, weights: dict[str, float], tmp_path: Path
) -> None:
    algorithm = experiment_of(ALIGNED | TWO | values, tmp_path).algorithm
    assert isinstance(algorithm, AlignedDistillationConfig)
    assert (algorithm.combination, algorithm.teacher_weights) == (combination, weights)


def test_a_teacher_alone_is_not_combined(tmp_path: Path) -> None:
    """Its weight counts in a sum only: a share, or a softmax over one, is 1."""
    for values, weight in (
        ({"loss_fn.kd_loss_mode": "sum"}, {"main": 0.5}),
        ({"loss_fn.kd_loss_mode": "averaged_logits"}, {}),
        ({"loss_fn.sum_weights_metric": "ce"}, {}),
    ):
        one = {"teachers": [{"model_name": "org/a", "weight": 0.5}]}
        algorithm = experiment_of(ALIGNED | one | values, tmp_path).algorithm
        assert isinstance(algorithm, AlignedDistillationConfig)
        assert (algorithm.combination, algorithm.teacher_weights) == (SumConfig(), weight)


def test_logits_of_other_tokens_are_not_averaged(tmp_path: Path) -> None:
    """NeMo-RL then adds the divergences, by the loss of all."""
    other = [TWO["teachers"][0] | {"projection_matrix_path": "a.pt", "gold_loss": True}, TWO["teachers"][1]]
    values = {"teachers": other, "loss_fn.kd_loss_mode": "averaged_logits"}
    algorithm = experiment_of(ALIGNED | values, tmp_path).algorithm
    assert isinstance(algorithm, AlignedDistillationConfig)
    assert (algorithm.combination, algorithm.loss.name) == (SumConfig(), "projected_kl")


def test_what_nemo_rl_does_not_combine_is_refused() -> None:
    for values, why in (
        ({"loss_fn.kd_loss_mode": "mean"}, "this mode is not imported; those that are: sum, averaged_logits"),
        ({"loss_fn.sum_weights_metric": "kl"}, "this score is not imported; those that are: ce, entropy"),
        (
            {"loss_fn.kd_loss_mode": "select_teacher", "loss_fn.sum_weights_metric": "ce"},
            "sum_weights_metric = ce: NeMo-RL has it with kd_loss_mode sum only",
        ),
    ):
        with pytest.raises(CannotImport, match=why):
            import_values(PROJECTS["nemo-rl"], ALIGNED | TWO | values, OPTIONS)


def test_a_recipe_trains_on_texts_with_its_layouts(tmp_path: Path) -> None:
    (name,) = [one for one in recipes("nemo-rl") if "xtoken" in one and "multiteacher-qwen3" in one]
    experiment = experiment_of(dict(recipes("nemo-rl")[name]), tmp_path)
    algorithm, (first, second) = experiment.algorithm, experiment.teachers.values()
    assert isinstance(algorithm, AlignedDistillationConfig)
    assert (algorithm.train_on, algorithm.match_sft, algorithm.batch_size) == ("all", True, 8)
    assert not algorithm.generates
    assert not experiment.data.chat
    texts: dict[str, Any] = {
        "path": "nvidia/Nemotron-Pretraining-Specialized-v1.1",
        "files": "Nemotron-Pretraining-Formal-Logic/*.parquet",
        "min_characters": 16384,
        "truncate": True,
        "end_token": False,
    }
    assert experiment.data.train == TextsDataset(name="texts", split="train[:-64]", **texts)
    assert experiment.data.validation == TextsDataset(name="texts", split="train[-64:]", **texts)
    assert experiment.policy.layout.name == "TP4 CP2"
    for teacher in (first, second):
        assert teacher.kind == "model"
        assert teacher.worker_config(experiment.policy).layout.name == "TP2 CP2 DP2"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("hf://datasets/org/texts@v2/math/*.parquet", {"path": "org/texts", "files": "math/*.parquet",
                                                        "revision": "v2", "split": "train"}),
        ("hf://datasets/org/texts", {"path": "org/texts", "split": "train"}),
        ("org/texts", {"path": "org/texts", "split": "train"}),
        ("/data/texts.arrow", {"path": "/data/texts.arrow"}),
        ("/data/*/part-?.txt", {"path": "/data", "files": "*/part-?.txt"}),
        ("data/texts.json", {"path": "data", "files": "texts.json", "split": "train"}),
    ],
)  # fmt: skip
def test_files_of_texts(given: str, ours: dict[str, Any]) -> None:
    """JSON, a list or lines, is read by the package datasets."""
    tree = import_values(PROJECTS["nemo-rl"], ALIGNED | {"data.train.data_files": given}, OPTIONS).tree
    also = {"name": "texts", "text_key": "text", "truncate": True, "end_token": False}
    assert tree["data"]["train"] == also | ours


def test_rows_of_files_are_held_out_as_of_a_split() -> None:
    held_out = {"data.train.split_validation_size": 0.1, "distillation.val_period": 5}
    tree = import_values(PROJECTS["nemo-rl"], ALIGNED | held_out, OPTIONS).tree
    read = {part: tree["data"][part] for part in ("train", "validation")}
    places = {part: (one["path"], one["files"], one["split"]) for part, one in read.items()}
    assert places == {
        "train": ("texts", "*.parquet", "train[:90%]"),
        "validation": ("texts", "*.parquet", "train[90%:]"),
    }


def test_texts_that_cannot_be_read_are_refused() -> None:
    for value, why in (
        ("https://x.org/a.parquet", "download it"),
        (["a.parquet"], "name one"),
        (None, "name one"),
    ):
        with pytest.raises(CannotImport, match=f"data.train.data_files.*{why}"):
            import_values(PROJECTS["nemo-rl"], ALIGNED | {"data.train.data_files": value}, OPTIONS)


def test_supervised_texts_are_closed_and_not_cut(tmp_path: Path) -> None:
    of_texts = {key: value for key, value in ALIGNED.items() if key.startswith("data.")}
    experiment = experiment_of(SFT | of_texts, tmp_path)
    assert experiment.data.train == TextsDataset(name="texts", path=Path("texts"), files="*.parquet")
