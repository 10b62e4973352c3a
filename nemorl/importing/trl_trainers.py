"""TRL's trainers: which one a YAML, a script or a Python file starts, and with what arguments.

Keys decide for a config without a command.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .rules import CannotImport
from .sources import options_of, read_command, read_text, read_yaml, resolved

# Config classes of the trainers that are imported, by the names of TRL's commands.
IMPORTED = {
    "grpo": "GRPOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "reward": "RewardConfig",
    "kto": "KTOConfig",
}

_MODEL = "activation_offloading dataset_num_proc max_length "
_REFERENCE = "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model disable_dropout beta "
_PRECOMPUTED = "precompute_ref_log_probs precompute_ref_batch_size router_aux_loss_coef loss_type "
_SAMPLED = """
beta cache_implementation chat_template_kwargs disable_dropout ds3_gather_for_generation generation_kwargs
log_completions log_unique_prompts max_completion_length min_p num_completions_to_print repetition_penalty
shuffle_dataset temperature top_k top_p use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_group_port vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
"""
_ONLINE = f"""{_SAMPLED} {_REFERENCE}
epsilon epsilon_high generation_batch_size log_multimodal mask_truncated_completions num_generations
num_generations_eval num_iterations reward_funcs reward_model_name_or_path reward_weights router_aux_loss_coef
steps_per_generation transformers_continuous_batching_config use_transformers_continuous_batching
use_transformers_paged
"""
_GRPO = f"""{_ONLINE}
cast_lm_head_to_fp32 delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
importance_sampling_level log_completions_hub_repo loss_type max_tool_calling_iterations
multi_objective_aggregation off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos scale_rewards
top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg
vespo_lambda_pos vllm_importance_sampling_cap vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min vllm_importance_sampling_correction vllm_importance_sampling_mode
"""
_SFT = f"""{_MODEL}
assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_text_field eos_token
eval_packing loss_type packing packing_strategy pad_token padding_free router_aux_loss_coef shuffle_dataset
truncation_mode
"""
_DPO = f"""{_MODEL} {_REFERENCE} {_PRECOMPUTED}
discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights pad_token
padding_free truncation_mode use_weighting
"""
_DISTILLATION = f"""{_SAMPLED}
max_tool_calling_iterations teacher_model_init_kwargs teacher_model_name_or_path teacher_model_revision
"""
# Keys that not every trainer has, by the trainer (TRL 1.16).
OWN: dict[str, frozenset[str]] = {
    "sft": frozenset(_SFT.split()),
    "dpo": frozenset(_DPO.split()),
    "kto": frozenset(f"{_MODEL} {_REFERENCE} {_PRECOMPUTED} desirable_weight undesirable_weight".split()),
    "reward": frozenset(
        f"{_MODEL} center_rewards_coefficient chat_template_path disable_dropout eos_token pad_token".split()
    ),
    "grpo": frozenset(_GRPO.split()),
    "rloo": frozenset(f"{_ONLINE} normalize_advantages reward_clip_range".split()),
    "distillation": frozenset(_DISTILLATION.split()),
}
_FORMER = {"max_seq_length": "sft", "rpo_alpha": "dpo", "reference_free": "dpo"}  # of earlier versions
_LOSSES = {  # values of `loss_type`
    "sft": ("nll", "dft", "chunked_nll"),
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
        *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "luspo"),
}

_SIZES = "num_processes", "num_machines"  # of `accelerate launch`, which `trl` takes as well
_TORCHRUN = {"nproc_per_node": "num_processes", "nnodes": "num_machines"}
_BUILT_IN = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"), 8)
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "python", "python3")
_ALIASES = {"r": "lora_r", "target_modules": "lora_target_modules"}  # of LoraConfig


def read(file: Path) -> dict[str, Any]:
    """The arguments of a YAML of `trl NAME --config`, of a script with its command line, or of a config.

    The key `trainer` has the name of the command. Raises CannotImport.
    """
    folder = file.parent
    if file.suffix == ".py":
        return _of_python(file)
    if file.suffix in (".yaml", ".yml"):
        return _launched(_of_yaml(file), folder)
    text = read_text(file)
    starts = any(word in _LAUNCHERS for word in text.split())
    words = read_command(text, find=_launch_command) if starts else text.replace("\\\n", " ").split()
    return _from_words(words, folder)


def _of_yaml(file: Path) -> dict[str, Any]:
    tree = resolved(read_yaml(file), str(file))
    tree.pop("env", None)
    return tree


def _launch_command(words: list[str]) -> list[str]:
    """The words from a launcher on, if they start a script or `trl NAME`."""
    for place, word in enumerate(words):
        if word in _LAUNCHERS and (word == "trl" or any(_is_script(one) for one in words[place:])):
            return words[place:]
    return []


def _is_script(word: str) -> bool:
    return word.endswith(".py") or word.startswith("trl.scripts.")


def _from_words(words: list[str], folder: Path) -> dict[str, Any]:
    """The arguments of a command: of its launcher, of its `--config`, and its own, which win."""
    ends = [place for place, word in enumerate(words) if _is_script(word) or word == "trl"]
    end = ends[0] if ends else 0
    before, after = words[:end], words[end + 1 :] if ends else words
    tree = {_TORCHRUN.get(key, key): value for key, value in options_of(before).items()}
    known = (*_SIZES, "config_file")
    tree = {key: value for key, value in tree.items() if key in known}
    if "torchrun" in before and "num_processes" in tree:
        tree["num_processes"] *= tree.get("num_machines", 1)
    name = Path(words[end]).stem.removeprefix("trl.scripts.") if ends else ""
    if name == "trl":
        name = after[0] if after else ""
    if name not in IMPORTED and (name in (*OWN, "gkd") or "trl" in words[end : end + 1]):
        listed = ", ".join(IMPORTED)
        raise CannotImport(f"trl {name}: this trainer is not imported; those that are: {listed}")
    own = options_of(after)
    if config := own.pop("config", None):
        tree |= _of_yaml(_near(str(config), folder))
    tree |= own
    if not tree:
        raise CannotImport("the command has no options such as --model_name_or_path; give the config as YAML")
    if name in IMPORTED:
        tree["trainer"] = name
    return _launched(tree, folder)


def _near(name: str, folder: Path) -> Path:
    """A file that a script names, from the current folder or from the script's."""
    found = [path for path in (Path(name), folder / name) if path.is_file()]
    if not found:
        raise CannotImport(f"{name}: there is no such file here or in {folder}; put it next to the script")
    return found[0]


