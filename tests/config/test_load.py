from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment, to_yaml
from nemorl.config.policy import SgdConfig
from nemorl.errors import ABSENT, ConfigError, Problem
from tests.config.experiments import GRPO, problems_of, write


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    """Types, references, and the checks between the sections in which nothing else is wrong."""
    file = write(tmp_path, GRPO + "  max_stalness: 1\ncluster: {num_nodes: x}\nseed: ${nothing}\n")

    problems = problems_of(file, "generation.max_kv_tokens=8", "data.prompt_template=Think!")

    assert {problem.field: problem.value for problem in problems} == {
        "seed": "${nothing}",
        "algorithm.max_stalness": 1,
        "cluster.num_nodes": "x",
        "data.prompt_template": "Think!",
    }


def test_checks_of_sound_sections_are_made_next_to_a_broken_one(sound: Path) -> None:
    fields = [
        problem.field
        for problem in problems_of(sound, "logger.console=loud", "algorithm.num_minibatches=3", "seed=-1")
    ]

    assert sorted(fields) == ["algorithm.num_minibatches", "logger.console", "seed"]


def test_a_message_names_file_and_line_of_each_problem(tmp_path: Path) -> None:
    write(tmp_path, GRPO, "base.yaml")
    file = write(tmp_path, "defaults: base.yaml\npolicy:\n  layout: {data_parallel_size: 5}\n")

    with pytest.raises(ConfigError) as refused:
        load_experiment(file, ["generation.sampling.temperature=0"])

    assert (
        str(refused.value)
        == f"""\
{file}: 2 configuration errors
  policy.layout.data_parallel_size = 5  ({file}:3)
      it must divide the trajectories of an optimizer step; a step has 32 trajectories \
(4 prompts x 8 generations)
  generation.sampling.temperature = 0.0  (command line)
      greedy samples of a task are all the same, with nothing to learn from; set it to more than 0 \
(for validation 0 is allowed)"""
    )


def test_a_value_that_no_one_wrote_is_called_a_default(sound: Path) -> None:
    (problem,) = problems_of(sound, "policy.max_sequence_length=100000", "policy.micro_batch_tokens=100000")

    assert (problem.field, problem.value, problem.origin) == (
        "generation.max_kv_tokens",
        65536,
        "default",
    )


def test_a_field_left_out_points_to_its_section(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, GRPO.replace("  num_steps: 10\n", "")))

    assert (problem.field, problem.value) == ("algorithm.num_steps", ABSENT)
    assert problem.origin.endswith("experiment.yaml:15")


def test_further_checks_join_the_others(sound: Path) -> None:
    def disk(experiment: Experiment) -> list[Problem]:
        return [Problem("run_dir", str(experiment.run_dir), "the disk is full")]

    with pytest.raises(ConfigError) as refused:
        load_experiment(sound, ["algorithm.num_minibatches=3"], disk)

    assert [problem.field for problem in refused.value.problems] == [
        "run_dir",
        "algorithm.num_minibatches",
    ]
    assert refused.value.problems[0].origin == f"{sound}:1"


def test_references_are_refused_where_they_are(tmp_path: Path) -> None:
    file = write(tmp_path, GRPO.replace("runs/sums", "runs/${algorithm.num_steps}"))

    (problem,) = problems_of(file)

    assert (problem.field, problem.value) == ("run_dir", "runs/${algorithm.num_steps}")
    assert problem.origin == f"{file}:1"
    assert "not supported; write the value" in problem.fix
    (problem,) = problems_of(write(tmp_path), "run_dir=runs/${seed}")
    assert (problem.field, problem.value) == ("run_dir", "runs/${seed}")
    assert "${seed} are not supported" in problem.fix


def test_a_variant_is_changed_from_the_command_line(sound: Path) -> None:
    experiment = load_experiment(sound, ["policy.optimizer={name: sgd, lr: 1e-2}"])

    assert experiment.policy.optimizer == SgdConfig(name="sgd", lr=0.01)


def test_the_resolved_experiment_reads_back_the_same(sound: Path, tmp_path: Path) -> None:
    overrides = ["data.prompt_template='{prompt} costs $5 #1?'", "policy.optimizer.lr=1e-6", "seed=7"]
    experiment = load_experiment(sound, overrides)
    assert experiment.data.prompt_template == "{prompt} costs $5 #1?"

    again = load_experiment(write(tmp_path, to_yaml(experiment), "resolved.yaml"))

    assert again == experiment


@settings(max_examples=40, deadline=None)
@example(text="\x85")
@example(text="a\u2028\u2029b")
@given(text=st.text(min_size=1))
def test_any_text_survives_the_resolved_file(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("text")
    tree = yaml.safe_load(GRPO) | {"run_dir": str(folder)}
    tree["data"]["prompt_template"] = "{prompt}" + text
    experiment = Experiment.model_validate(tree)

    assert load_experiment(write(folder, to_yaml(experiment))) == experiment
