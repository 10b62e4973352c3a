"""What users get wrong in distillation, validation sets, votes and early stops."""

from pathlib import Path
from typing import Any

import pytest

from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment, to_yaml
from tests.config.experiments import problems_of, write

TEACHER = "teachers={sums: {model_path: models/teacher}}"
TWO = "teachers={sums: {model_path: models/a}, prose: {model_path: models/b}}"
FAR = "teachers={far: {kind: endpoint, base_url: 'http://127.0.0.1:8000/v1', model: m}}"
ON_POLICY = ["algorithm.name=on_policy_distillation"]
ALIGNED = ["algorithm={name: aligned_distillation, num_steps: 10, batch_size: 8}"]
TWO = "teachers={sums: {model_path: models/a}, prose: {model_path: models/b}}"
OFF_POLICY = ["algorithm={name: distillation, num_steps: 10, batch_size: 8}"]
SETS = "data.validation_sets={hard: {name: arithmetic, digits: 3, size: 50}}"
PERIOD = "algorithm.validation.period=2"
STOP = "algorithm.early_stop={metric: validation/accuracy}"
VOTES = "algorithm.validation={num_generations_per_prompt: 4, cons_at_k: [4], period: 2}"

WRONG: dict[str, tuple[list[str], str, Any, str]] = {
    "no teacher": (ON_POLICY, "teachers", {}, "`on_policy_distillation` learns from teachers"),
    "a teacher of nobody": (
        [TEACHER],
        "teachers",
        ["sums"],
        "`grpo` has no teachers",
    ),
    "a server for other tokens": (
        [*ALIGNED, FAR],
        "algorithm",
        "aligned_distillation",
        "the server of teachers.far would be sent the policy's tokens",
    ),
    "a weight of no teacher": (
        [*ALIGNED, TEACHER, "algorithm.teacher_weights={prose: 0.5}"],
        "algorithm.teacher_weights.prose",
        0.5,
        "there is no such teacher; use one of sums",
    ),
    "one teacher to select from": (
        [*ALIGNED, TEACHER, "algorithm.combination={name: select}"],
        "algorithm.combination.name",
        "select",
        "there is one teacher, and nothing to combine",
    ),
    "constant weights of a selection": (
        [*ALIGNED, TWO, "algorithm.combination={name: select}", "algorithm.teacher_weights={sums: 0.5}"],
        "algorithm.teacher_weights",
        {"sums": 0.5},
        "the combination `select` has no constant weights; remove this, or use `sum`",
    ),
    "a mean of no teacher": (
        [
            *ALIGNED,
            TWO,
            "algorithm.combination={name: average}",
            "algorithm.teacher_weights={sums: 0, prose: 0}",
        ],
        "algorithm.teacher_weights",
        {"sums": 0.0, "prose": 0.0},
        "the mean of their logits is of no teacher; raise a weight",
    ),
    "a mean of logits of common tokens": (
        [*ALIGNED, TWO, "algorithm.combination={name: average}", "algorithm.loss={name: common_kl}"],
        "algorithm.loss.name",
        "common_kl",
        "a mean of logits is compared token by token, by `projected_kl`; use it",
    ),
    "a key of a teacher that reads all texts": (
        [*ALIGNED, "teachers={sums: {model_path: models/a, key: x}, prose: {model_path: models/b}}"],
        "teachers.sums.key",
        "x",
        "all teachers teach all tasks",
    ),
    "prompts of several templates": (
        [*ALIGNED, TEACHER, "algorithm.train_on=all", "data.chat=true"],
        "algorithm.train_on",
        "all",
        "prompts differ by the templates",
    ),
    "a coefficient that is matched": (
        [*ALIGNED, TEACHER, "algorithm.match_sft=true", "algorithm.sft_coefficient=1.0"],
        "algorithm.sft_coefficient",
        1.0,
        "match_sft is true",
    ),
    "teachers without weight": (
        [*ALIGNED, TEACHER, "algorithm.distillation_coefficient=0"],
        "algorithm.distillation_coefficient",
        0.0,
        "the teachers have no effect",
    ),
    "two teachers of the same task": (
        [*ON_POLICY, TWO],
        "algorithm.teacher_key",
        None,
        "there are 2 teachers; set it to the column of the tasks that names the teacher",
    ),
    "a column for one teacher": (
        [*OFF_POLICY, TEACHER, "algorithm.teacher_key=of"],
        "algorithm.teacher_key",
        "of",
        "there is one teacher",
    ),
    "a teacher without a model": (
        [*ON_POLICY, "teachers={sums: {}}"],
        "teachers.sums.model_path",
        None,
        "",
    ),
    "a teacher's name that is no word": (
        [*ON_POLICY, "teachers={'a b/ü': {model_path: m}}"],
        "teachers",
        "a b/ü",
        "invalid name; use small letters, digits and _, starting with a letter, such as `sums_2`",
    ),
    "a set's name that begins with a digit": (
        [PERIOD, "data.validation_sets={2d: {name: arithmetic, digits: 3, size: 50}}"],
        "data.validation_sets",
        "2d",
        "invalid name; use small letters, digits and _, starting with a letter, such as `sums_2`",
    ),
    "a teacher larger than the devices that it shares": (
        [*ON_POLICY, "teachers={sums: {model_path: m, devices: policy, layout: {tensor_parallel_size: 2}}}"],
        "teachers.sums.layout",
        "2 processes",
        "the policy has devices for 1 process",
    ),
    "an address that is none": (
        [*ON_POLICY, "teachers={far: {kind: endpoint, base_url: 'localhost:8000', model: m}}"],
        "teachers.far.base_url",
        "localhost:8000",
        "http://127.0.0.1:8000/v1",
    ),
    "a server and another temperature": (
        [*ON_POLICY, FAR, "generation.sampling.temperature=0.7"],
        "generation.sampling.temperature",
        0.7,
        "the server of teachers.far returns logprobs at temperature 1",
    ),
    "sampled tokens of data": (
        [*OFF_POLICY, TEACHER, "algorithm.loss={name: reverse_kl}"],
        "algorithm.loss.tokens",
        None,
        "the answers are data; set it, such as to 32",
    ),
    "a reverse divergence that the policy can avoid": (
        [*ON_POLICY, TEACHER, "algorithm.loss={name: mixed_kl, rest: unscaled}"],
        "algorithm.loss.rest",
        "unscaled",
        "use `one_outcome`, `zero` or `forward_kl`",
    ),
    "the rest of one token": (
        [*ON_POLICY, TEACHER, "algorithm.loss={name: reverse_kl, rest: zero}"],
        "algorithm.loss.rest",
        "zero",
        "the sampled token alone is compared; set tokens",
    ),
    "an estimate of a sum": (
        [*ON_POLICY, TEACHER, "algorithm.loss={name: reverse_kl, tokens: 8, estimator: k3}"],
        "algorithm.loss.estimator",
        "k3",
        "set tokens to null",
    ),
    "scaled logprobs that are clamped": (
        [*ON_POLICY, TEACHER, "algorithm.loss={name: forward_kl, min_logprob: -10}"],
        "algorithm.loss.min_logprob",
        -10.0,
        "set rest to `unscaled`",
    ),
    "a correction of top tokens": (
        [*ON_POLICY, TEACHER, "algorithm={loss: {name: jsd}, correction: {name: tis}}"],
        "algorithm.correction",
        {"name": "tis"},
        "it weighs the sampled token",
    ),
    "two teachers of the same key": (
        [*ON_POLICY, TWO, "teachers.prose.key=sums", "algorithm.teacher_key=of"],
        "teachers.sums.key",
        None,
        "teachers.prose has it too",
    ),
    "a task of two teachers": (
        [*ON_POLICY, TWO, "teachers.prose.key=[tales, sums]", "algorithm.teacher_key=of"],
        "teachers.sums.key",
        None,
        "teachers.prose has it too",
    ),
    "a teacher without tasks": (
        [*ON_POLICY, TWO, "teachers.prose.key=[]", "algorithm.teacher_key=of"],
        "teachers.prose.key",
        [],
        "it teaches no task; name a value",
    ),
    "two teachers of all other tasks": (
        [
            *(*ON_POLICY, TWO, "algorithm.teacher_key=of"),
            *("teachers.sums.default=true", "teachers.prose.default=true"),
        ],
        "teachers.prose.default",
        True,
        "teachers.sums teaches all other tasks",
    ),
    "other tasks of the only teacher": (
        [*ON_POLICY, TEACHER, "teachers.sums.default=true"],
        "teachers.sums.default",
        True,
        "no column names the teacher of a task",
    ),
    "minibatches that do not divide": (
        [*ON_POLICY, TEACHER, "algorithm.num_minibatches=7"],
        "algorithm.num_minibatches",
        7,
        "it must divide",
    ),
    "beta of another loss": (
        [*ON_POLICY, TEACHER, "algorithm.loss={name: forward_kl, beta: 0.5}"],
        "algorithm.loss.beta",
        0.5,
        "this field belongs to `jsd`, and algorithm.loss.name is `forward_kl`",
    ),
    "filtered samples to score": (
        [*ON_POLICY, TEACHER, "generation.sampling.top_p=0.9"],
        "generation.sampling.top_p",
        0.9,
        "the teacher's distribution has all tokens",
    ),
    "a fixed length for divergences": (
        [*ON_POLICY, TEACHER, "algorithm.aggregation=seq-mean-token-sum-norm"],
        "algorithm.aggregation",
        "seq-mean-token-sum-norm",
        "`on_policy_distillation` has no fixed length",
    ),
    "more votes than samples": (
        [VOTES, "algorithm.validation.cons_at_k=[4, 8]"],
        "algorithm.validation.cons_at_k",
        [4, 8],
        "cons@k requires 8 samples of each task, and there are 4",
    ),
    "a further set that shares tasks": (
        ["data.validation_sets={more: {name: arithmetic, digits: 2, size: 10}}"],
        "data.validation_sets.more.offset",
        0,
        "training uses tasks 0 to 999 of the same order; start at 1000",
    ),
    "a further set that nobody samples": (
        [
            "algorithm={name: dpo, num_steps: 10, batch_size: 8, validation: {period: 2}}",
            SETS,
        ],
        "data.validation_sets",
        ["hard"],
        "`dpo` samples nothing here",
    ),
    "a stop by what is not measured": (
        [STOP],
        "algorithm.early_stop.metric",
        "validation/accuracy",
        "only validation measures it; set algorithm.validation.period",
    ),
    "a stop by a set that is not there": (
        [STOP.replace("validation/", "validation/hrad/"), SETS, PERIOD],
        "algorithm.early_stop.metric",
        "validation/hrad/accuracy",
        "did you mean `validation/hard/accuracy`?",
    ),
    "a checkpoint by a vote that is not taken": (
        [PERIOD, "checkpointing.metric=validation/cons@4"],
        "checkpointing.metric",
        "validation/cons@4",
        "unknown metric of this run",
    ),
}

