"""Facts about an experiment that follow from several sections: its models and the metrics it produces."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .algorithm import AlgorithmConfig
from .algorithm.aligned import TEACHER_METRICS
from .algorithm.online import REFIT_METRICS
from .auxiliary import Teachers, auxiliary_models, used_models
from .data import DataConfig, DatasetConfig
from .environment import ActorPlacement, EnvBase, EnvConfig, Rewards, environments_in
from .experiment import Experiment
from .generation import GenerationConfig
from .policy import PolicyConfig


def datasets(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Each dataset on which a loss may be computed, with the path of its section."""
    yield from data.trained_on
    if data.validation is not None:
        yield "data.validation", data.validation


def acted_on(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """The datasets whose tasks the environment gets: offline algorithms train without it."""
    if algorithm.online:
        yield from data.trained_on
    yield from data.held_out


def server_sections(generation: GenerationConfig, rewards: Rewards, teachers: Teachers) -> dict[str, object]:
    """The sections that may name a server, by their path."""
    sections: dict[str, object] = {"generation": generation}
    sections |= {f"teachers.{name}": teacher for name, teacher in teachers.items()}
    return sections | {f"rewards.{index}": reward for index, reward in enumerate(rewards)}


def server_urls(generation: GenerationConfig, rewards: Rewards, teachers: Teachers) -> dict[str, str]:
    """The addresses of servers that workers send requests to, by field."""
    sections = server_sections(generation, rewards, teachers).items()
    urls = {
        f"{path}.{name}": getattr(one, name, "") for path, one in sections for name in ("base_url", "url")
    }
    for path, one in sections:
        urls |= {f"{path}.base_urls.{n}": url for n, url in enumerate(getattr(one, "base_urls", ()))}
    return {field: url for field, url in urls.items() if url}


def environment_sections(env: EnvConfig) -> dict[str, object]:
    """The sections of environments that may name a server, by their path."""
    sections: dict[str, object] = {}
    for path, one in environments_in(env):
        sections[path] = one
        parts = (name for name in ("placement", "opponent") if hasattr(one, name))
        sections |= {f"{path}.{name}": getattr(one, name) for name in parts}
    return sections


def environment_urls(env: EnvConfig) -> dict[str, str]:
    """The addresses of environments that are servers, that are behind one or that ask one, by field."""
    urls = {
        f"{path}.{name}": getattr(one, name, None)
        for path, one in environment_sections(env).items()
        for name in ("base_url", "url")
    }
    return {field: url for field, url in urls.items() if url}


def reward_weights(env: EnvConfig, rewards: Rewards) -> dict[str, float]:
    return env.reward_weights | {reward.metric: reward.weight for reward in rewards}


def reward_names(env: EnvConfig, rewards: Rewards) -> list[str]:
    """The name of each reward in metrics; a name that two rewards have is there twice."""
    return [*env.reward_weights, *(reward.metric for reward in rewards)]


def metric_names(
    algorithm: AlgorithmConfig,
    env: EnvConfig,
    rewards: Rewards,
    data: DataConfig | None = None,
    teachers: Iterable[str] = (),
) -> frozenset[str]:
    """Names of all metrics that a step of the run may have; without `data` those of `data.validation`."""
    names, several = set(algorithm.metrics), list(teachers)
    if algorithm.aligns_teachers and len(several) > 1:
        of_each = {f"teachers/{name}/{kind}" for name in several for kind in TEACHER_METRICS}
        names |= of_each
        names |= {f"validation/{name}" for name in of_each if algorithm.validation.scheduled}
    scored = reward_names(env, rewards)
    if algorithm.online:
        for kind in ("reward", "reward_std", "reward_absent"):
            names |= {f"{kind}/{name}" for name in scored}
        names |= {f"reward_{kind}/{reward.metric}" for reward in rewards for kind in reward.call_metrics}
        names |= {*env.metrics, *(f"players/{player}/reward" for player in env.players)}
    if algorithm.online and data is not None:
        names |= set(data.metrics)
    if algorithm.early_stop is not None:
        names.add("early_stop/waited")
    if algorithm.validation.scheduled and algorithm.generates:
        names |= {*REFIT_METRICS, "time/validation", "time/validation_wait"}
        sets = [] if data is None else [f"validation/{name}" for name in data.validation_sets]
        if data is None or data.validation is not None:
            sets.append("validation")
        for of_set in sets:
            names |= set(algorithm.validation.metrics(of_set, scored))
            names |= {f"{of_set}/players/{player}/reward" for player in env.players}
    return frozenset(names)


@dataclass(frozen=True)
class ModelSpec:
    """One model of a run and the group of processes that holds it."""

    name: str  # of the group
    section: str  # of the experiment, which messages name
    config: PolicyConfig
    trains: bool = True
    on_policy_devices: bool = False  # it shares the policy's devices in turn
    scores: bool = False  # a reward model, which every sampling run has


def group_name(path: str) -> str:
    """The process group of the model of the section at a path: `teacher_main` of `teachers.main`."""
    return path.replace("s.", "_")


@dataclass(frozen=True)
class EnvironmentActors:
    """Where an environment runs in actors."""

    name: str  # of the environment; empty of a single one
    config: EnvBase
    placement: ActorPlacement

    @property
    def group(self) -> str:
        """Name of the group of its processes."""
        return f"environment_{self.name}" if self.name else "environment"


def environment_actors(env: EnvConfig) -> list[EnvironmentActors]:
    return [
        EnvironmentActors(name, one, one.placement)
        for name, one in env.environments.items()
        if isinstance(one.placement, ActorPlacement)
    ]


def models_of(experiment: Experiment) -> tuple[ModelSpec, ...]:
    """All models, the policy first; a reference only if it has separate processes."""
    policy = experiment.policy
    models = used_models(experiment.algorithm, auxiliary_models(dict(experiment)))
    return (
        ModelSpec("policy", "policy", policy),
        *(
            ModelSpec(
                group_name(path),
                path,
                model.worker_config(policy),
                trains=path == "critic",
                on_policy_devices=model.devices == "policy",
                scores=path.startswith("rewards."),
            )
            for path, model in models.items()
        ),
    )
