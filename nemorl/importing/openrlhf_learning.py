"""OpenRLHF's keys of what is trained: batches, advantages, losses, rewards, data and the length of a run."""

from pathlib import Path
from typing import Any

from .rules import CannotImport, Fields, Origin, not_imported
from .shared import UNBOUNDED, batch

KINDS = {"ppo_ray": "ppo", "sft": "sft", "dpo": "dpo", "rm": "reward_model"}
_EPOCHS = {"ppo_ray": 1, "sft": 2, "dpo": 1, "rm": 1}
_INSIDE = 1e-9  # makes the bounds of means exclusive, as OpenRLHF compares them
_ENDLESS = 1000  # batches that dynamic sampling may take


def kind(x: Origin) -> str:
    return str(x.get("trainer"))


def is_online(x: Origin) -> bool:
    return kind(x) == "ppo_ray"


def algorithm(x: Origin) -> Fields:
    if not is_online(x):
        name = KINDS[kind(x)]
        head = {"policy.head": "scalar"} if name == "reward_model" else {}
        return {"algorithm.name": name, "algorithm.batch_size": x.get("train.batch_size"), **head}
    members = x.get("rollout.n_samples_per_prompt")
    if members == 1 and estimator(x) in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        raise CannotImport("rollout.n_samples_per_prompt = 1: this estimator compares samples; take more")
    return {
        "algorithm.name": "ppo" if estimator(x) == "gae" else "grpo",
        "algorithm.num_prompts_per_step": x.get("rollout.batch_size"),
        "algorithm.num_generations_per_prompt": members,
        "algorithm.num_minibatches": updates(x),
        "algorithm.num_epochs": epochs(x),
    }


def epochs(x: Origin) -> int:
    return int(x.get("train.max_epochs", _EPOCHS[kind(x)]))


def estimator(x: Origin) -> str:
    return str(x.get("algo.advantage.estimator"))


def updates(x: Origin) -> int:
    """Minibatches of a step."""
    trajectories = x.get("rollout.batch_size") * x.get("rollout.n_samples_per_prompt")
    return batch(trajectories, x.get("train.batch_size"), "train.batch_size")


def rows(x: Origin) -> int:
    """Rows that are trained on: `--rows`, or as many as are taken at most."""
    most = x.values.get("data.max_samples")
    if x.options.rows is not None:
        return x.options.rows if most is None else min(int(most), x.options.rows)
    if most is None:
        problem = "the run ends after epochs, and the number of rows of its data is not known"
        raise CannotImport(f"{problem}; give --rows N")
    x.changed("data.max_samples", "taken for the number of rows; --rows N gives that", changes_result=False)
    return int(x.get("data.max_samples", 1))


