"""Every preset works in an experiment unchanged, with what its description requires."""

from pathlib import Path

import pytest

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.online import PRESETS
from nemorl.config.load import load_experiment

AGENT = ["data.chat=true", "env={name: calculator, call_weight: 0.1}", "rewards=[]"]
# Fields that a preset requires in an experiment in addition to its name.
REQUIRED = {
    "dr_grpo": ["algorithm.loss.aggregation_length=8"],
    "gdpo": ["env.name=math"],
    "mt_grpo": AGENT,
    "turn_gae": AGENT,
    "bi_level_gae": AGENT,
    "starpo_s": AGENT,
    "reinforce_plus_plus": ["algorithm.kl.coefficient=0.01"],
    "vapo": ["algorithm.num_steps=100"],  # more than its critic's warm-up
    "clip_cov": ["algorithm.num_prompts_per_step=8"],
    "kl_cov": ["algorithm.num_prompts_per_step=8"],
}


def section(file: Path, name: str, *overrides: str) -> OnlineConfig:
    critic = ["critic={}"] if "critic" in PRESETS[name].settings else []
    algorithm = load_experiment(
        file, [f"algorithm.name={name}", *REQUIRED.get(name, []), *critic, *overrides]
    ).algorithm
    assert isinstance(algorithm, OnlineConfig)
    return algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_it_loads_with_its_settings(sound: Path, name: str) -> None:
    algorithm = section(sound, name)

    assert algorithm.name == name
    for part, values in PRESETS[name].settings.items():
        found = getattr(algorithm, part)
        for key, value in values.items() if isinstance(values, dict) else ():
            there = getattr(found, key)
            assert (
                (there.model_dump().items() >= value.items()) if isinstance(value, dict) else there == value
            )


def test_an_experiment_changes_single_settings_of_a_preset(sound: Path) -> None:
    algorithm = section(
        sound, "dapo", "algorithm.loss.clip_high=0.3", "algorithm.filters.refill.max_batches=4"
    )

    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.3)  # type: ignore[union-attr]
    assert algorithm.filters.drop_equal_rewards
    assert algorithm.filters.refill is not None
    assert algorithm.filters.refill.max_batches == 4


def test_an_experiment_takes_parts_of_a_preset_away(sound: Path) -> None:
    algorithm = section(sound, "dapo", "algorithm.filters.refill=null", "algorithm.advantage={name: opo}")

    assert algorithm.filters.refill is None
    assert algorithm.advantage.name == "opo"
    assert not algorithm.greedy_baseline
    assert section(sound, "remax").greedy_baseline


@pytest.mark.parametrize("name", ["reinforce", "remax", "ppo", "reinforce_plus_plus"])
def test_groups_of_one_are_for_those_that_compare_no_group(sound: Path, name: str) -> None:
    algorithm = section(sound, name, "algorithm.num_generations_per_prompt=1")

    assert algorithm.num_generations_per_prompt == 1
