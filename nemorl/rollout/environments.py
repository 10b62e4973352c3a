"""From the `env` section to the factory of its environments."""

from importlib import import_module

from nemorl.config.environment import EnvConfig
from nemorl.trajectories import EnvironmentFactory

# Imported when asked for: each brings its own libraries.
FACTORIES = {
    "single_turn": "nemorl.environments.single_turn:SingleTurnFactory",
    "math": "nemorl.environments.math_answers:MathFactory",
    "reasoning_gym": "nemorl.environments.reasoning_gym:ReasoningGymFactory",
    "calculator": "nemorl.environments.calculator:CalculatorFactory",
    "chained_sums": "nemorl.environments.chained_sums:ChainedSumsFactory",
}


def environment_factory(config: EnvConfig) -> EnvironmentFactory:
    """The factory of the environments that `config` describes."""
    module, _, name = FACTORIES[config.name].partition(":")
    factory: EnvironmentFactory = getattr(import_module(module), name)(config)
    return factory
