"""Changing the value of a mapped key changes the experiment; no rule is for a key that nothing reads."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemorl.algorithms.objective import kept
from nemorl.config.algorithm import NoCorrectionConfig
from nemorl.errors import ConfigError
from nemorl.importing.document import PROJECTS, checked, import_values, to_text
from nemorl.importing.rules import CannotImport, Origin, Part, apply
from tests.algorithms.packed import by_sequence, ragged
from tests.importing.contexts import (
    BASES,
    CONTEXTS,
    GROUPED,
    GRPO,
    MEGATRON,
    OFFLINE,
    OPENRLHF,
    OPTIONS,
    PPO_BASES,
    REFUSED,
    REMARKED,
    TRL,
    VERL,
    base_of,
    mapped,
)
from tests.importing.recipes import recipes

_C = "algorithm.rollout_correction"  # of verl


def tree(project: str, values: dict[str, Any]) -> dict[str, Any] | str:
    """The experiment, or why there is none."""
    rules = [rule for rule in PROJECTS[project].rules if isinstance(rule, Part)]
    try:
        return apply(rules, Origin(values, OPTIONS, PROJECTS[project].defaults), with_rows=False).tree
    except CannotImport as error:
        return str(error)


def others(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value * 2, value + 1, value / 2, 0)
        case str():
            yield f"{value}_x"
        case list():
            yield [*value, *value[:1]]
        case None:
            yield from (1, 0.5, "x", True, 2)


def distinct(values: list[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if value not in values[:place]]


def shown_by_recipes(project: str, key: str, examples: list[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """True if in some recipe, of which there are the values and the experiment, another value changes it."""
    default = PROJECTS[project].defaults.get(key)
    given = distinct([values[key] for values, _ in examples if key in values])[:8]
    for values, before in examples:
        if key not in values and given:
            continue
        now = values.get(key, default)
        for other in [*given, *others(now), *others(default)]:
            if other != now:
                after = tree(project, values | {key: copy.deepcopy(other)})
                if not isinstance(after, str) and after != before:
                    return True
    return False


@pytest.mark.parametrize("project", PROJECTS)
def test_every_mapped_key_changes_the_experiment(project: str) -> None:
    every = [TRL] if project == "trl" else list(recipes(project).values())
    trees = [(values, tree(project, values)) for values in every]
    examples = [(values, found) for values, found in trees if isinstance(found, dict)]
    others = REFUSED[project].keys() | REMARKED.get(project, {}).keys()
    unread = []
    for key in mapped(project):
        if key in others:
            continue
        if key in CONTEXTS[project]:
            base, first, second = CONTEXTS[project][key]
            one, two = (tree(project, base | {key: value}) for value in (first, second))
            assert isinstance(one, dict), f"{key}: {one}"
            assert isinstance(two, dict), f"{key}: {two}"
            assert one != two, key
        elif not shown_by_recipes(project, key, examples):
            unread.append(key)
    assert not unread, "nothing reads these keys, or their rule lists more than it reads"


# Keys of free text, of which no value has a wrong type before files and models are looked up.
_TEXT = (
    *("name", "path", "split", "project", "entity", "uri", "dir", "files", "file", "funcs", "modules"),
    *(
        "key",
        "subset",
        "model",
        "train",
        "validation",
        "template",
        "metric",
        "space_id",
        "config",
        "to",
        "logger",
    ),
    *(
        "quant_cfg",
        "adapter_path",
        "custom_dataloader",
        "rollout_rs",
        "*",
        "report_to",
        "url",
        "dataset",
        "optim",
        "key",
        "org",
        "group",
    ),
)


@pytest.mark.parametrize("project", PROJECTS)
def test_a_wrong_type_is_an_error_that_names_the_key(project: str, tmp_path: Path) -> None:
    silent = []
    for key in mapped(project):
        if key.endswith(_TEXT):
            continue
        base = CONTEXTS[project][key][0] if key in CONTEXTS[project] else base_of(project, key)
        base = next((found for start, found in PPO_BASES.items() if key.startswith(start)), base)
        if "policy.megatron_cfg." in key:
            base = MEGATRON | base
        try:
            found = import_values(PROJECTS[project], base | {key: "maybe"}, OPTIONS)
            checked(to_text(found, PROJECTS[project], "test"), tmp_path, Path("config"), found)
        except (CannotImport, ConfigError) as error:
            words = ("expected", "is not imported", "are not imported", "engines on")
            if key not in str(error) or not any(word in str(error) for word in words):
                silent.append(f"{key}: {error}")
        else:
            silent.append(key)
    assert not silent


_CORRECTED = GROUPED | {"algo.advantage.is_correction_enable": True}
_REINFORCE = OPENRLHF | {"algo.advantage.estimator": "reinforce", "algo.kl.init_coef": 0.0}
VALID = {
    "gspo": _CORRECTED | {"actor.policy_loss_type": "gspo", "algo.kl.use_loss": True},
    "seq-mask-tis": _CORRECTED | {"algo.advantage.is_correction_type": "seq-mask-tis"},
    "rloo": GROUPED | {"algo.advantage.estimator": "rloo"},
    "reinforce": _REINFORCE | {"algo.advantage.no_std_norm": True},
    "gae": OPENRLHF | {"critic.freezing_steps": 2},
    "asynchronous": GROUPED | {"train.async_enable": True, "train.partial_rollout_enable": True},
    "reward model": OPENRLHF | {"reward.remote_url": None, "reward.model_name_or_path": "org/rm"},
    "agent": GROUPED | {"train.agent_func_path": "agents/sums.py", "algo.dynamic_filtering_enable": True},
    "margins": OFFLINE["rm"] | {"model.margin_loss_enable": True},
    "log_exp": OFFLINE["rm"] | {"model.loss_type": "logexp"},
    "ipo": OFFLINE["dpo"] | {"model.ipo_enable": True, "eval.dataset": "org/x", "eval.steps": 5},
    "cdpo": OFFLINE["dpo"] | {"model.label_smoothing": 0.1, "model.nll_loss_coef": 0.1},
    "conversations": OFFLINE["sft"] | {"data.apply_chat_template": True, "data.input_key": "messages"},
}


def test_an_agent_of_openrlhf_has_the_turns_and_the_rewards() -> None:
    """OpenRLHF then asks no reward model, lets turns fill the sequence, and filters by the agent's scores."""
    given = GROUPED | {
        "train.agent_func_path": "agents/sums.py",
        "data.max_len": 4096,
        "rollout.max_new_tokens": 1024,
        "reward.model_name_or_path": "org/rm",
        "reward.stop_properly_penalty_coef": 0.5,
        "algo.dynamic_filtering_enable": True,
    }
    found = import_values(PROJECTS["openrlhf"], given, OPTIONS)
    assert found.tree["env"] == {"name": "openrlhf", "agent": "sums:AgentExecutor"}
    assert found.tree["rewards"] == []
    assert found.tree["generation"]["max_new_tokens"] == 4095
    assert found.tree["data"]["max_prompt_tokens"] == 3072
    assert found.tree["algorithm"]["filters"]["reward"] == "openrlhf_score"
    assert "truncated_reward" not in found.tree["algorithm"]
    rows = {row.key: (row.outcome, row.changes_result) for row in found.rows}
    assert rows["reward.model_name_or_path"] == rows["reward.remote_url"] == ("none", False)
    assert rows["train.agent_func_path"][0] == rows["rollout.max_new_tokens"][0] == "changed"
    critic = given | {"algo.advantage.estimator": "gae"}
    assert "model_path" not in import_values(PROJECTS["openrlhf"], critic, OPTIONS).tree["critic"]


