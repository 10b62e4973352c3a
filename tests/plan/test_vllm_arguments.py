"""Arguments that are passed on to vLLM, against those that its source names."""

import subprocess
import sys

import pytest

from nemorl.generation.vllm_engine.plan import argument_problems, engine_arguments
from tests.plan.conftest import Configure
from tests.plan.test_vllm import VLLM, shape_of, vllm_problems
from tests.required import require_vllm


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("sed", 1, "have no such argument; did you mean seed?"),
        ("qqqqqqqq", 1, "have no such argument: leave it out"),
        ("seed", "x", "vLLM expects int"),
        ("enable_expert_parallel", 1, "vLLM expects bool"),
        ("block_size", True, "vLLM expects int | None"),
    ],
)
def test_what_vllm_does_not_take_is_refused(name: str, value: object, fix: str) -> None:
    require_vllm()
    (problem,) = argument_problems({name: value})
    assert (problem.field, problem.value) == (f"generation.vllm_kwargs.{name}", value)
    assert problem.fix.endswith(fix)


def test_what_vllm_takes_passes() -> None:
    taken = {"seed": 3, "block_size": None, "cpu_offload_gb": 1, "compilation_config": {"level": 0}}
    assert not list(argument_problems(taken))


def test_the_check_of_an_experiment_names_them(configure: Configure) -> None:
    require_vllm()
    experiment = configure(VLLM, "generation.vllm_kwargs={sed: 1}")
    found = vllm_problems(experiment, shape_of(experiment))
    assert [problem.field for problem in found] == ["generation.vllm_kwargs.sed"]


@pytest.mark.slow
def test_names_are_those_of_the_imported_class() -> None:
    require_vllm()
    program = (
        "import dataclasses; from vllm.engine.arg_utils import AsyncEngineArgs; "
        "print(*(field.name for field in dataclasses.fields(AsyncEngineArgs)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(told.stdout.splitlines()[-1].split()) == set(engine_arguments())
