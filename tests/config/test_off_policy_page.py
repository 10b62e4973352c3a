"""docs/off_policy.md against the schema."""

import re
from pathlib import Path

import pytest

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.environment import SingleTurnEnvConfig
from nemorl.config.facts import metric_names
from nemorl.config.load import load_experiment
from tests.config.experiments import GRPO, write

PAGE = (Path(__file__).parents[2] / "docs" / "off_policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_its_experiments_load(tmp_path: Path, block: str) -> None:
    write(tmp_path, GRPO, "base.yaml")
    load_experiment(write(tmp_path, f"defaults: [base.yaml]\n{block}"))


def test_its_metrics_are_those_that_runs_write() -> None:
    algorithm = OnlineConfig(
        name="kl_cov", num_steps=1, num_prompts_per_step=8, num_generations_per_prompt=8,
        correction={"name": "tis", "sequence_mask": {"low": 0.9, "high": 1.1}, "off_policy_threshold": 0.1},
    )  # fmt: skip
    clipped = algorithm.model_copy(update={"loss": OnlineConfig.model_fields["loss"].default})
    masked = OnlineConfig(
        name="grpo", num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=2,
        correction={"name": "mis"},
    )  # fmt: skip
    known = frozenset().union(
        *(metric_names(a, SingleTurnEnvConfig(), ()) for a in (algorithm, clipped, masked))
    )
    rows = PAGE.partition("| metric | meaning |\n")[2].partition("\n\n")[0]
    named: set[str] = set()
    for row in rows.splitlines()[1:]:
        stem = ""
        for name in re.findall(r"`([\w/]+)`", row.split("|")[1]):
            named.add(f"{stem}{name}" if name.startswith("/") else name)
            stem = stem if name.startswith("/") else name.partition("/")[0]
    assert named <= known
    prefixes = ("ratio/", "correction/", "clip_fraction/", "logprob_gap/", "selected", "kl/old")
    assert {name for name in known if name.startswith(prefixes)} <= named