@pytest.mark.parametrize("case", VALID)
def test_runs_of_openrlhf_that_no_script_shows_pass_the_checks(case: str, tmp_path: Path) -> None:
    """`checked` raises otherwise."""
    imported = import_values(PROJECTS["openrlhf"], VALID[case], OPTIONS)
    assert checked(to_text(imported, PROJECTS["openrlhf"], case), tmp_path, Path(case), imported)


@pytest.mark.parametrize("project", ["nemo-rl", "verl", "openrlhf"])
def test_values_without_counterpart_are_refused(project: str) -> None:
    for key, value in REFUSED[project].items():
        base = OFFLINE["sft"] if key == "optim" else base_of(project, key)
        why = tree(project, base | {key: value})
        assert isinstance(why, str), key
        assert key in why


@pytest.mark.parametrize("project", REMARKED)
def test_values_that_are_left_out_are_reported(project: str) -> None:
    base = BASES[project] | ({"algorithm.use_kl_in_reward": True} if project == "verl" else {})
    for key, value in REMARKED[project].items():
        (row,) = [one for one in import_values(PROJECTS[project], base | {key: value}).rows if one.key == key]
        assert row.changes_result, key
        assert row.note, key


def test_a_misspelling_in_a_section_of_ignored_keys_is_unknown() -> None:
    given = VERL | {"trainer.critc_warmup": 0, "trainer.device": "cuda"}
    rows = {row.key: row for row in import_values(PROJECTS["verl"], given).rows}
    assert (rows["trainer.critc_warmup"].outcome, rows["trainer.device"].outcome) == ("unknown", "none")
    assert rows["trainer.critc_warmup"].note == "did you mean critic_warmup?"