def _launched(tree: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments with the number of processes and machines of accelerate's config."""
    config = tree.pop("accelerate_config", None) or tree.pop("config_file", None)
    if config in _BUILT_IN:
        return {"num_processes": _BUILT_IN[config]} | tree
    if config is None:
        return tree
    launch = resolved(read_yaml(_near(str(config), folder)), str(config))
    return {key: launch[key] for key in _SIZES if launch.get(key) is not None} | tree


def _of_python(file: Path) -> dict[str, Any]:
    """The literal keyword arguments of configs and trainers; nothing is executed."""
    tree: dict[str, Any] = {}
    try:
        module = ast.parse(read_text(file))
    except SyntaxError as error:
        raise CannotImport(f"{file}:{error.lineno}: this is no Python: {error.msg}") from error
    found: dict[str, None] = {}
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        kind = next((one for one, config in IMPORTED.items() if name in (config, _trainer(config))), None)
        if kind is None and name != "LoraConfig":
            continue
        if kind is not None:
            found[kind] = None
        for argument in node.keywords:
            try:
                value = ast.literal_eval(argument.value)
            except ValueError:
                continue
            key = str(argument.arg)
            tree[_ALIASES.get(key, key) if name == "LoraConfig" else key] = value
        if name == "LoraConfig":
            tree["use_peft"] = True
    if not found:
        listed = ", ".join(IMPORTED.values())
        raise CannotImport(f"{file}: there is no call of {listed}; other trainers are not imported")
    if len(found) > 1:
        raise CannotImport(f"{file}: there are calls of {', '.join(found)}; give a file with one of them")
    return {"trainer": next(iter(found)), **tree}


def _trainer(config: str) -> str:
    """The trainer of a config class: `SFTTrainer` of `SFTConfig`."""
    return config.replace("Config", "Trainer")


def trainer_of(values: Mapping[str, Any], given: str | None = None) -> str:
    """The name of the trainer: `given`, that of the command or class, or the only one that has all keys.

    Raises CannotImport if several have them, or if the trainer is not imported.
    """
    named = values.get("trainer")
    if given and named and given != named:
        raise CannotImport(f"--trainer {given}: the file starts {named}; leave the option out")
    name = given or named or _by_keys(values)
    if name not in IMPORTED:
        listed = ", ".join(IMPORTED)
        raise CannotImport(f"trl {name}: this trainer is not imported; those that are: {listed}")
    return str(name)


def _by_keys(values: Mapping[str, Any]) -> str:
    having = {
        key: {name for name, own in OWN.items() if key in own or _FORMER.get(key) == name} for key in values
    }
    deciding = {key: names for key, names in having.items() if names}
    if loss := values.get("loss_type"):
        kinds = loss if isinstance(loss, list) else [loss]
        found = {name for name, known in _LOSSES.items() if all(kind in known for kind in kinds)}
        if found:
            deciding["loss_type"] = found
    fitting = set(OWN).intersection(*deciding.values())
    if len(fitting) == 1:
        return fitting.pop()
    if not deciding:
        raise CannotImport(f"no key decides which of TRL's trainers this is for; {_ask(IMPORTED)}")
    if not fitting:
        listed = "; ".join(f"{key}: {', '.join(sorted(names))}" for key, names in sorted(deciding.items()))
        raise CannotImport(f"no trainer of TRL has all of these keys; {_ask(IMPORTED)} ({listed})")
    fewest = min(len(names) for names in deciding.values())
    keys = sorted(key for key, names in deciding.items() if len(names) == fewest)
    problem = f"{', '.join(keys)}: TRL's trainers {', '.join(sorted(fitting))} have all keys of this config"
    raise CannotImport(f"{problem}; {_ask(fitting)}")


def _ask(names: Iterable[str]) -> str:
    found = set(names)
    imported = [name for name in IMPORTED if name in found]
    return f"give --trainer {'|'.join(imported)}" if imported else "none of them is imported"