RIGHT: dict[str, list[str]] = {
    "on policy": [*ON_POLICY, TEACHER],
    "a teacher behind an endpoint": [*ON_POLICY, FAR, "algorithm.loss={name: jsd, tokens: 8}"],
    "without a reward": [*ON_POLICY, TEACHER, "rewards=[]"],
    "two teachers": [*OFF_POLICY, TWO, "algorithm.teacher_key=of"],
    "a teacher of several tasks, and of all others": [
        *(*ON_POLICY, TWO, "algorithm.teacher_key=of"),
        *("teachers.prose.key=[tales, poems]", "teachers.sums.default=true"),
    ],
    "a stop by a vote of a further set": [
        VOTES,
        SETS,
        STOP.replace("accuracy", "hard/cons@4_low"),
        "checkpointing.metric=validation/pass@1",
    ],
    "further sets alone": [PERIOD, SETS, "data.validation=null"],
}


@pytest.mark.parametrize(("overrides", "field", "value", "fix"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused(tmp_path: Path, overrides: list[str], field: str, value: Any, fix: str) -> None:
    found = {problem.field: problem for problem in problems_of(write(tmp_path), *overrides)}
    assert field in found, found
    assert fix in found[field].fix
    if value is not None:
        assert found[field].value == value


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT.keys())
def test_it_is_taken_and_read_again(tmp_path: Path, overrides: list[str]) -> None:
    experiment = load_experiment(write(tmp_path), overrides)
    again = load_experiment(write(tmp_path, to_yaml(experiment), "again.yaml"))
    assert again == experiment


def test_sets_have_metrics_of_their_own(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path), [VOTES, SETS])
    known = metric_names(experiment.algorithm, experiment.env, experiment.rewards, experiment.data)
    assert {
        "validation/hard/reward/exact_match",
        "validation/hard/cons@4_high",
        "validation/accuracy",
    } <= known