@pytest.mark.parametrize("value", ["$(pick_model)", "models/`hostname`"])
def test_the_output_of_a_command_is_no_value(value: str) -> None:
    why = tree("verl", VERL | {"actor_rollout_ref.model.path": value})
    assert isinstance(why, str)
    assert f"actor_rollout_ref.model.path = {value}: nothing is executed" in why


def test_scores_of_models_are_normalized_and_those_of_functions_are_not() -> None:
    """OpenRLHF subtracts a mean of the config.json of reward models, also from the values of a critic that
    starts from one."""
    normalized = {"reward.normalize_enable": True}
    model = normalized | {"reward.remote_url": None, "reward.model_name_or_path": "org/rm"}
    cases: list[tuple[dict[str, Any], str, bool, bool]] = [
        (normalized, "none", False, False),
        (model, "mapped", True, True),
        (model | {"critic.model_name_or_path": "org/critic"}, "changed", True, False),
        (model | {"algo.advantage.estimator": "reinforce"}, "mapped", True, False),
    ]
    for given, outcome, of_scores, of_values in cases:
        found = import_values(PROJECTS["openrlhf"], OPENRLHF | given, OPTIONS)
        (row,) = [one for one in found.rows if one.key == "reward.normalize_enable"]
        assert (row.outcome, row.changes_result) == (outcome, outcome == "changed")
        (reward,) = found.tree["rewards"]
        assert reward.get("normalize_values", False) == of_scores
        assert found.tree.get("critic", {}).get("normalize_values", False) == of_values


def test_keys_that_nemo_rl_does_not_read_lose_nothing() -> None:
    loaders = {"data.custom_dataloader": "a.b", "data.num_prompts_per_dataloader": 16}
    never = {
        "grpo.penalize_invalid_tool_call": True,
        "grpo.invalid_tool_call_strategy": "mask",
        "policy.megatron_cfg.train_iters": 1000,
        "teacher.hf_config_overrides.router_aux_loss_coef": 0.1,
    }
    for several in (False, True):
        given = {"data.use_multiple_dataloader": several} | loaders | never
        rows = {row.key: row for row in import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS).rows}
        lost = {"data.custom_dataloader"} if several else set()
        assert {key for key in given if rows[key].changes_result} == lost


def test_only_the_loss_of_nemo_rl_has_clamps_of_its_own() -> None:
    """A divergence in the reward is clamped to 10 there, its log ratios to 20."""
    given = {"loss_fn.kl_input_clamp_value": None, "loss_fn.kl_output_clamp_value": 5.0}
    for in_reward in (False, True):
        values = GRPO | given | {"loss_fn.use_kl_in_reward": in_reward}
        section = import_values(PROJECTS["nemo-rl"], values, OPTIONS).tree["algorithm"]["kl"]
        clamps = (section.get("max_log_ratio", 20.0), section["max_value"])
        assert clamps == ((20.0, 10.0) if in_reward else (None, 5.0))


