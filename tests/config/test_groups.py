"""Models next to the policy: what an experiment may say of them, and what is refused."""

from pathlib import Path

import pytest

from nemorl.config.algorithm.online import PRESETS
from nemorl.config.environment import LocalModelRewardConfig
from nemorl.config.facts import models_of
from nemorl.config.load import load_experiment, to_yaml
from tests.config.experiments import problems_of, write

PPO = ["algorithm.name=ppo"]
REFERENCE = ["algorithm.kl.coefficient=0.1"]


def paid(more: str) -> str:
    """By a reward model of the run."""
    return f"rewards=[{{kind: local_model, model_path: m, {more}}}]"


WRONG: dict[str, tuple[list[str], str, str]] = {
    "values without a critic": (
        [*PPO, "algorithm.critic=null"],
        "algorithm.critic",
        "the advantage `gae` needs the values of a critic",
    ),
    "values without a critic, which no name brings": (
        ["algorithm.advantage.name=gae"],
        "algorithm.critic",
        "set `algorithm.critic: {}`, or use `name: ppo`, or use the advantage `token_returns` or",
    ),
    "a critic that nobody asks": (
        [*PPO, "algorithm.advantage={name: group}"],
        "algorithm.critic",
        "the advantage `group` uses no values; set this to null, or use `gae`",
    ),
    "values of a policy": (
        ["policy.normalize_values=true"],
        "policy.normalize_values",
        "policy.head is lm, which computes no values; remove this",
    ),
    "a critic beside GRPO": (
        ["critic={devices: own}"],
        "critic",
        "`grpo` has no critic; remove this section, or use an algorithm such as `ppo`",
    ),
    "a reference that nobody asks": (
        ["reference={}"],
        "reference",
        "no reference is used; remove this section, or raise algorithm.kl.coefficient",
    ),
    "a lambda that is adapted": (
        ["algorithm.name=vapo", "algorithm.advantage.lam=0.9", "algorithm.critic.warmup_steps=2"],
        "algorithm.advantage.lam",
        "length_adaptive_alpha replaces it; remove this, or set that to null",
    ),
    "a critic that learns alone": (
        ["algorithm.name=vapo"],  # whose 50 steps of pre-training are more than the run's
        "algorithm.critic.warmup_steps",
        "the run has 10 steps",
    ),
    "more processes than devices": (
        [*PPO, "critic={devices: policy, layout: {tensor_parallel_size: 2}}"],
        "critic.layout",
        "the policy has devices for 1 process",
    ),
    "nobody to leave them to": (
        [*PPO, "critic={offload: {optimizer: true}}"],
        "critic.offload.optimizer",
        "devices is `own`, so nothing waits for them; set it to false",
    ),
    "copies that do not divide a step": (
        [*PPO, "critic={layout: {data_parallel_size: 3}}"],
        "critic.layout.data_parallel_size",
        "it must divide the trajectories of an optimizer step",
    ),
    "a pass too short": (
        [*REFERENCE, "reference={micro_batch_tokens: 32}"],
        "reference.micro_batch_tokens",
        "one pass must hold a complete conversation",
    ),
    "a rate that rises": (
        [*PPO, "critic={schedule: {name: linear, decay_steps: 9, min_lr: 1.0}}"],
        "critic.schedule.min_lr",
        "the rate decays to this from critic.optimizer.lr",
    ),
    "a reward model of more processes than devices": (
        [paid("devices: policy, layout: {tensor_parallel_size: 2}")],
        "rewards.0.layout",
        "the policy has devices for 1 process",
    ),
    "a reward model with nobody to leave them to": (
        [paid("offload: {weights: true}")],
        "rewards.0.offload.weights",
        "devices is `own`, so nothing waits for them; set it to false",
    ),
    "a reward model's pass too short": (
        [paid("micro_batch_tokens: 32, layout: {data_parallel_size: 3}")],  # three need not divide a step
        "rewards.0.micro_batch_tokens",
        "one pass must hold a complete conversation",
    ),
    "a reward model that stays where engines sample": (
        [
            *("generation={backend: vllm, colocated: true}", "cluster.gpus_per_node=1"),
            *(
                "policy.offload={weights: true, optimizer: true}",
                paid("devices: policy, offload: {weights: false}"),
            ),
        ],
        "rewards.0.offload.weights",
        "engines need the memory that this occupies; remove it",
    ),
    "a teacher that stays where engines sample": (
        [
            *("generation={backend: vllm, colocated: true}", "cluster.gpus_per_node=1"),
            "policy.offload={weights: true, optimizer: true}",
            *(
                "algorithm.name=on_policy_distillation",
                "teachers={main: {model_path: m, devices: policy, offload: {weights: false}}}",
            ),
        ],
        "teachers.main.offload.weights",
        "engines need the memory that this occupies; remove it",
    ),
    "nodes of a reward model that lives with the policy": (
        [paid("devices: policy"), "cluster.labels={reward_0: {zone: a}}"],
        "cluster.labels.reward_0",
        "it shares the policy's devices; name the nodes in cluster.labels.policy",
    ),
    "too few GPUs": (
        [*PPO, "cluster.gpus_per_node=2"],
        "cluster.gpus_per_node",
        "2 GPUs are too few for 1 policy process, 1 of auxiliary models and 1 engine",
    ),
}


