"""NeMo-RL's sections of algorithms: which one a config has, and what several have in common."""

from collections.abc import Sequence
from typing import Any

from .rules import CannotImport, Origin

KINDS = {
    "grpo": "grpo",
    "ppo": "ppo",
    "distillation": "on_policy_distillation",
    "sft": "sft",
    "dpo": "dpo",
    "rm": "reward_model",
}
REWARDED = ("grpo", "ppo")  # what sections of the two have in common has the same meaning
ONLINE = (*REWARDED, "distillation")  # sections of algorithms that sample
WEIGHTS = "grpo.adv_estimator.reward_weights"
MEGATRON = "policy.megatron_cfg"
TEACHERS = "teachers"  # a list, of texts whose tokens are aligned with those of each
ABSENT = {"token_aligner": "distillation between tokenizers by an aligner's settings"}


def kind(x: Origin) -> str:
    """The section of the algorithm. Raises CannotImport for one without counterpart."""
    for name, what in ABSENT.items():
        if x.has_section(name) or (name in x.values and x.values[name] is not None):
            raise CannotImport(f"{name}: {what} is not imported; docs/moving_in.md names what is")
    found = [name for name in KINDS if x.has_section(name)]
    if len(found) != 1:
        raise CannotImport(f"the config has none of the sections {', '.join(KINDS)}; is it NeMo-RL's?")
    return found[0]


def aligns(x: Origin) -> bool:
    """True if teachers with tokens of their own read texts (x_token); nothing is sampled."""
    return kind(x) == "distillation" and bool(x.values.get(TEACHERS))


def distills(x: Origin) -> bool:
    """True if a teacher scores samples."""
    return kind(x) == "distillation" and not aligns(x)


def has_agents_teachers(x: Origin) -> bool:
    """True for MOPD (arXiv 2601.02780): GRPO's loop, whose advantages are of a teacher for each agent."""
    return kind(x) == "grpo" and x.get("grpo.adv_estimator.name") == "opd"


def is_online(x: Origin) -> bool:
    """True if training itself samples."""
    return kind(x) in ONLINE and not aligns(x)


def has_rewards(x: Origin) -> bool:
    """True if samples are compared by their rewards, or would be by another estimator."""
    return kind(x) in REWARDED


def of_online(*names: str) -> tuple[str, ...]:
    """Keys that the sections of all algorithms that sample have in common."""
    return tuple(f"{section}.{name}" for section in ONLINE for name in names)


def of_rewarded(*names: str) -> tuple[str, ...]:
    """Keys that the sections of GRPO and PPO have in common."""
    return tuple(f"{section}.{name}" for section in REWARDED for name in names)


def get(x: Origin, name: str, default: Any = None) -> Any:
    """A value of the algorithm's section."""
    return x.get(f"{kind(x)}.{name}", default)


def reward_weights(x: Origin, names: Sequence[str]) -> dict[str, float]:
    """Weights of several rewards by name, given in the order of the names; 1 where there are none."""
    weights = x.get(WEIGHTS) or [1.0] * len(names)
    if len(weights) != len(names):
        raise CannotImport(f"{WEIGHTS} = {weights}: expected {len(names)}, of {', '.join(names)}")
    return dict(zip(names, map(float, weights), strict=True))