def test_turns_that_nemo_rl_flags_have_its_advantages() -> None:
    """With its default texts; without an advantage its texts do nothing."""
    given: dict[str, Any] = {
        "grpo.invalid_tool_call_advantage": -5.0,
        "env.nemo_gym.thinking_tags": ["[THINK]"],
    }
    found = import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS)
    assert found.tree["algorithm"]["flagged_advantages"] == {"invalid_tool_call": -5.0}
    texts = ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"]
    assert found.tree["env"]["turn_flags"] == {"invalid_tool_call": {"texts": texts}}
    (row,) = [row for row in found.rows if row.key == "env.nemo_gym.thinking_tags"]
    assert (row.outcome, row.changes_result) == ("none", False)
    given["grpo.malformed_thinking_advantage"] = -4
    both = import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS)
    assert list(both.tree["algorithm"]["flagged_advantages"].items()) == [
        ("invalid_tool_call", -5.0),
        ("malformed_thinking", -4.0),
    ]
    assert both.tree["env"]["turn_flags"]["malformed_thinking"] == {
        "texts": ["[THINK]"],
        "max_in_reasoning": 1,
    }


@pytest.mark.parametrize(
    ("config", "section"),
    [
        ("NVFP4_DEFAULT_CFG", {"format": "nvfp4"}),
        ("quant_configs/nano3_nvfp4_default.yaml", {"format": "nvfp4", "ignore": True}),
        ("NVFP4_MLP_WEIGHT_ONLY_CFG", {"format": "nvfp4_w4a16", "ignore": True}),
    ],
)
def test_configs_of_modelopt_are_formats(config: str, section: dict[str, Any]) -> None:
    given = {"policy.quant_cfg": config, "policy.generation.quant_cfg": config}
    written = import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS).tree["policy"]["quantization"]
    assert written["train"] == "fake"
    assert written["format"] == section["format"]
    assert ("ignore" in written) == section.get("ignore", False)
    assert written.get("activations", False) == (section["format"] == "nvfp4")


def test_what_the_folder_of_the_model_needs_is_a_comment() -> None:
    """Rotary embeddings that a recipe changes, and weights that are not quantized."""
    rope = "policy.hf_config_overrides.rope_scaling"
    given = {f"{rope}.rope_type": "yarn", f"{rope}.factor": 2.0, "policy.dequantize_base_checkpoint": True}
    found = import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS)
    text = to_text(found, PROJECTS["nemo-rl"], "test")
    asked = 'set rope_scaling in config.json of a copy of this folder to {"rope_type": "yarn", "factor": 2.0}'
    assert f"model_path: org/model  # {asked}; " in text
    assert "name a copy of this folder with weights in bfloat16" in text
    assert {row.outcome for row in found.rows if row.key in given} == {"changed"}


@pytest.mark.parametrize(
    ("criteria", "thresholds", "is_kept"),
    [
        ("seq_mean_k1", "0.9_1.2", lambda logs: 0.9 <= math.exp(-sum(logs) / len(logs)) <= 1.2),
        ("seq_max_k2", "0.02", lambda logs: max(log**2 / 2 for log in logs) <= 0.02),
        (
            "seq_mean_k1,seq_max_k2",
            "0.9_1.2,0.02",
            lambda logs: (
                0.9 <= math.exp(-sum(logs) / len(logs)) <= 1.2 and max(log**2 / 2 for log in logs) <= 0.02
            ),
        ),
    ],
)
def test_rejected_sequences_are_those_of_verl(
    criteria: str, thresholds: str, is_kept: Callable[[list[float]], bool]
) -> None:
    """k1 is `-log r`, with bounds of its exponential; k2 is `log(r)^2 / 2`, with an upper bound."""
    values = VERL | {f"{_C}.rollout_rs": criteria, f"{_C}.rollout_rs_threshold": thresholds}
    found = tree("verl", values)
    assert isinstance(found, dict)
    section = found["algorithm"]["correction"]
    config = NoCorrectionConfig(**section)
    batch = ragged(6)
    assert batch.logprobs is not None
    assert batch.old_logprobs is not None
    expected = []
    for old, engine in zip(
        by_sequence(batch, batch.old_logprobs), by_sequence(batch, batch.logprobs), strict=True
    ):
        logs = [a - b for a, b in zip(old, engine, strict=True)]
        expected += [bool(logs) and is_kept(logs)] * len(logs)
    assert kept(batch, config)[batch.loss_mask].tolist() == expected
    assert 0 < sum(expected) < len(expected), "all or none are left out"


