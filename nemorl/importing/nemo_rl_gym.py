"""NeMo-RL's environments of NeMo-Gym: their rows and rewards, and a file from which their servers start."""

from pathlib import Path
from typing import Any

import yaml

from .nemo_rl_sections import reward_weights
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule

ENVIRONMENT = "nemo_gym"
_SECTION = f"env.{ENVIRONMENT}"
_HEAD = "http://127.0.0.1:11000"  # of NeMo-Gym's head server by default
_ROWS = "nemorl.environments.nemo_gym:rows"
AGENT = "agent"  # the column of its tasks with the name of their agent
# NeMo-RL starts the servers with these, and reads the others itself.
_STARTING = (
    *("port_range_low", "port_range_high", "num_gpu_nodes", "is_trajectory_collection", "use_absolute_ip"),
    *("skip_venv_if_present", "uv_venv_dir", "uv_cache_dir"),
)
_FLAGS = ("invalid_tool_call_patterns", "thinking_tags")  # of turns, which are not the servers'
_MODEL = "policy_model"  # the server of the policy, in whose place nemorl has one of its own
# Rewards of the resources servers that answer with several, sorted, as NeMo-RL's weights are.
_COMPONENTS = {"example_tool_call_multireward": ("correctness", "format", "schema_valid")}
_TEMPLATE_ARGUMENTS = (
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.default_chat_template_kwargs",
    f"{_SECTION}.{_MODEL}.responses_api_models.vllm_model.chat_template_kwargs",
    f"{_SECTION}.{_MODEL}.responses_api_models.vllm_model.extra_body.chat_template_kwargs",
)
_ARGUMENTS = ("enable_thinking", "truncate_history_thinking", "force_nonempty_content")


def is_used(x: Origin) -> bool:
    return bool(x.get("env.should_use_nemo_gym", False))


def rows(path: str) -> dict[str, Any]:
    """A dataset of a file with NeMo-Gym's rows."""
    return {"name": "generator", "function": _ROWS, "arguments": {"path": path}, "answer_key": None}


def environment(x: Origin) -> Fields:
    """Each row names its agent, whose address the head server knows."""
    x.note(_HEAD, "the head server of NeMo-Gym's servers; docs/moving_in.md says how they are started")
    _write_servers(x)
    fields: dict[str, Any] = {"env.name": ENVIRONMENT, "env.url": _HEAD, "env.url_of": "head"}
    masked = "env.should_mask_flagged_samples"
    if masked in x.values:
        fields["env.skip_flagged"] = x.get(masked, True)
        if x.get(masked, True):
            how = "flagged samples are sampled once more and then left out"
            x.changed(masked, f"{how}; there they count in the baseline of their group")
    if x.get("grpo.adv_estimator.name") == "gdpo":
        fields["env.components"] = _components(x)
    return fields


def _components(x: Origin) -> dict[str, float]:
    servers = [Path(path).parent.parent.name for path in x.get(f"{_SECTION}.config_paths") or ()]
    names = next((_COMPONENTS[server] for server in servers if server in _COMPONENTS), None)
    if names is None:
        problem = f"the rewards of {', '.join(servers) or 'its servers'} are not known by name"
        raise CannotImport(f"grpo.adv_estimator.name = gdpo: {problem}, which GDPO compares one by one")
    return reward_weights(x, names)


def _write_servers(x: Origin) -> None:
    """The section as a configuration of NeMo-Gym, next to the experiment if that is written to a file."""
    own = {*_STARTING, *_FLAGS, "config_paths", "effort_levels", _MODEL}
    servers = {name: value for name, value in x.below(_SECTION).items() if name not in own}
    if servers and x.options.template is not None:
        path = str(Path(x.options.template).with_suffix(".nemo_gym.yaml"))
        x.files[path] = yaml.safe_dump(servers, sort_keys=False, allow_unicode=True, width=110)


def template_arguments(x: Origin) -> Fields:
    """Of the chat template, as the policy's servers are given them; the agents' own come last."""
    if not is_used(x):
        return {}
    return {
        f"policy.tokenizer.template_arguments.{name}": x.get(f"{section}.{name}", False)
        for section in _TEMPLATE_ARGUMENTS
        for name in _ARGUMENTS
        if x.values.get(f"{section}.{name}") is not None
    }


_SHAPING = f"{_SECTION}.effort_levels"
GYM_RULES: tuple[Rule, ...] = (
    Part(
        tuple(f"{section}.{name}" for section in _TEMPLATE_ARGUMENTS for name in _ARGUMENTS),
        ("policy.tokenizer.template_arguments",),
        template_arguments,
    ),
    Lost(
        tuple(f"{section}.*" for section in _TEMPLATE_ARGUMENTS),
        "write it into policy.tokenizer.template_arguments",
    ),
    Lost((f"{_SHAPING}.low_string",), "give a function in `rewards` that adjusts the reward", (None, "")),
    Ignored((f"{_SHAPING}.*",), "of env.nemo_gym.effort_levels.low_string"),
    Ignored(tuple(f"{_SECTION}.{name}" for name in _STARTING), "how NeMo-RL starts the servers"),
    Ignored((f"{_SECTION}.{_MODEL}.*",), "of its model server; examples/nemo_gym has nemorl's"),
    Ignored(
        (f"{_SECTION}.*",),
        "of the servers, which ng_run starts: with `-o OUT` their settings are written to OUT.nemo_gym.yaml",
    ),
    Ignored(
        ("policy.generation.vllm_cfg.http_server_serving_chat_kwargs.*",),
        "the chat template says how calls and reasoning are written",
    ),
)
