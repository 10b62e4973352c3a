"""Multi-token prediction that a model or another setting rules out, and its operations."""

from pathlib import Path

import pytest

from nemorl.config.policy import MultiTokenPredictionConfig
from nemorl.errors import Problem
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape, policy_shape
from nemorl.plan.machine import Machine
from nemorl.plan.problems import plan_run
from nemorl.plan.utilization import ModelWork
from tests.config.experiments import refuses, write
from tests.plan.conftest import Configure
from tests.plan.models import with_layers, write_weights
from tests.plan.test_recompute import machine

SECTION = {"loss_weight": 0.1, "detach": False, "depth": None}
ON = "policy.multi_token_prediction={loss_weight: 0.1}"


def test_adapters_rule_it_out(tmp_path: Path) -> None:
    reason = "policy.lora freezes the weights, and these layers have no adapters; remove one of the two"
    overrides = (ON, "policy.lora={rank: 4, alpha: 8}")
    refuses(write(tmp_path), overrides, "policy.multi_token_prediction", SECTION, reason)


def test_deeper_predictions_than_metrics_have_names_for_are_refused(tmp_path: Path) -> None:
    overrides = ("policy.multi_token_prediction={depth: 9}",)
    refuses(write(tmp_path), overrides, "policy.multi_token_prediction.depth", 9, "8")


def found(configure: Configure, *overrides: str, where: Machine | None = None) -> list[Problem]:
    return list(plan_run(configure(*overrides), where or machine(10**12)).problems)


def test_a_model_without_such_layers_is_refused(configure: Configure, model: Path) -> None:
    (problem,) = found(configure, ON)
    assert (problem.field, problem.value) == ("policy.multi_token_prediction", SECTION)
    assert "has no layers for further tokens that its family (llama) reads" in problem.fix
    with_layers(model, 1)
    assert found(configure, ON) == []


def test_all_layers_are_trained(configure: Configure, model: Path) -> None:
    with_layers(model, 2)
    deeper = "policy.multi_token_prediction={depth: 3}"
    (problem,) = found(configure, deeper)
    assert (problem.field, problem.value) == ("policy.multi_token_prediction.depth", 3)
    assert "the model has 2 layers, each for one further token; remove it" in problem.fix
    with_layers(model, 1)
    assert found(configure, deeper) == []


def test_a_folder_that_lacks_their_weights_is_refused_only_with_it(configure: Configure, model: Path) -> None:
    with_layers(model, 1)
    write_weights(model / "model.safetensors", hf_tensors(load_shape(model)))
    assert found(configure) == []
    (problem,) = found(configure, ON)
    assert problem.field == "policy.model_path"
    assert "first model.mtp_layers.0.token_layernorm.weight" in problem.fix


def test_operations_of_training_count_each_depth_and_those_of_scoring_none(
    configure: Configure, model: Path
) -> None:
    with_layers(model, 1)
    shape = policy_shape(configure(ON).policy)
    plain, depth = ModelWork.of(shape), 2
    both = ModelWork.of(shape, mtp=MultiTokenPredictionConfig(depth=depth))
    segments, scored = [(0, 5), (0, 3)], 4
    hidden, heads, ffn = 128, 8 + 2 * 4, 384
    layer = hidden * heads * 16 + 8 * 16 * hidden + 3 * hidden * ffn
    tokens, seen = 8, 15 + 6
    forward = tokens * 2 * (2 * hidden * hidden + layer) + scored * 2 * hidden * 1000
    forward += 2 * 2 * 8 * 16 * seen
    more = both.training(segments, scored) - plain.training(segments, scored)
    assert more == pytest.approx(3 * depth * forward)
    assert both.scoring(segments, scored) == plain.scoring(segments, scored)
