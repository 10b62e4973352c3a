"""Whether an experiment fits its model, its files and this machine, said before a process starts.

Imports no torch.

Whether the addresses that an experiment names can be had from this machine.

Whether the nodes of a run can be had from where it is started.

The weights of a model folder by their headers alone: all tensors there, of the shapes of config.json.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, JSON: name to
dtype, shape and place. Reading that takes no torch and no time.

Files, packages and keys that an experiment names: whether they are there and hold what is asked.
"""

import difflib
import errno
import importlib.util
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from nemorl.config.base import call_within
from nemorl.config.data import DataConfig, DatasetConfig, ReasoningGymDataset
from nemorl.config.environment import ServiceRewardBase
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, held_out, models_of
from nemorl.config.generation import EndpointConfig, GenerationConfig, OpenAIGenerationConfig
from nemorl.config.run import ClusterConfig
from nemorl.errors import Problem
from nemorl.models.adapters import PEFT_PREFIX, adaptable_projections, adapter_tensors
from nemorl.models.errors import BrokenModelFolder, UnsupportedModel
from nemorl.models.json_files import INDEX_FILE, SINGLE_FILE, indexed_files
from nemorl.models.layout import SCALAR_HEAD, hf_tensors
from nemorl.models.layout_rules import (
    layout_problems,
    moe_problems,
    norms_are_fused,
    recompute_problems,
)
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape

from .machine import Machine, is_this_machine, memory_problems
from .memory import ProcessMemory, estimate_memory

_HOST, _PORT = "generation.endpoint.host", "generation.endpoint.port"


def address_problems(generation: GenerationConfig, endpoint: EndpointConfig | None) -> Iterator[Problem]:
    """`endpoint` is where this machine would listen. Nothing is sent; the port is free again afterwards."""
    if isinstance(generation, OpenAIGenerationConfig):
        yield from _asking(generation)
    if endpoint is not None:
        yield from _listening(endpoint)


def _asking(config: OpenAIGenerationConfig) -> Iterator[Problem]:
    problem = _unknown(config.host) if config.host else None
    if problem is not None:
        fix = f"this machine finds no address of {config.host} ({problem}); correct the name"
        yield Problem("generation.base_url", config.base_url, fix)


def _listening(endpoint: EndpointConfig) -> Iterator[Problem]:
    host, port = endpoint.host, endpoint.port
    if (problem := _unknown(host)) is not None:
        fix = f"this machine finds no such address ({problem}): name one that it has, such as 127.0.0.1"
        yield Problem(_HOST, host, fix)
        return
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        number = _refused(family, address)
        if number is not None:
            yield _refusal(endpoint, number)
            return


def _unknown(host: str) -> str | None:
    """Why no address is known for a name."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a part of it is empty, or longer than names can be
        return "it is no name of a machine"
    return None


def _refused(family: int, address: tuple[object, ...]) -> int | None:
    """The error with which listening begins, if it does."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # As servers have it: a port whose connections are just ending is free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        # A family that this machine lacks is left out when a server begins to listen.
        return None if error.errno == errno.EAFNOSUPPORT else error.errno
    return None


def _refusal(endpoint: EndpointConfig, number: int) -> Problem:
    if number == errno.EADDRINUSE:
        fix = "another program listens there: name another port, or 0 for a free one"
        return Problem(_PORT, endpoint.port, fix)
    if number == errno.EACCES:
        fix = "this port is for programs with special rights: name one of 1024 or more, or 0 for a free one"
        return Problem(_PORT, endpoint.port, fix)
    fix = f"this machine cannot listen there ({os.strerror(number)}): name an address of its own"
    return Problem(_HOST, endpoint.host, f"{fix}, such as 127.0.0.1")


_CONNECT_SECONDS = 5.0


