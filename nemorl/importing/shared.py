"""What the origins have in common: devices and replicas, public datasets, the length of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from typing import Any

from .rules import CannotImport, Fields, Origin

UNBOUNDED = 1e9  # a bound that no ratio reaches, since their logarithm is clamped to 20


@dataclass(frozen=True)
class PublicData:
    """A dataset on the hub that recipes name, with the rows of its card."""

    path: str
    split: str
    rows: int
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    subset: str | None = None

    def section(self, split: str | None = None) -> dict[str, Any]:
        keys = {"prompt_key": self.prompt_key, "answer_key": self.answer_key}
        subset = {} if self.subset is None else {"subset": self.subset}
        return {"name": "tasks", "path": self.path, "split": split or self.split, **subset, **keys}


_TRUTH = "reward_model.ground_truth"
PUBLIC = {
    "OpenMathInstruct-2": PublicData(
        "nvidia/OpenMathInstruct-2", "train_1M", 1_000_000, "problem", "expected_answer"
    ),
    "DAPOMath17K": PublicData("BytedTsinghua-SIA/DAPO-Math-17k", "train", 1_791_700, "prompt", _TRUTH),
    "DAPOMathAIME2024": PublicData("BytedTsinghua-SIA/AIME-2024", "train", 960, "prompt", _TRUTH),
    "DeepScaler": PublicData("agentica-org/DeepScaleR-Preview-Dataset", "train", 40_315, "problem", "answer"),
    "AIME2024": PublicData("HuggingFaceH4/aime_2024", "train", 30, "problem", "answer"),
}


def batch(size: int, per_update: int, key: str, unit: str = "trajectories") -> int:
    """Optimizer steps of a batch; `unit`: what sizes count. Raises CannotImport if it does not divide."""
    if per_update < 1:
        raise CannotImport(f"{key} = {per_update}: expected at least 1; give the {unit} of an update")
    updates, rest = divmod(size, per_update)
    if rest or updates < 1:
        problem = f"the {size} {unit} of a step are no multiple of it"
        raise CannotImport(f"{key} = {per_update}: {problem}; change one, as minibatches are equal here")
    return updates


def layout(gpus: int, sizes: dict[str, int], key: str, path: str = "policy.layout") -> Fields:
    """The layout of a model on these GPUs. `sizes`: of tensor, pipeline, context, expert, expert_tensor.

    Raises CannotImport if the processes of one copy do not divide them.
    """
    copy = prod(sizes.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
    if gpus % copy or gpus < copy:
        problem = f"one copy of the model takes {copy} GPUs, and it has {gpus}"
        raise CannotImport(f"{key}: {problem}; correct the sizes or the number of GPUs")
    fields = {f"{path}.{axis}_parallel_size": size for axis, size in sizes.items() if size > 1}
    return fields | {f"{path}.data_parallel_size": gpus // copy}


def replicas(gpus: int, ranks: int, key: str) -> int:
    """Engines of `ranks` GPUs each. Raises CannotImport if there is no room for one."""
    if gpus < ranks:
        raise CannotImport(f"{key}: an engine takes {ranks} GPUs, and generation has {gpus}")
    return gpus // ranks


def run_length(x: Origin, steps: int | None, epochs: int | None, rows: int | None, per_step: int) -> int:
    """Steps of a run that ends after these steps or epochs. Raises CannotImport if its rows are not known."""
    rows = x.options.rows or rows
    by_epochs = None if epochs is None or rows is None else max(epochs * (rows // per_step), 1)
    lengths = [length for length in (steps, by_epochs) if length is not None and length > 0]
    if not lengths:
        problem = "the run ends after epochs, and the number of rows of its data is not known"
        raise CannotImport(f"{problem}; give --rows N")
    return min(lengths)


def sampling(temperature: float, top_p: float, top_k: int | None) -> dict[str, Any]:
    """A section `sampling`; top-k of -1 or 0 means all."""
    section: dict[str, Any] = {"temperature": temperature}
    if top_p != 1:
        section["top_p"] = top_p
    if top_k is not None and top_k > 0:
        section["top_k"] = top_k
    return section


def trained_sampling(x: Origin, temperature: float, filters: Mapping[str, float]) -> dict[str, Any]:
    """The section of a project whose trainer does not filter; `filters`: fields by their keys there."""
    for key in filters:
        x.changed(key, "the loss is of the tokens that it keeps, and there of all tokens")
    return {"temperature": temperature, **{key.rpartition(".")[2]: value for key, value in filters.items()}}


# What `policy.offload_activations` is where all layers are offloaded, or modules of every layer.
OFFLOADED = {"policy.offload_activations": {"layers": "auto"}}
OFFLOADED_HOW = "of whole layers, as many as the memory plan chooses"


def template_arguments(x: Origin, section: str) -> Fields:
    """Arguments of the chat template, those with a value."""
    given = {name: value for name, value in x.below(section).items() if value is not None}
    return {"policy.tokenizer.template_arguments": given} if given else {}


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
_NO_TRACKERS = ("none", "console", "file")  # the run folder has what these show


def trackers(x: Origin, key: str, names: list[Any], sections: Mapping[str, dict[str, Any]]) -> Fields:
    """`logger.trackers` of the names that the key lists. `sections`: fields of a tracker besides its name."""
    chosen = list(dict.fromkeys(str(name) for name in names))
    if "all" in chosen:
        x.changed(key, "`all` depends on the packages that are installed; none is set", changes_result=False)
    unknown = [name for name in chosen if name not in (*TRACKERS, *_NO_TRACKERS, "all")]
    if unknown:
        how = f"there is no tracker {', '.join(unknown)} (docs/trackers.md)"
        x.changed(key, how, changes_result=False)
    found = [{"name": name, **sections.get(name, {})} for name in chosen if name in TRACKERS]
    return {"logger.trackers": found} if found else {}


# Megatron's and Hugging Face's names of matrices, and ours.
TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
_OURS = {name for names in TARGETS.values() for name in names}


def without_excluded(targets: list[str], patterns: list[str]) -> list[str]:
    """The targets without those of which a pattern matches a name of ours or of Megatron."""
    names = {ours: [ours, *(one for one, same in TARGETS.items() if ours in same)] for ours in sorted(_OURS)}
    excluded = {
        ours
        for ours, known in names.items()
        if any(fnmatch(name, pattern) for one in known for name in (one, f".{one}") for pattern in patterns)
    }
    if not excluded.intersection(_OURS if targets == ["all-linear"] else targets):
        return targets
    listed = names if targets == ["all-linear"] else targets
    return [name for name in listed if name not in excluded]


def lora_targets(x: Origin, key: str, names: object) -> list[str]:
    """Our names of the matrices that get adapters; all of them for none."""
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, list | tuple) else []
    if not listed or "all-linear" in listed:
        return ["all-linear"]
    found: list[str] = []
    for name in listed:
        plain = str(name).lstrip("*").lstrip(".")
        if plain not in TARGETS and plain not in _OURS:
            x.changed(key, f"`{name}` is none of the matrices that can have adapters")
            continue
        found += [one for one in TARGETS.get(plain, (plain,)) if one not in found]
    return found or ["all-linear"]