def steps(x: Origin) -> int:
    if is_online(x):
        return max(int(rows(x) // x.get("rollout.batch_size") * x.get("train.num_episodes")), 1)
    return max(int(rows(x) // x.get("train.batch_size")) * epochs(x), 1)


def scheduled_updates(x: Origin) -> int:
    """Optimizer steps over which the rate of OpenRLHF decays."""
    if is_online(x):
        trained = rows(x) * x.get("rollout.n_samples_per_prompt") // x.get("train.batch_size")
        return max(int(trained * x.get("train.num_episodes") * epochs(x)), 1)
    return steps(x)


def num_steps(x: Origin) -> Fields:
    return {"algorithm.num_steps": steps(x)}


_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "group_norm", "dr_grpo", "rloo")


def advantage(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    name, gamma = estimator(x), x.get("algo.advantage.gamma")
    in_reward = x.get("algo.kl.init_coef") > 0 and not x.get("algo.kl.use_loss")
    unscaled = x.get("algo.advantage.no_std_norm")
    match name:
        case "gae":
            section: dict[str, Any] = {"name": "gae", "gamma": gamma, "lam": x.get("algo.advantage.lambd")}
            section["variance"] = "biased"
        case "reinforce" if unscaled and not in_reward and gamma == 1:
            section = {"name": "reinforce", "normalization": "mean", "over": "tokens"}
        case "reinforce":
            section = {"name": "token_returns", "gamma": gamma, "variance": "biased"}
        case "reinforce_baseline" if unscaled:
            section = {"name": "group", "normalize": False}
            x.changed("algo.advantage.no_std_norm", "the mean of the batch is not subtracted once more")
        case "reinforce_baseline":
            section = {"name": "group_then_batch", "over": "tokens", "variance": "biased"}
        case "group_norm":
            section = {"name": "group", "epsilon": 1e-9}
        case "dr_grpo":
            section = {"name": "group", "normalize": False}
        case "rloo":
            section = {"name": "group", "normalize": False, "leave_one_out": True}
        case _:
            raise not_imported("algo.advantage.estimator", name, "estimator", _ESTIMATORS)
    if unscaled and section["name"] in ("gae", "token_returns"):
        x.lost("algo.advantage.no_std_norm", "advantages are scaled, or neither shifted nor scaled")
    if in_reward and section["name"] in ("group", "group_then_batch"):
        how = (
            "subtracted from the reward before the group is compared; there from each token's return after it"
        )
        x.changed("algo.kl.init_coef", how)
    return {"algorithm.advantage": section}


def policy_loss(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    clip = x.get("actor.eps_clip")
    low, high = x.get("actor.eps_clip_low_high", [clip, clip])
    name = x.get("actor.policy_loss_type")
    section: dict[str, Any] = {"name": "clip", "clip_low": float(low), "clip_high": float(high)}
    match name:
        case "ppo":
            section["aggregation"] = "token-mean"
            if (dual := x.get("actor.dual_clip")) is not None:
                section["dual_clip"] = float(dual)
        case "gspo":
            section |= {"name": "gspo", "aggregation": "seq-mean-token-mean"}
            if x.get("actor.dual_clip") is not None:
                x.lost("actor.dual_clip", "GSPO has no dual clip here")
            if x.get("algo.kl.use_loss") or x.get("actor.entropy_coef"):
                how = "divergence and entropy are means over sequences, too; there over tokens"
                x.changed("actor.policy_loss_type", how)
        case _:
            raise not_imported("actor.policy_loss_type", name, "loss", ("ppo", "gspo"))
    return {"algorithm.loss": section}


def offline_loss(x: Origin) -> Fields:
    match kind(x):
        case "dpo":
            return _dpo(x)
        case "rm":
            name = x.get("model.loss_type")
            if name not in ("sigmoid", "logexp"):
                raise not_imported("model.loss_type", name, "loss", ("sigmoid", "logexp"))
            if name == "logexp":
                return {"algorithm.loss": {"name": "log_exp"}}
            margins = x.get("model.margin_loss_enable")
            section: dict[str, Any] = {"name": "bradley_terry"} | ({"margin_scale": 1.0} if margins else {})
            keys = {"data.train": {"margin_key": "margin"}} if margins else {}
            return {"algorithm.loss": section, **keys}
        case "sft" if x.get("model.pretrain_mode_enable"):
            return {"algorithm.train_on": "all"}
    return {}


def _dpo(x: Origin) -> Fields:
    section: dict[str, Any] = {"beta": x.get("model.beta")}
    if x.get("model.ipo_enable"):
        section |= {"name": "squared", "logprobs": "sum"}
    elif smoothing := x.get("model.label_smoothing"):
        section["label_smoothing"] = smoothing
    fields: dict[str, Any] = {"algorithm.loss": section}
    if weight := x.get("model.nll_loss_coef"):
        fields |= {"algorithm.sft_coefficient": weight, "algorithm.sft_aggregation": "seq-mean-token-mean"}
    return fields


def kl(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    coefficient, name = x.get("algo.kl.init_coef"), x.get("algo.kl.estimator")
    if coefficient <= 0:
        return {"algorithm.kl": {"coefficient": 0.0}}
    if not x.get("algo.kl.use_loss"):
        if name != "k1":
            x.changed("algo.kl.estimator", "k1 here: others have a wrong gradient in a reward")
        section = {"coefficient": coefficient, "estimator": "k1", "placement": "reward", "max_value": 10.0}
        return {"algorithm.kl": section}
    section = {"coefficient": coefficient, "estimator": name, "placement": "loss", "max_value": 10.0}
    if name == "k1":
        section["straight_through"] = True
        x.changed("algo.kl.estimator", "with the gradient of k2; that of k1 is 0 in expectation")
    return {"algorithm.kl": section}


def entropy(x: Origin) -> Fields:
    coefficient = x.get("actor.entropy_coef", 0.0)
    return {"algorithm.entropy.coefficient": coefficient} if is_online(x) and coefficient else {}


def correction(x: Origin) -> Fields:
    if not (is_online(x) and x.get("algo.advantage.is_correction_enable")):
        return {}
    low, high = map(float, x.get("algo.advantage.is_correction_threshold"))
    if x.get("actor.policy_loss_type") == "gspo":  # the ratio itself is to the engine's logprobs
        return {"algorithm.correction": {"form": "bypass"}}
    match x.get("algo.advantage.is_correction_type"):
        case "icepop":
            section: dict[str, Any] = {"name": "icepop", "low": low, "high": high}
        case "seq-mask-tis":
            section = {"name": "tis", "high": UNBOUNDED, "sequence_mask": {"low": low, "high": high}}
        case _:
            section = {"name": "tis", "low": low, "high": high}
    return {"algorithm.correction": section}


def filters(x: Origin) -> Fields:
    if not (is_online(x) and x.get("algo.dynamic_filtering_enable")):
        return {}
    low, high = map(float, x.get("algo.dynamic_filtering_range"))
    compared = {"reward": "openrlhf_score"} if has_agent(x) else {}
    return {
        "algorithm.filters": compared
        | {
            "min_mean_reward": low + _INSIDE,
            "max_mean_reward": high - _INSIDE,
            "refill": {"max_batches": _ENDLESS, "at_cap": "stop"},
        }
    }


def has_agent(x: Origin) -> bool:
    """True if an agent of the user's has the turns and the rewards; OpenRLHF then asks no reward model."""
    return is_online(x) and bool(x.get("train.agent_func_path"))


def rewards(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    if has_agent(x):
        module = Path(str(x.get("train.agent_func_path"))).stem
        env, found = {"name": "openrlhf", "agent": f"{module}:AgentExecutor"}, list[dict[str, Any]]()
        x.changed("train.agent_func_path", f"copy the file into the current folder as {module}.py")
        for key in ("remote_url", "model_name_or_path", "normalize_enable"):
            x.lost(f"reward.{key}", "the agent gives the rewards", changes_result=False)
    else:
        env, found = {"name": "single_turn"}, _scores(x)
    if (buffer := x.get("reward.overlong_buffer_len")) is not None:
        longest = x.get("rollout.max_new_tokens") or x.get("data.max_len", 2048)
        weight = x.get("reward.overlong_penalty_factor")
        arguments = {"max_length": longest, "buffer": int(buffer)}
        found.append({"function": "overlong_penalty", "weight": weight, "arguments": arguments})
    return {"env": env, "rewards": found}


def _scores(x: Origin) -> list[dict[str, Any]]:
    """Functions of the user's, or else reward models."""
    found: list[dict[str, Any]] = []
    if x.get("reward.model_name_or_path") is None:
        why = "only scores of reward models are shifted and scaled there, not those of functions"
        x.lost("reward.normalize_enable", why, changes_result=False)
    for url in split(x.get("reward.remote_url")):
        if not url.endswith(".py"):
            problem = "serve the model with `nemorl serve`, and give it as a reward (docs/reward_models.md)"
            raise CannotImport(f"reward.remote_url = {url}: {problem}")
        module = Path(url).stem
        found.append({"function": f"{module}:reward_func", "signature": "openrlhf"})
        x.changed("reward.remote_url", f"copy the file into the current folder as {module}.py")
    if not found:
        shared: dict[str, Any] = {"devices": "policy"}
        if x.get("reward.normalize_enable"):
            shared["normalize_values"] = True
        names = split(x.get("reward.model_name_or_path"))
        found = [{"kind": "local_model", "model_path": name, **shared} for name in names]
    if not found:
        raise CannotImport("reward.remote_url: give it or reward.model_name_or_path; the run has no reward")
    return found


def truncated_reward(x: Origin) -> Fields:
    """A coefficient from 0 on scales the reward; a negative one replaces it."""
    given = x.get("reward.stop_properly_penalty_coef")
    if not is_online(x) or given is None:
        return {}
    if has_agent(x):
        why = "OpenRLHF does not apply it to conversations of agents"
        x.lost("reward.stop_properly_penalty_coef", why, changes_result=False)
        return {}
    given = float(given)
    return {"algorithm.truncated_reward": {"value": given} if given < 0 else {"scale": given}}


def split(given: object) -> list[str]:
    """Names that are separated by commas."""
    return [] if given is None else [part.strip() for part in str(given).split(",")]


def asynchronous(x: Origin) -> Fields:
    if not (is_online(x) and x.get("train.async_enable")):
        return {}
    x.changed("train.async_queue_size", "versions of the weights; there batches that wait")
    on_update = "continue" if x.get("train.partial_rollout_enable") else "finish"
    return {"algorithm.max_staleness": x.get("train.async_queue_size"), "generation.on_update": on_update}


def data(x: Origin) -> Fields:
    online = is_online(x)
    name = x.get("data.prompt_dataset" if online else "data.dataset")
    key = "data.prompt_split" if online else "data.dataset_split"
    if name is None:
        name = "data/train.jsonl"
        x.note(name, "write the rows of the dataset here; the command names none")
    fields: dict[str, Any] = {
        "data.train": _dataset(x, str(name), x.get(key)),
        "data.chat": x.get("data.apply_chat_template"),
    }
    template = x.get("data.input_template", "User: {}\nAssistant: " if kind(x) == "sft" else None)
    if not x.get("data.apply_chat_template") and template is not None and "{}" in str(template):
        fields["data.prompt_template"] = str(template).replace("{}", "{prompt}")
    if template := x.get("data.tokenizer_chat_template"):
        if x.options.template is None:
            x.lost("data.tokenizer_chat_template", "with -o OUT it is written into a file next to it")
        else:
            fields["policy.tokenizer.chat_template"] = x.options.template
            x.files[x.options.template] = str(template)
    if (held_out := x.get("eval.dataset")) is not None and validation(x):
        split = x.get("eval.split", "test" if kind(x) == "dpo" else "train")
        fields["data.validation"] = _dataset(x, str(held_out), split, limited=False)
    return fields


def _dataset(x: Origin, path: str, split: str, *, limited: bool = True) -> dict[str, Any]:
    if "," in path:
        first = path.split(",")[0]
        x.changed("data.dataset", f"{first}, the first of several; write them as a mixture (docs/data.md)")
        path = first
    if kind(x) in ("dpo", "rm"):
        keys: dict[str, Any] = {"name": "preference", "prompt_key": x.get("data.prompt_key")}
        keys |= {"chosen_key": x.get("data.chosen_key"), "rejected_key": x.get("data.rejected_key")}
    elif kind(x) == "sft" and _is_conversation(x):
        keys = {"name": "conversations", "messages_key": x.get("data.input_key", "input")}
        if not x.get("data.multiturn", False):
            x.changed("data.input_key", "every turn of the assistant is trained on; there the last one")
    else:
        answer = "data.label_key" if is_online(x) else "data.output_key"
        keys = {"name": "tasks", "prompt_key": x.get("data.input_key", "input"), "answer_key": x.get(answer)}
    if path.endswith((".jsonl", ".json", ".parquet")):
        return {**keys, "path": path}
    most = x.values.get("data.max_samples") if limited else None
    return {**keys, "path": path, "split": split if most is None else f"{split}[:{most}]"}


def _is_conversation(x: Origin) -> bool:
    """True if the rows of SFT are messages, of which the last one may be the only answer."""
    whole = x.get("data.output_key") is None and x.get("data.apply_chat_template")
    return bool(whole or x.get("data.multiturn", False))


def validation(x: Origin) -> dict[str, Any]:
    period = x.get("eval.steps")
    if period <= 0 or x.get("eval.dataset") is None:
        return {}
    section: dict[str, Any] = {"period": period}
    if not is_online(x):
        return section | ({"generate": False} if kind(x) == "sft" else {})
    samples, temperature = x.get("eval.n_samples_per_prompt"), x.get("eval.temperature")
    section["sampling"] = {"temperature": temperature}
    if samples > 1 and temperature > 0:
        section |= {"num_generations_per_prompt": samples, "pass_at_k": [1, samples]}
    return section


def validated(x: Origin) -> Fields:
    section = validation(x)
    return {"algorithm.validation": section} if section else {}