def server_problems(experiment: Experiment) -> Iterator[Problem]:
    """Servers of rewards and of generation to which this machine cannot connect."""
    if "RAY_ADDRESS" in os.environ:  # workers on other machines connect
        return
    addresses = {
        f"rewards.{place}.url": reward.url
        for place, reward in enumerate(experiment.rewards)
        if isinstance(reward, ServiceRewardBase)
    }
    if isinstance(experiment.generation, OpenAIGenerationConfig):
        addresses["generation.base_url"] = experiment.generation.base_url
    for field, url in addresses.items():
        if (problem := _no_connection(url)) is not None:
            yield Problem(field, url, f"this machine cannot connect to it ({problem}); start the server")


def _no_connection(url: str) -> str | None:
    """None also for what is no address, which the checks of the configuration report."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        if host:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, UnicodeError):
        return None
    return None


def node_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """A run over several nodes joins a Ray that was started on them."""
    if cluster.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        fix = (
            "this command starts the run on this machine only; on a Slurm cluster use `nemorl "
            f"slurm submit CONFIG --nodes {cluster.num_nodes}`; elsewhere start Ray on the nodes and set "
            "RAY_ADDRESS to its head (docs/slurm.md)"
        )
        yield Problem("cluster.num_nodes", cluster.num_nodes, fix)


DTYPES = ("F32", "BF16", "F16")  # that can be loaded
_SCALAR_HEAD = SCALAR_HEAD.tensors[0].name
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit

Header = Mapping[str, Mapping[str, Any]]


def weight_problems(
    model: Path, head: Literal["lm", "scalar"] = "lm", *, trained_head: bool = False
) -> Iterator[str]:
    """What is wrong with the weights; nothing where config.json is wrong, which is reported elsewhere.

    A scalar head may be missing, and begins at zero, unless `trained_head`.
    """
    if not any((model / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        yield f"the folder holds no weights; it requires {SINGLE_FILE} or {INDEX_FILE}"
        return
    try:
        expected = hf_tensors(load_shape(model, head))
    except (BrokenModelFolder, UnsupportedModel):
        return
    try:
        files = _tensor_files(model)
        headers = {file: _header(file) for file in dict.fromkeys(files.values())}
    except BrokenModelFolder as error:
        yield str(error)
        return
    here = {name: headers[file][name] for name, file in files.items() if name in headers[file]}
    missing = [name for name in expected if name not in here and (trained_head or name != _SCALAR_HEAD)]
    if missing:
        yield (
            f"{len(missing)} of the model's {len(expected)} tensors are missing, first {missing[0]}: take a "
            "folder whose config.json and weights are of one model"
        )
    yield from _unfit(expected, here)


def _unfit(expected: Mapping[str, tuple[int, ...]], here: Header) -> Iterator[str]:
    """The first tensor of another shape, and the first of a type that cannot be loaded."""
    shapes = {name: tuple(here[name]["shape"]) for name in expected if name in here}
    for name, shape in shapes.items():
        if shape != expected[name]:
            says = "one label requires" if name == _SCALAR_HEAD else "config.json says"
            yield (
                f"{name} has the shape {list(shape)}, and {says} {list(expected[name])}: take a "
                "folder where both are of one model"
            )
            break
    for name in shapes:
        if here[name]["dtype"] not in DTYPES:
            yield (
                f"{name} is of type {here[name]['dtype']}, and weights may be {', '.join(DTYPES)}: take the "
                "model's unquantised weights"
            )
            break


def _tensor_files(model: Path) -> dict[str, Path]:
    """The file of each tensor."""
    indexed = indexed_files(model)
    if indexed is not None:
        return indexed
    single = model / SINGLE_FILE
    return dict.fromkeys(_header(single), single)


def _header(path: Path) -> Header:
    """Header of a file that is as long as it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        raise BrokenModelFolder(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise BrokenModelFolder(f"{path} is no safetensors file: fetch it again") from error
    if size < end:
        raise BrokenModelFolder(f"{path} has {size} bytes of {end}: fetch it again, it was cut off")
    return header  # type: ignore[no-any-return]


_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def file_problems(experiment: Experiment, packages: bool = True) -> Iterator[Problem]:
    """Everything that is missing besides the config.json of the model; `packages` looks at those here too."""
    model = experiment.policy.model_path
    if model.is_dir():
        for problem in weight_problems(model, experiment.policy.head):
            yield Problem("policy.model_path", str(model), problem)
    yield from _tokenizer(experiment)
    for path, dataset in (("data.train", experiment.data.train), *held_out(experiment.data)):
        file = getattr(dataset, "path", None)
        if file is not None:
            yield from _json_lines(path, dataset, file, experiment.data)
        if packages and isinstance(dataset, ReasoningGymDataset):
            yield from _reasoning_gym(path, dataset)
    if packages and experiment.logger.tensorboard and not _installed("tensorboard"):
        fix = "the package tensorboard is not installed: `pip install 'nemorl[trackers]'`, or set it to false"
        yield Problem("logger.tensorboard", True, fix)
    yield from _keys(experiment)


def head_problems(model: Path) -> Iterator[Problem]:
    """A reward model whose folder is a language model would say 0 of everything."""
    known = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures") or [""]
    if not known[0].endswith("ForSequenceClassification"):
        fix = (
            f"this is a {known[0] or 'model without architectures'}, which has no trained head: name a "
            "folder of a …ForSequenceClassification, as `checkpointing.save_hf` writes it of a reward model"
        )
        yield Problem("policy.model_path", str(model), fix)


def tokenizer_problems(experiment: Experiment, section: str, model: Path) -> Iterator[Problem]:
    """A model of other tokens than the policy's would read other texts, whatever the size of its vocabulary.

    Tokens that were added to both vocabularies may differ: models of one family often name their special
    ones differently. A folder without a tokenizer is not compared.
    """
    policy = experiment.policy.tokenizer.path or experiment.policy.model_path
    of_policy, added_here = _tokens(policy / "tokenizer.json")
    of_model, added_there = _tokens(model / "tokenizer.json")
    compared = sorted((of_policy.keys() & of_model) - (added_here & added_there))
    other = next((number for number in compared if of_policy[number] != of_model[number]), None)
    if other is not None:
        fix = (
            f"its tokenizer is another than the policy's: token {other} is {of_model[other]!r} there and "
            f"{of_policy[other]!r} in {policy}: name a model with the policy's tokenizer"
        )
        yield Problem(f"{section}.model_path", str(model), fix)


def _tokens(file: Path) -> tuple[dict[int, str], set[int]]:
    """All tokens by id, and which of them were added; none where the file has none."""
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


def _keys(experiment: Experiment) -> Iterator[Problem]:
    """Variables that name a key, which the processes of a Ray of our own inherit."""
    generation = experiment.generation
    expected = {}
    if isinstance(generation, OpenAIGenerationConfig):
        expected["generation.api_key_env"] = generation.api_key_env
    if generation.endpoint is not None:
        expected["generation.endpoint.api_key_env"] = generation.endpoint.api_key_env
    for place, reward in enumerate(experiment.rewards):
        if isinstance(reward, ServiceRewardBase):
            expected[f"rewards.{place}.api_key_env"] = reward.api_key_env
    for field, variable in expected.items():
        if variable and "RAY_ADDRESS" not in os.environ and not os.environ.get(variable, "").strip():
            fix = "this environment variable is not set, or empty; it holds the key: set it"
            yield Problem(field, variable, fix)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _tokenizer(experiment: Experiment) -> Iterator[Problem]:
    config, model = experiment.policy.tokenizer, experiment.policy.model_path
    folder = config.path or model
    # A model folder that is missing is reported once, by the check of the model.
    fix = _tokenizer_fix(folder, " in policy.tokenizer.path") if config.path or model.is_dir() else None
    if fix is not None:
        field = "policy.tokenizer.path" if config.path else "policy.model_path"
        yield Problem(field, str(folder), fix)
    elif config.chat_template is not None:
        if not config.chat_template.is_file():
            fix = "there is no such file: name a Jinja file, or remove this to take the tokenizer's own"
            yield Problem("policy.tokenizer.chat_template", str(config.chat_template), fix)
    elif experiment.data.chat and folder.is_dir() and not _has_template(folder):
        fix = (
            f"the tokenizer in {folder} has no chat template: set this to false for plain text, or name one "
            "in policy.tokenizer.chat_template"
        )
        yield Problem("data.chat", True, fix)


def own_tokenizer_problems(section: str, model: Path) -> Iterator[Problem]:
    """A reward model of the run's own reads text by the tokenizer in its folder."""
    fix = _tokenizer_fix(model)
    if fix is not None:
        yield Problem(f"{section}.model_path", str(model), fix)


def _tokenizer_fix(folder: Path, where: str = "") -> str | None:
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


_FIRST_TASK_SECONDS = 60.0


def _reasoning_gym(path: str, dataset: ReasoningGymDataset) -> Iterator[Problem]:
    """Make the dataset and its first task, since some datasets check their options only then."""
    import reasoning_gym  # takes seconds
    from reasoning_gym.factory import DATASETS

    if dataset.task not in DATASETS:
        close = difflib.get_close_matches(dataset.task, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else "see its list of datasets"
        yield Problem(f"{path}.task", dataset.task, f"reasoning-gym has no dataset of this name; {hint}")
        return

    def first_task() -> object:
        made = reasoning_gym.create_dataset(
            dataset.task, size=dataset.size, seed=dataset.seed, **dataset.options
        )
        return made[0]

    try:
        call_within(_FIRST_TASK_SECONDS, first_task)
    except Exception as error:  # noqa: BLE001  a dataset's own code, with checks by assert
        fix = (
            f"the dataset {dataset.task} does not accept these options ({type(error).__name__}: {error}); "
            f"see the fields of its {DATASETS[dataset.task][1].__name__}"
        )
        yield Problem(f"{path}.options", dataset.options, fix)


def _json_lines(path: str, dataset: DatasetConfig, file: Path, data: DataConfig) -> Iterator[Problem]:
    """A wrong file or wrong keys, which the first row shows, or rows that loading would refuse."""
    field = f"{path}.path"
    try:
        with file.open(encoding="utf-8") as lines:
            line = next((line for line in lines if line.strip()), None)
        first = json.loads(line) if line is not None else None
    except OSError as error:
        fix = f"the file cannot be read: {error.strerror}; name one with a JSON object a line"
        yield Problem(field, str(file), fix)
        return
    except ValueError:
        yield Problem(field, str(file), "the first task is not JSON; write one object a line")
        return
    if line is None:
        yield Problem(field, str(file), "the file is empty; write one JSON object a line")
        return
    if not isinstance(first, dict):
        yield Problem(field, str(file), "the first task is not a JSON object, with keys and values")
        return
    keys = ", ".join(f"`{name}`" for name in first) or "no key at all"
    missing = [
        Problem(f"{path}.{name}", key, f"the first task of {file} has no such key, but {keys}")
        for name in type(dataset).model_fields
        if name.endswith("_key") and (key := getattr(dataset, name)) is not None and key not in first
    ]
    if missing:
        yield from missing
        return
    from nemorl.data.datasets import file_errors  # needs numpy

    for line in file_errors(dataset, data):
        yield Problem(field, str(file), f"{line.removeprefix(f'{file}, ')}; correct or remove the line")


@dataclass(frozen=True)
class Plan:
    """What a run would start, and why it cannot."""

    processes: tuple[ProcessMemory, ...]  # empty where the model is missing or does not divide
    problems: tuple[Problem, ...]


def plan_run(experiment: Experiment, machine: Machine, *, training: bool = True) -> Plan:
    """Look at the model folder, the files and the machine; `training=False` plans an evaluation.

    There a policy is started only if it samples without an engine.
    """
    starts_policy = training or not experiment.generation.has_engines
    problems = [
        *file_problems(experiment, machine.same_packages),
        *_thread_problems(experiment, machine),
    ]
    try:
        shape = load_shape(experiment.policy.model_path, experiment.policy.head)
    except (BrokenModelFolder, UnsupportedModel) as error:
        problems.append(_model_problem("policy", experiment.policy.model_path, str(error)))
        return Plan((), tuple(problems))
    problems += _length_problems(experiment, shape)
    if training:
        problems += _precision_problems(experiment, shape)
    problems += _adapter_problems(experiment, shape)
    sampler = experiment.generation if experiment.algorithm.generates else None
    gpus = experiment.cluster.gpus_per_node > 0
    problems += moe_problems(shape, experiment.policy.moe, sampler, gpus=gpus)
    if experiment.algorithm.generates or not training:
        problems += _engine_problems(experiment, shape, installed=machine.same_packages)
    refused_layout = list(_layout_problems(experiment, shape)) if starts_policy else []
    if refused_layout:
        return Plan((), (*problems, *refused_layout))
    samples = experiment.algorithm.generates or not training
    started = [m for m in models_of(experiment)[1:] if (samples if m.scores else training)]
    auxiliary, refused_auxiliary = auxiliary_models(experiment, shape, started)
    if refused_auxiliary:
        return Plan((), (*problems, *(v for v in refused_auxiliary if v not in problems)))
    processes = estimate_memory(experiment, shape, training, auxiliary)
    problems += memory_problems(experiment, processes, machine)
    return Plan(processes, tuple(problems))


def _model_problem(section: str, path: Path, problem: str) -> Problem:
    if not path.is_dir():
        found = "this is a file" if path.exists() else "there is no such folder"
        problem = (
            f"{found}: name one with config.json and safetensors; `nemorl models fetch` and "
            "`nemorl models create` make some"
        )
    return Problem(f"{section}.model_path", str(path), problem)


def auxiliary_models(
    experiment: Experiment, of_policy: ModelShape, models: Sequence[ModelSpec]
) -> tuple[list[tuple[ModelSpec, ModelShape]], list[Problem]]:
    """These models with their shapes, and why one cannot be started."""
    found, refused = [], []
    for model in models:
        config = model.config
        try:
            shape = load_shape(config.model_path, config.head)
        except (BrokenModelFolder, UnsupportedModel) as error:
            refused.append(_model_problem(model.section, config.model_path, str(error)))
            continue
        alone = experiment.model_copy(update={"policy": config})
        if config.model_path != experiment.policy.model_path:
            wrong = weight_problems(config.model_path, config.head, trained_head=model.scores)
            refused += [_model_problem(model.section, config.model_path, problem) for problem in wrong]
        problems = [*_length_problems(alone, shape), *_precision_problems(alone, shape)]
        problems += [*_adapter_problems(alone, shape), *_layout_problems(alone, shape)]
        if model.scores:  # it reads text, by a tokenizer of its own
            problems = [p for p in problems if not p.field.startswith("generation.")]
            problems += head_problems(config.model_path)
            refused += own_tokenizer_problems(model.section, config.model_path)
        refused += [_of_section(problem, model.section) for problem in problems]
        fix = None if model.scores else _vocabulary_fix(experiment, shape, of_policy)
        if fix is not None:
            refused.append(Problem(f"{model.section}.model_path", str(config.model_path), fix))
        elif not model.scores and config.model_path != experiment.policy.model_path:
            refused += tokenizer_problems(experiment, model.section, config.model_path)
        found.append((model, shape))
    return found, refused


def _vocabulary_fix(experiment: Experiment, shape: ModelShape, of_policy: ModelShape) -> str | None:
    """What to do about a model with other tokens than the policy's."""
    if shape.vocab_size < of_policy.vocab_size:
        return (
            f"its vocabulary of {shape.vocab_size} tokens lacks some of the policy's "
            f"{of_policy.vocab_size}: name a model with the policy's tokenizer"
        )
    if experiment.algorithm.keeps_teachers and shape.vocab_size != of_policy.vocab_size:
        return (
            f"a teacher and the policy must have the same tokens, and it has {shape.vocab_size} and the "
            f"policy {of_policy.vocab_size}: name a model with the policy's tokenizer"
        )
    return None


def _of_section(problem: Problem, section: str) -> Problem:
    """A problem of a policy as one of another model; its length is the policy's also there."""
    if not problem.field.startswith("policy.") or problem.field == "policy.max_sequence_length":
        return problem
    return replace(
        problem,
        field=problem.field.replace("policy.", f"{section}.", 1),
        fix=problem.fix.replace("policy.layout", f"{section}.layout"),
    )


def _layout_problems(experiment: Experiment, shape: ModelShape) -> Iterator[Problem]:
    policy = experiment.policy
    found = list(layout_problems(shape, policy.layout, adapters=policy.lora is not None))
    yield from found or recompute_problems(shape, policy.layout, policy.recompute)
    modules = policy.recompute.modules if policy.recompute.name == "selective" else ()
    if "layernorm" in modules and policy.kernels == "transformer_engine" and norms_are_fused(shape):
        fix = "Transformer Engine computes the norms with the matrices behind them: remove layernorm"
        yield Problem("policy.recompute.modules", list(modules), fix)


def _length_problems(experiment: Experiment, shape: ModelShape) -> Iterator[Problem]:
    length = experiment.policy.max_sequence_length
    if length > shape.max_position_embeddings:
        fix = f"the model knows positions up to {shape.max_position_embeddings}: take no more than that"
        yield Problem("policy.max_sequence_length", length, fix)
    unknown = [token for token in experiment.generation.stop_token_ids if token >= shape.vocab_size]
    if unknown:
        fix = f"the model's vocabulary ends at {shape.vocab_size - 1}: remove {', '.join(map(str, unknown))}"
        yield Problem("generation.stop_token_ids", list(experiment.generation.stop_token_ids), fix)


def _precision_problems(experiment: Experiment, shape: ModelShape) -> Iterator[Problem]:
    precision = experiment.policy.precision
    if shape.sinks and precision == "float32" and experiment.cluster.gpus_per_node:
        fix = (
            "on a GPU the kernel for attention sinks, which the model has, takes bfloat16 only: set bfloat16"
        )
        yield Problem("policy.precision", precision, fix)


def _adapter_problems(experiment: Experiment, shape: ModelShape) -> Iterator[Problem]:
    lora, possible = experiment.policy.lora, adaptable_projections(shape)
    if lora is None:
        return
    impossible = [name for name in lora.targets if name not in (*possible, "all-linear")]
    if impossible or not lora.targets:
        of_experts = " (the matrices of experts have none)" if shape.moe else ""
        fix = f"in this model {', '.join(possible)} can have an adapter{of_experts}"
        change = f"remove {', '.join(impossible)}" if impossible else "name some of them, or all-linear"
        yield Problem("policy.lora.targets", list(lora.targets), f"{fix}: {change}")
        return
    twice = sorted({name for name in lora.targets if lora.targets.count(name) > 1})
    if twice:
        fix = f"a matrix has one adapter: name {', '.join(twice)} once"
        yield Problem("policy.lora.targets", list(lora.targets), fix)
    # A is [rank, columns] and B is [rows, rank].
    tensors = adapter_tensors(shape, lora)
    widths = {name: size[1] if ".lora_A." in name else size[0] for name, size in tensors.items()}
    narrowest = min(widths, key=lambda name: widths[name])
    if lora.rank > widths[narrowest]:
        matrix = narrowest.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
        fix = f"{matrix} has a side of {widths[narrowest]}, and no higher rank than that: take it or less"
        yield Problem("policy.lora.rank", lora.rank, fix)


def _engine_problems(experiment: Experiment, shape: ModelShape, *, installed: bool) -> Iterator[Problem]:
    """Problems that the engine's package finds with this model and this machine."""
    if experiment.generation.plan_module:
        plan = importlib.import_module(experiment.generation.plan_module)
        yield from plan.problems(experiment, shape, installed=installed)


def _thread_problems(experiment: Experiment, machine: Machine) -> Iterator[Problem]:
    """Threads beyond the cores wait for each other, and some thousands cannot be started."""
    if not is_this_machine(experiment, machine):
        return
    expected = {
        "generation.threads": experiment.generation.threads,
        "cluster.policy_threads": experiment.cluster.policy_threads,
    }
    for field, threads in expected.items():
        if threads is not None and threads > machine.cores:
            where = "a node of the job" if machine.nodes else "this machine"
            fix = f"{where} has {machine.cores} cores: take no more than that, or leave it out"
            yield Problem(field, threads, fix)
