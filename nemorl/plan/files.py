"""Files, packages and keys that an experiment names: whether they are there and hold what is asked."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from nemorl.config.data import DatasetConfig
from nemorl.config.environment import ServiceRewardBase
from nemorl.config.experiment import Experiment
from nemorl.config.facts import held_out
from nemorl.config.generation import OpenAIGenerationConfig
from nemorl.errors import Violation

from .weights import weight_problems

_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def file_violations(experiment: Experiment, packages: bool = True) -> Iterator[Violation]:
    """Everything that is missing beside the model's own config.json; `packages` looks at those here too."""
    model = experiment.policy.model_path
    if model.is_dir():
        for problem in weight_problems(model, experiment.policy.head):
            yield Violation("policy.model_path", str(model), problem)
    yield from _tokenizer(experiment)
    for path, dataset in (("data.train", experiment.data.train), *held_out(experiment.data)):
        file = getattr(dataset, "path", None)
        if file is not None:
            yield from _json_lines(path, dataset, file)
    if packages and experiment.logger.tensorboard and not _installed("tensorboard"):
        mend = (
            "the package tensorboard is not installed: `pip install 'nemorl[trackers]'`, or set it to false"
        )
        yield Violation("logger.tensorboard", True, mend)
    if packages:
        yield from _engine_packages(experiment)
    yield from _keys(experiment)


def head_violations(model: Path) -> Iterator[Violation]:
    """A reward model whose folder is a language model would say 0 of everything."""
    known = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    if not known[0].endswith("ForSequenceClassification"):
        mend = (
            f"this is a {known[0] or 'model without architectures'}, which has no trained head: name a "
            "folder of a …ForSequenceClassification, as `checkpointing.save_hf` writes it of a reward model"
        )
        yield Violation("policy.model_path", str(model), mend)


def tokenizer_violations(experiment: Experiment, section: str, model: Path) -> Iterator[Violation]:
    """A model of other tokens than the policy's would read other texts, whatever the size of its vocabulary.

    Tokens that were added to both vocabularies may differ: models of one family often name their special
    ones anew. A folder without a tokenizer does not tell.
    """
    policy = experiment.policy.tokenizer.path or experiment.policy.model_path
    of_policy, added_here = _tokens(policy / "tokenizer.json")
    of_model, added_there = _tokens(model / "tokenizer.json")
    compared = sorted((of_policy.keys() & of_model) - (added_here & added_there))
    other = next((number for number in compared if of_policy[number] != of_model[number]), None)
    if other is not None:
        mend = (
            f"its tokenizer is another than the policy's: token {other} is {of_model[other]!r} there and "
            f"{of_policy[other]!r} in {policy}: name a model with the policy's tokenizer"
        )
        yield Violation(f"{section}.model_path", str(model), mend)


def _tokens(file: Path) -> tuple[dict[int, str], set[int]]:
    """All tokens by id, and which of them were added; none where the file does not tell."""
    if not _is_tokenizer(file):
        return {}, set()
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # with scores, as Unigram has it
        tokens = {place: entry[0] for place, entry in enumerate(vocabulary)}
    else:
        tokens = {number: token for token, number in vocabulary.items()}
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return tokens | added, set(added)


def _engine_packages(experiment: Experiment) -> Iterator[Violation]:
    """Packages of an engine that this installation does not bring; a run on other machines may have them."""
    backend = experiment.generation.backend
    if backend == "trtllm" and "RAY_ADDRESS" not in os.environ and not _installed("tensorrt_llm"):
        mend = (
            "the package tensorrt_llm is not installed: start from NVIDIA's TensorRT-LLM container "
            "(docs/trtllm.md), or take torch or vllm"
        )
        yield Violation("generation.backend", backend, mend)


def _keys(experiment: Experiment) -> Iterator[Violation]:
    """Variables that name a key, which the processes of a Ray of our own inherit."""
    generation = experiment.generation
    wanted = {}
    if isinstance(generation, OpenAIGenerationConfig):
        wanted["generation.api_key_env"] = generation.api_key_env
    if generation.endpoint is not None:
        wanted["generation.endpoint.api_key_env"] = generation.endpoint.api_key_env
    for place, reward in enumerate(experiment.rewards):
        if isinstance(reward, ServiceRewardBase):
            wanted[f"rewards.{place}.api_key_env"] = reward.api_key_env
    for field, variable in wanted.items():
        if variable and "RAY_ADDRESS" not in os.environ and not os.environ.get(variable, "").strip():
            mend = "this environment variable is not set, or empty; it holds the key: set it"
            yield Violation(field, variable, mend)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _tokenizer(experiment: Experiment) -> Iterator[Violation]:
    config, model = experiment.policy.tokenizer, experiment.policy.model_path
    folder = config.path or model
    # A model folder that is missing is told of once, by the check of the model.
    mend = _tokenizer_mend(folder, " in policy.tokenizer.path") if config.path or model.is_dir() else None
    if mend is not None:
        field = "policy.tokenizer.path" if config.path else "policy.model_path"
        yield Violation(field, str(folder), mend)
    elif config.chat_template is not None:
        if not config.chat_template.is_file():
            mend = "there is no such file: name a Jinja file, or remove this to take the tokenizer's own"
            yield Violation("policy.tokenizer.chat_template", str(config.chat_template), mend)
    elif experiment.data.chat and folder.is_dir() and not _has_template(folder):
        mend = (
            f"the tokenizer in {folder} has no chat template: set this to false for plain text, or name one "
            "in policy.tokenizer.chat_template"
        )
        yield Violation("data.chat", True, mend)


def own_tokenizer_violations(section: str, model: Path) -> Iterator[Violation]:
    """A reward model of the run's own reads text by the tokenizer in its folder."""
    mend = _tokenizer_mend(model)
    if mend is not None:
        yield Violation(f"{section}.model_path", str(model), mend)


def _tokenizer_mend(folder: Path, where: str = "") -> str | None:
    if not (folder / "tokenizer.json").is_file():
        return f"the folder holds no tokenizer.json: name a folder that does{where}"
    if not _is_tokenizer(folder / "tokenizer.json"):
        return "its tokenizer.json is not what the tokenizers library writes, or was cut off: fetch it again"
    return None


def _is_tokenizer(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and isinstance(content.get("model"), dict)


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _TEMPLATE_FILES):
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(settings.get("chat_template"))


def _json_lines(path: str, dataset: DatasetConfig, file: Path) -> Iterator[Violation]:
    """The first task stands for the others: it shows a wrong file and wrong keys."""
    field = f"{path}.path"
    try:
        with file.open(encoding="utf-8") as lines:
            line = next((line for line in lines if line.strip()), None)
        first = json.loads(line) if line is not None else None
    except OSError as error:
        mend = f"the file cannot be read: {error.strerror}; name one with a JSON object a line"
        yield Violation(field, str(file), mend)
        return
    except ValueError:
        yield Violation(field, str(file), "the first task is not JSON: one object a line is wanted")
        return
    if line is None:
        yield Violation(field, str(file), "the file is empty: one JSON object a line is wanted")
        return
    if not isinstance(first, dict):
        yield Violation(field, str(file), "the first task is not a JSON object, with keys and values")
        return
    for name in type(dataset).model_fields:
        key = getattr(dataset, name)
        if name.endswith("_key") and key is not None and key not in first:
            known = ", ".join(f"`{name}`" for name in first) or "no key at all"
            yield Violation(f"{path}.{name}", key, f"the first task of {file} has no such key, but {known}")