@pytest.mark.parametrize(("overrides", "field", "fix"), WRONG.values(), ids=WRONG)
def test_it_is_refused(tmp_path: Path, overrides: list[str], field: str, fix: str) -> None:
    (problem,) = problems_of(write(tmp_path), *overrides)
    assert problem.field == field
    assert fix in problem.fix


def test_a_reward_model_does_not_score_where_the_policy_trains(tmp_path: Path) -> None:
    overrides = [paid("devices: policy"), "algorithm.max_staleness=1"]
    (problem,) = problems_of(write(tmp_path), *overrides)
    assert (problem.field, problem.value) == ("rewards.0.devices", "policy")
    assert (
        "with algorithm.max_staleness answers are scored while the policy trains; set it to own"
        in problem.fix
    )


@pytest.mark.parametrize("override", ["critic=null", "algorithm.name=ppo"], ids=["null", "left out"])
def test_a_critic_of_which_nothing_is_said_is_there(tmp_path: Path, override: str) -> None:
    _, critic = models_of(load_experiment(write(tmp_path), [*PPO, override]))
    assert (critic.name, critic.trains, critic.config.head) == ("critic", True, "scalar")


def test_the_fix_for_values_without_a_critic_is_sound(tmp_path: Path) -> None:
    gae = ["algorithm.advantage.name=gae", "algorithm.critic={}"]
    assert load_experiment(write(tmp_path), gae).algorithm.keeps_critic


def test_what_a_critic_does_not_say_is_as_the_policy_has_it(tmp_path: Path) -> None:
    experiment = load_experiment(
        write(tmp_path),
        [
            *PPO,
            *REFERENCE,
            "policy.layout={data_parallel_size: 2}",
            "policy.lora={rank: 4, alpha: 8}",
            "critic={layout: {tensor_parallel_size: 2}, optimizer: {lr: 0.001}, devices: policy}",
            "reference={model_path: models/other}",
            paid("devices: policy, offload: {weights: true}"),
        ],
    )
    policy, critic, reference, taste = models_of(experiment)
    assert (policy.name, critic.name, reference.name) == ("policy", "critic", "reference")
    assert critic.config.model_path == policy.config.model_path
    assert critic.config.head == "scalar"
    assert critic.config.layout.name == "TP2"
    assert critic.config.precision == "float32"
    assert critic.config.optimizer.lr == 0.001
    assert critic.config.lora is None
    assert critic.trains
    assert critic.on_policy_devices
    assert reference.config.model_path == Path("models/other")
    assert reference.config.layout.name == "DP2"
    assert reference.config.lora is None
    assert not reference.trains
    assert not reference.on_policy_devices
    assert (taste.name, taste.section, taste.config.layout.name) == ("reward_0", "rewards.0", "one process")
    assert taste.on_policy_devices
    assert taste.config.offload.weights
    assert (taste.config.head, taste.config.lora, taste.trains) == ("scalar", None, False)


@pytest.mark.parametrize("name", ["ppo", "vapo", "turn_gae", "bi_level_gae", "reinforce_plus_plus"])
def test_a_preset_alone_is_sound_and_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    assert name in PRESETS
    experiment = load_experiment(write(tmp_path), [f"algorithm.name={name}", "algorithm.num_steps=100"])
    again = load_experiment(write(tmp_path, to_yaml(experiment), "again.yaml"))
    assert again == experiment
    assert experiment.algorithm.keeps_critic == (name != "reinforce_plus_plus")


def test_what_colocated_engines_need_is_derived_and_shown_with_its_reason(tmp_path: Path) -> None:
    overrides = [
        *("generation={backend: vllm, colocated: true}", "cluster.gpus_per_node=1"),
        *("algorithm.name=ppo", "critic={devices: policy}", paid("devices: policy")),
    ]
    experiment = load_experiment(write(tmp_path), overrides)
    (reward,) = experiment.rewards[-1:]
    assert isinstance(reward, LocalModelRewardConfig)
    assert experiment.critic is not None

    assert (experiment.policy.offload.weights, experiment.policy.offload.optimizer) == (True, True)
    assert (experiment.critic.offload.weights, experiment.critic.offload.optimizer) == (True, True)
    assert (reward.offload.weights, reward.offload.optimizer) == (True, False)
    text = to_yaml(experiment)
    assert text.count("true  # follows from generation.colocated\n") == 5
    assert load_experiment(write(tmp_path, text, "resolved.yaml")) == experiment
    without_gpus = load_experiment(write(tmp_path), [*overrides, "cluster.gpus_per_node=0"])
    assert not without_gpus.policy.offload.weights
    (problem,) = problems_of(write(tmp_path), *overrides, "policy.offload.optimizer=false")
    assert (problem.field, problem.value) == ("policy.offload.optimizer", False)


def test_models_with_a_scalar_head_normalize_their_own_values(tmp_path: Path) -> None:
    """Neither a critic nor a reward model does it for the other."""
    for critic, reward in ((True, False), (False, True)):
        section = f"critic={{devices: policy, normalize_values: {str(critic).lower()}}}"
        overrides = [*PPO, section, paid(f"devices: policy, normalize_values: {str(reward).lower()}")]
        models = {
            model.name: model.config for model in models_of(load_experiment(write(tmp_path), overrides))
        }
        assert [models[name].normalize_values for name in ("policy", "critic", "reward_0")] == [
            False,
            critic,
            reward,
        ]