@pytest.mark.parametrize("do_sample", [True, False])
def test_validation_of_verl_is_sampled_by_its_temperature(do_sample: bool) -> None:
    """AgentLoopWorker.generate_sequences reads temperature, top_p and top_k, and never do_sample."""
    own = "actor_rollout_ref.rollout.val_kwargs"
    given = {"temperature": 1.0, "top_p": 0.7, "n": 4, "do_sample": do_sample}
    found = tree(
        "verl", VERL | {"trainer.test_freq": 5} | {f"{own}.{key}": one for key, one in given.items()}
    )
    assert isinstance(found, dict)
    section = found["algorithm"]["validation"]
    assert section["sampling"] == {"temperature": 1.0, "top_p": 0.7}
    assert section["num_generations_per_prompt"] == 4


def test_minibatches_of_verl_count_prompts() -> None:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    with pytest.raises(
        CannotImport, match=f"{key} = 6: the 16 prompts of a step are no multiple of it; change"
    ):
        import_values(PROJECTS["verl"], VERL | {"data.train_batch_size": 16, key: 6})


def test_minibatches_of_verl_divide_among_the_copies_of_the_policy() -> None:
    """16 GPUs with tensor parallelism of 2 have 8 copies; 4 prompts with 3 answers are 12 trajectories."""
    given = {
        "model_engine": "megatron",
        "trainer.n_gpus_per_node": 16,
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.n": 3,
        "data.train_batch_size": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    }
    why = tree("verl", VERL | given)
    assert isinstance(why, str)
    assert "ppo_mini_batch_size: 8 copies of the policy do not divide 12 trajectories" in why
    assert isinstance(tree("verl", VERL | given | {"actor_rollout_ref.rollout.n": 4}), dict)


def test_rejected_tokens_of_verl_are_bounds() -> None:
    """Next to weights that the bounds do not cut, or where the ratio of the loss is the weight."""
    rejected = {f"{_C}.rollout_rs": "token_k1", f"{_C}.rollout_rs_threshold": "0.5_2.5"}
    bounds = {"name": "icepop", "level": "token", "low": 0.4, "high": 2.0}
    weights = VERL | rejected | {f"{_C}.rollout_is": "token", f"{_C}.rollout_is_threshold": 2.0}
    bypass = VERL | rejected | {f"{_C}.bypass_mode": True, f"{_C}.loss_type": "ppo_clip"}
    for values, form in ((weights, {"divisor": "kept"}), (bypass, {"form": "bypass"})):
        found = tree("verl", values)
        assert isinstance(found, dict)
        assert found["algorithm"]["correction"] == bounds | form
    cut = import_values(PROJECTS["verl"], weights | {f"{_C}.rollout_is_threshold": 1.5}, OPTIONS)
    assert next(row for row in cut.rows if row.key == f"{_C}.rollout_rs").outcome == "none"


@pytest.mark.parametrize(
    ("criteria", "threshold", "problem"),
    [
        ("seq_mean_k1", "1.6_0.6", "rollout_rs_threshold = 1.6_0.6: for seq_mean_k1 expected bounds such as"),
        ("seq_mean_k1", "_1.6_", "expected bounds"),
        ("seq_max_k2", "1.0_2.5", "for seq_max_k2 expected an upper bound"),
        ("seq_max_k2", "abc", "for seq_max_k2 expected an upper bound"),
        ("seq_max_k2", None, "0 thresholds; expected one, or one for each of seq_max_k2"),
        ("seq_mean_k1,seq_max_k2", "0.9_1.1,2,3", "3 thresholds; expected one, or one for each of"),
        ("seq_mean_k4", "2", "rollout_rs = seq_mean_k4: unknown; expected some of token_k1"),
    ],
)
def test_rejections_that_verl_refuses_are_errors(criteria: str, threshold: str | None, problem: str) -> None:
    why = tree("verl", VERL | {f"{_C}.rollout_rs": criteria, f"{_C}.rollout_rs_threshold": threshold})
    assert isinstance(why, str)
    assert problem in why


def test_one_bound_of_verl_is_both() -> None:
    found = tree("verl", VERL | {f"{_C}.rollout_rs": "seq_mean_k1", f"{_C}.rollout_rs_threshold": 1.25})
    assert isinstance(found, dict)
    mask = found["algorithm"]["correction"]["sequence_mask"]
    assert mask == pytest.approx({"low": 0.8, "high": 1.25})
