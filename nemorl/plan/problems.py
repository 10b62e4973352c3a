"""Problems of an experiment with its model, its files and this machine, without torch; weights by headers."""

import difflib
import importlib
import importlib.util
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fsspec import get_filesystem_class

from nemorl.config.algorithm import AlignedDistillationConfig
from nemorl.config.algorithm.aligned import AverageConfig
from nemorl.config.base import call_within, counted
from nemorl.config.data import (
    CurriculumConfig,
    DataConfig,
    FileDataset,
    GeneratorDataset,
    ReasoningGymDataset,
)
from nemorl.config.experiment import Experiment
from nemorl.config.facts import (
    ModelSpec,
    environment_sections,
    models_of,
    server_sections,
)
from nemorl.config.library_datasets import LibraryDataset
from nemorl.config.policy import PolicyConfig
from nemorl.config.shipped import command_for
from nemorl.config.trackers import missing_trackers
from nemorl.errors import Problem, Problems
from nemorl.models import hf_config
from nemorl.models.adapters import PEFT_PREFIX, adaptable_projections, adapter_tensors
from nemorl.models.eagle3_shape import LM_HEAD, Eagle3Shape, head_shape, stored_names
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.layout import SCALAR_HEAD, hf_tensors
from nemorl.models.layout_rules import (
    gpu_attention_problems,
    layout_problems,
    moe_problems,
    norms_are_fused,
    recompute_problems,
)
from nemorl.models.peft_adapter import start_problem
from nemorl.models.registry import load_shape, policy_shape
from nemorl.models.shape import ModelShape

from .machine import Machine, host_problems, is_this_machine, memory_problems
from .memory import ProcessMemory, estimate_memory

_SCALAR_HEAD = SCALAR_HEAD.tensors[0].name
_ROW_SECONDS = 600.0  # for the first row, with a download
_COUNT_SECONDS = 10.0  # for the rows of a stream
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class Plan:
    """What a run would start, and why it cannot."""

    processes: tuple[ProcessMemory, ...]  # empty where the model is missing or does not divide
    problems: tuple[Problem, ...]


def plan_run(experiment: Experiment, machine: Machine, *, training: bool = True) -> Plan:
    """Look at the model folder, the files and the machine; `training=False` plans an evaluation."""
    policy, generation, algorithm = experiment.policy, experiment.generation, experiment.algorithm
    samples = algorithm.generates or not training
    problems = list(file_problems(experiment, machine.same_packages, training=training))
    if is_this_machine(experiment, machine):
        # Threads beyond the cores wait for each other, and some thousands cannot be started.
        fields = ("generation.threads", "cluster.policy_threads")
        threads = zip(fields, (generation.threads, experiment.cluster.policy_threads), strict=True)
        where = "a node of the job" if machine.nodes else "this machine"
        fix = f"{where} has {machine.cores} cores: take no more than that, or leave it out"
        problems += [Problem(field, n, fix) for field, n in threads if n and n > machine.cores]
    try:
        shape = policy_shape(policy)
    except (BrokenModelFolder, UnsupportedModel) as error:
        return Plan((), (*problems, model_problem("policy", policy.model_path, str(error))))
    problems += _shape_problems(experiment, shape, training=training)
    sampler, gpus = generation if algorithm.generates else None, experiment.cluster.gpus_per_node > 0
    problems += moe_problems(shape, policy.moe, sampler, gpus=gpus)
    if samples and generation.plan_module:
        engine = importlib.import_module(generation.plan_module)
        problems += engine.problems(experiment, shape, installed=machine.same_packages)
    if not training and generation.has_engines and policy.samples_by_input_scales:
        assert policy.quantization is not None, "it names the format"
        fix = "engines get scales of activations from a policy, which this command does not start"
        fix += "; set policy.quantization to null here, or use a format without them"
        problems.append(Problem("policy.quantization.format", policy.quantization.format, fix))
    processes, refused = planned_processes(experiment, shape, training=training)
    problems += (problem for problem in refused if problem not in problems)
    if not processes:
        return Plan((), tuple(problems))
    problems += memory_problems(experiment, processes, machine)
    problems += host_problems(experiment, processes, machine)
    return Plan(processes, tuple(problems))


def planned_processes(
    experiment: Experiment, shape: ModelShape, *, training: bool
) -> tuple[tuple[ProcessMemory, ...], list[Problem]]:
    """The processes that a run starts, and problems of its models; none start if they cannot be divided."""
    samples = experiment.algorithm.generates or not training
    starts_policy = training or not experiment.generation.has_engines
    if starts_policy and (refused := list(policy_layout_problems(experiment, shape))):
        return (), refused
    started = [m for m in models_of(experiment)[1:] if (samples if m.scores else training)]
    auxiliary, refused = auxiliary_models(experiment, shape, started)
    if not all(problem.is_absent for problem in refused):
        return (), refused
    return estimate_memory(experiment, shape, training, auxiliary), refused


def auxiliary_models(
    experiment: Experiment, of_policy: ModelShape, models: Sequence[ModelSpec]
) -> tuple[list[tuple[ModelSpec, ModelShape]], list[Problem]]:
    """These models with their shapes, and why one cannot be started."""
    found, refused = [], []
    for model in models:
        section, config, path = model.section, model.config, model.config.model_path
        try:
            shape = policy_shape(config)
        except (BrokenModelFolder, UnsupportedModel) as error:
            refused.append(model_problem(section, path, str(error)))
            continue
        found.append((model, shape))
        if path != experiment.policy.model_path:
            refused += weight_problems(path, config.head, section=section, trained_head=model.scores)
        alone = experiment.model_copy(update={"policy": config})
        problems = [*_shape_problems(alone, shape), *policy_layout_problems(alone, shape)]
        if model.scores:  # it reads text, by a tokenizer of its own
            problems = [p for p in problems if not p.field.startswith("generation.")]
            problems += head_problems(path)
            refused += _tokenizer_file_problems(f"{section}.model_path", path)
        for problem in problems:  # of a policy; the length is the policy's also here
            if problem.field.startswith("policy.") and problem.field != "policy.max_sequence_length":
                field = problem.field.replace("policy.", f"{section}.", 1)
                fix = problem.fix.replace("policy.layout", f"{section}.layout")
                problem = replace(problem, field=field, fix=fix)
            refused.append(problem)
        if model.scores:
            continue
        algorithm = experiment.algorithm
        if isinstance(algorithm, AlignedDistillationConfig):
            refused += _tokenizer_file_problems(f"{section}.model_path", path)
            if not isinstance(algorithm.combination, AverageConfig):
                continue
        size, of_its = of_policy.vocab_size, shape.vocab_size
        if of_its < size or (experiment.algorithm.keeps_teachers and of_its != size):
            same = "a teacher and the policy must have the same tokens"
            fix = f"{same}, and it has {of_its} and the policy {size}"
            if of_its < size:
                fix = f"its vocabulary of {of_its} tokens lacks some of the policy's {size}"
            fix = f"{fix}: name a model with the policy's tokenizer"
            refused.append(Problem(f"{section}.model_path", str(path), fix))
        elif path != experiment.policy.model_path:
            refused += tokenizer_problems(experiment, section, path)
    return found, refused


def model_problem(section: str, path: Path, problem: str) -> Problem:
    """A folder that is missing or is not a model's; `problem` is why its config.json cannot be used."""
    if not path.is_dir():
        found = "this is a file" if path.exists() else "there is no such folder"
        some = "`nemorl models fetch` and `nemorl models create` make some"
        problem = f"{found}: name one with config.json and safetensors; {some}"
        if not path.exists() and (command := command_for(str(path))) is not None:
            problem = f"{found}; `{command}` writes it"
    return Problem(f"{section}.model_path", str(path), problem)


def _shape_problems(experiment: Experiment, shape: ModelShape, *, training: bool = True) -> Problems:
    """Lengths, tokens, precision and adapters that the model does not have."""
    policy, length = experiment.policy, experiment.policy.max_sequence_length
    if length > shape.max_position_embeddings:
        fix = f"the model knows positions up to {shape.max_position_embeddings}: take no more than that"
        yield Problem("policy.max_sequence_length", length, fix)
    stops = experiment.generation.stop_token_ids
    if unknown := [str(token) for token in stops if token >= shape.vocab_size]:
        fix = f"the model's vocabulary ends at {shape.vocab_size - 1}: remove {', '.join(unknown)}"
        yield Problem("generation.stop_token_ids", list(stops), fix)
    has_policy = training or not experiment.generation.has_engines
    if has_policy and experiment.cluster.gpus_per_node:
        yield from gpu_attention_problems(shape, policy.precision)
    if policy.fp8 is not None and shape.moe is not None:
        fix = "tokens of experts are not padded to what FP8 requires: remove it, or use a dense model"
        yield Problem("policy.fp8", policy.fp8.model_dump(), fix)
    if training:
        yield from _router_problems(policy, shape)
        yield from _mtp_problems(policy, shape)
        yield from _draft_problems(policy, shape, gpus=experiment.cluster.gpus_per_node > 0)
    if (lora := policy.lora) is None:
        return
    targets, possible = list(lora.targets), adaptable_projections(shape)
    impossible = [name for name in targets if name not in (*possible, "all-linear")]
    if impossible or not targets:
        of_experts = " (the matrices of experts have none)" if shape.moe else ""
        change = f"remove {', '.join(impossible)}" if impossible else "name some of them, or all-linear"
        fix = f"in this model {', '.join(possible)} can have an adapter{of_experts}: {change}"
        yield Problem("policy.lora.targets", targets, fix)
        return
    if twice := sorted({name for name in targets if targets.count(name) > 1}):
        fix = f"a matrix has one adapter: name {', '.join(twice)} once"
        yield Problem("policy.lora.targets", targets, fix)
    # A is [rank, columns] and B is [rows, rank].
    tensors = adapter_tensors(shape, lora)
    widths = {name: size[1] if ".lora_A." in name else size[0] for name, size in tensors.items()}
    narrowest = min(widths, key=lambda name: widths[name])
    if lora.rank > widths[narrowest]:
        matrix = narrowest.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
        fix = f"{matrix} has a side of {widths[narrowest]}, and no higher rank than that: take it or less"
        yield Problem("policy.lora.rank", lora.rank, fix)
    elif lora.start is not None and (problem := start_problem(lora, shape, "policy.lora")) is not None:
        yield problem


def _mtp_problems(policy: PolicyConfig, shape: ModelShape) -> Problems:
    """Layers for further tokens that the model does not have, or that would not all be trained."""
    if (section := policy.multi_token_prediction) is None:
        return
    layers, field = shape.num_mtp_layers, "policy.multi_token_prediction"
    if not layers:
        fix = f"the model in {policy.model_path} has no layers for further tokens that its family"
        fix = f"{fix} ({shape.family}) reads (num_nextn_predict_layers in config.json); remove it"
        yield Problem(field, section.model_dump(), fix)
    elif layers > 1 and shape.mtp_depth(section.depth) != layers:
        fix = f"the model has {layers} layers, each for one further token; remove it"
        yield Problem(f"{field}.depth", section.depth, fix)


def _draft_problems(policy: PolicyConfig, shape: ModelShape, *, gpus: bool) -> Problems:
    """A head for drafts that the model cannot have, or that does not fit it."""
    if (section := policy.draft) is None or policy.head == "scalar":
        return
    if shape.mla is not None or shape.embedding_scale is not None:
        what = "latent attention" if shape.mla is not None else "scaled embeddings"
        fix = f"heads for drafts of models with {what} are not implemented; remove it"
        yield Problem("policy.draft", section.model_dump(mode="json"), fix)
        return
    try:
        head = head_shape(shape, section.layers, section.model_path)
    except (BrokenModelFolder, UnsupportedModel) as error:
        fix = f"{error}: name another folder, or null"
        yield Problem("policy.draft.model_path", str(section.model_path), fix)
        return
    layers = head.layers
    if section.model_path is not None:
        yield from _draft_weight_problems(head, section.model_path)
    if gpus and section.depth > 1 and policy.precision == "float32":
        fix = "policy.precision is float32: on GPUs only the first step has a kernel for it; set it to 1"
        yield Problem("policy.draft.depth", section.depth, fix)
    if not 0 <= layers[0] < layers[1] < layers[2] <= shape.num_layers:
        fix = f"name three different numbers from 0 to {shape.num_layers}, the layers of the model"
        yield Problem("policy.draft.layers", list(layers), fix)


def _router_problems(policy: PolicyConfig, shape: ModelShape) -> Problems:
    """A bias of routers that would not be trained."""
    rate = policy.moe.bias_update_rate
    if shape.moe is None or not rate:  # `moe_problems` says so of models without experts
        return
    if not shape.moe.expert_bias:
        fix = "the routers of the model have no bias that balances experts; remove it"
        yield Problem("policy.moe.bias_update_rate", rate, fix)
    elif policy.lora is not None:
        fix = "policy.lora freezes the weights, which this bias belongs to; remove it"
        yield Problem("policy.moe.bias_update_rate", rate, fix)


def policy_layout_problems(experiment: Experiment, shape: ModelShape) -> Problems:
    """Reasons why the policy's layout, recomputation or rounding cannot be that of the model."""
    policy = experiment.policy
    found = list(layout_problems(shape, policy.layout, adapters=policy.lora is not None))
    yield from found or recompute_problems(shape, policy.layout, policy.recompute)
    modules = policy.recompute.modules if policy.recompute.name == "selective" else ()
    if "layernorm" in modules and policy.kernels == "transformer_engine" and norms_are_fused(shape):
        fix = "Transformer Engine computes the norms with the matrices behind them: remove layernorm"
        yield Problem("policy.recompute.modules", list(modules), fix)
    quantization = policy.trained_quantization
    if quantization is not None and not found:
        from nemorl.models.quantized import Unquantizable  # torch, which takes seconds
        from nemorl.models.quantized_parts import require_divisible

        try:
            require_divisible(shape, quantization, policy.layout)
        except Unquantizable as problem:
            yield Problem("policy.quantization.format", quantization.format, str(problem))


def file_problems(experiment: Experiment, packages: bool = True, *, training: bool = True) -> Problems:
    """Everything that is missing besides the config.json of the model; `packages` looks at those here too."""
    policy, data = experiment.policy, experiment.data
    model, tokenizer = policy.model_path, policy.tokenizer
    if model.is_dir():
        drafts = experiment.generation.drafts_by_mtp
        with_mtp = drafts or policy.multi_token_prediction is not None
        yield from weight_problems(model, policy.head, with_mtp=with_mtp)
    folder = tokenizer.path or model
    # A model folder that is missing is reported once, by the check of the model.
    unread: list[Problem] = []
    if tokenizer.path or model.is_dir():
        field = "policy.tokenizer.path" if tokenizer.path else "policy.model_path"
        unread += _tokenizer_file_problems(field, folder, " in policy.tokenizer.path")
    yield from unread
    if not unread and tokenizer.chat_template is not None:
        if not tokenizer.chat_template.is_file():
            fix = "there is no such file: name a Jinja file, or remove this to take the tokenizer's own"
            yield Problem("policy.tokenizer.chat_template", str(tokenizer.chat_template), fix)
    elif not unread and data.chat and folder.is_dir() and not has_chat_template(folder):
        fix = "set this to false for plain text, or name one in policy.tokenizer.chat_template"
        yield Problem("data.chat", True, f"the tokenizer in {folder} has no chat template: {fix}")
    row_problems: list[Problem] = []
    for path, dataset in (*data.trained_on, *data.held_out):
        if isinstance(dataset, FileDataset | GeneratorDataset):
            row_problems += _row_problems(path, dataset, data, _encoder(folder))
        if packages and isinstance(dataset, ReasoningGymDataset):
            yield from _reasoning_gym(path, dataset)
        if packages and isinstance(dataset, LibraryDataset):
            yield from _task_set(path, dataset, data)
    yield from row_problems
    if not row_problems and data.sampling.curriculum is not None:
        yield from _curriculum_problems(data, data.sampling.curriculum)
    for tracker in missing_trackers(experiment.logger.trackers) if packages else ():
        fix = f"its package is not installed: `pip install '{tracker.requirement}'`, or remove it"
        yield Problem("logger.trackers", tracker.name, fix)
    if packages and experiment.generation.transport == "nixl" and importlib.util.find_spec("nixl") is None:
        fix = "the package nixl is not installed: `pip install 'nemorl[nixl]'`, or set it to auto"
        yield Problem("generation.transport", "nixl", fix)
    if packages and experiment.generation.files_url is not None:
        yield from _store_problems(experiment.generation.files_url)
    if "RAY_ADDRESS" in os.environ:  # processes of another Ray have variables of their own
        return
    teachers = experiment.teachers if training else {}
    sections = server_sections(experiment.generation, experiment.rewards, teachers)
    sections |= environment_sections(experiment.env) if experiment.algorithm.online or not training else {}
    for section, config in (sections | {"generation.endpoint": experiment.generation.endpoint}).items():
        variable = getattr(config, "api_key_env", None)
        if variable and not os.environ.get(variable, "").strip():
            fix = "this environment variable is not set, or empty; it holds the key: set it"
            yield Problem(f"{section}.api_key_env", variable, fix)


def _store_problems(url: str) -> Iterator[Problem]:
    """Why the file system of a URL cannot be used. Connects to nothing."""
    protocol, _, rest = url.partition("://")
    if not rest:
        return
    extras = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        extra = extras.get(protocol)
        fix = f"`pip install 'nemorl[{extra}]'`" if extra else "install it"
        yield Problem("generation.files_url", url, f"its package is not installed ({error}): {fix}")
    except ValueError:
        fix = f"fsspec knows no protocol {protocol!r}; take a folder, or one such as s3:// or gs://"
        yield Problem("generation.files_url", url, fix)


def has_weights(model: Path) -> bool:
    """True if the folder has a file of weights, or the index of some."""
    return any((model / name).is_file() for name in (hf_config.SINGLE_FILE, hf_config.INDEX_FILE))


def weight_problems(
    model: Path,
    head: Literal["lm", "scalar"] = "lm",
    *,
    section: str = "policy",
    trained_head: bool = False,
    with_mtp: bool = False,
) -> Problems:
    """What is wrong with the weights; a scalar head may be missing (it begins at 0) unless `trained_head`.

    Layers for further tokens are looked at only `with_mtp`.
    """
    field, value = f"{section}.model_path", str(model)
    try:
        here = _stored_tensors(model)
    except BrokenModelFolder as error:
        yield Problem(field, value, str(error), is_absent=isinstance(error.__cause__, FileNotFoundError))
        return
    try:
        expected = hf_tensors(load_shape(model, head, with_mtp=with_mtp))
    except (BrokenModelFolder, UnsupportedModel):  # reported elsewhere
        return
    missing = [name for name in expected if name not in here and (trained_head or name != _SCALAR_HEAD)]
    if missing:
        problem = f"{len(missing)} of the model's {len(expected)} tensors are missing, first {missing[0]}"
        fix = f"{problem}: take a folder whose config.json and weights are of one model"
        yield Problem(field, value, fix)
    # Of each kind of problem the first tensor that has it.
    here = {name: here[name] for name in expected if name in here}
    for name, tensor in here.items():
        if tuple(tensor["shape"]) != expected[name]:
            says = "one label requires" if name == _SCALAR_HEAD else "config.json says"
            problem = f"{name} has the shape {tensor['shape']}, and {says} {list(expected[name])}"
            yield Problem(field, value, f"{problem}: take a folder where both are of one model")
            break
    dtypes = hf_config.STORED_DTYPES
    for name, tensor in here.items():
        if tensor["dtype"] not in dtypes:
            problem = f"{name} is of type {tensor['dtype']}, and weights may be {', '.join(dtypes)}"
            yield Problem(field, value, f"{problem}: take the model's unquantised weights")
            break


def _draft_weight_problems(shape: Eagle3Shape, folder: Path) -> Problems:
    """What is wrong with the weights of the head to start from."""
    field, value = "policy.draft.model_path", str(folder)
    try:
        stored = _stored_tensors(folder)
    except BrokenModelFolder as error:
        yield Problem(field, value, str(error), is_absent=isinstance(error.__cause__, FileNotFoundError))
        return
    extents = {name: stored[there]["shape"] for name, there in stored_names(stored).items()}
    extents.setdefault(LM_HEAD, list(shape.tensors()[LM_HEAD]))  # without one the policy's is taken
    for name, expected in shape.tensors().items():
        if extents.get(name) != list(expected):
            has = f"has the shape {extents[name]}" if name in extents else "is missing"
            problem = f"{name} {has}, and config.json says {list(expected)}"
            yield Problem(field, value, f"{problem}: take a folder where both are of one head")
            return


def _stored_tensors(model: Path) -> dict[str, Mapping[str, Any]]:
    """The header of each tensor of a folder. Raises `BrokenModelFolder`, from FileNotFoundError for none."""
    if not has_weights(model):
        needs = f"{hf_config.SINGLE_FILE} or {hf_config.INDEX_FILE}"
        raise BrokenModelFolder(f"the folder holds no weights; it requires {needs}") from FileNotFoundError()
    single = model / hf_config.SINGLE_FILE
    files = hf_config.indexed_files(model)
    headers = {file: _header(file) for file in dict.fromkeys([single] if files is None else files.values())}
    if files is None:
        files = dict.fromkeys(headers[single], single)
    return {name: headers[file][name] for name, file in files.items() if name in headers[file]}


def _header(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Header of a safetensors file, JSON after its length in 8 bytes. Raises `BrokenModelFolder`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        raise BrokenModelFolder(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise BrokenModelFolder(f"{path} is not a safetensors file; download it again") from error
    if size < end:
        raise BrokenModelFolder(f"{path} is truncated ({size} of {end} bytes); download it again")
    return header


def head_problems(model: Path) -> Problems:
    """A reward model whose folder is a language model would say 0 of everything."""
    known = (_fields(model / "config.json").get("architectures") or [""])[0]
    if not known.endswith("ForSequenceClassification"):
        problem = f"this is a {known or 'model without architectures'}, which has no trained head"
        fix = "name a folder of a …ForSequenceClassification, as `checkpointing.save_hf` writes it"
        yield Problem("policy.model_path", str(model), f"{problem}: {fix} of a reward model")


def tokenizer_problems(experiment: Experiment, section: str, model: Path) -> Problems:
    """A model of other tokens than the policy's would read other texts; added (special) tokens may differ."""
    policy = experiment.policy.tokenizer_folder
    of_policy, added_here = _tokens(policy / "tokenizer.json")
    of_model, added_there = _tokens(model / "tokenizer.json")
    compared = sorted((of_policy.keys() & of_model) - (added_here & added_there))
    other = next((number for number in compared if of_policy[number] != of_model[number]), None)
    if other is not None:
        differs = f"token {other} is {of_model[other]!r} there and {of_policy[other]!r} in {policy}"
        problem = f"its tokenizer is another than the policy's: {differs}"
        fix = f"{problem}: name a model with the policy's tokenizer"
        yield Problem(f"{section}.model_path", str(model), fix)


def _tokens(file: Path) -> tuple[dict[int, str], set[int]]:
    """All tokens by id, and which of them were added; none where the file has none."""
    content = _fields(file)
    if not isinstance(content.get("model"), dict):
        return {}, set()
    vocabulary = content["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # with scores, as Unigram has it
        tokens = {place: entry[0] for place, entry in enumerate(vocabulary)}
    else:
        tokens = {number: token for token, number in vocabulary.items()}
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    return tokens | added, set(added)


def has_chat_template(folder: Path) -> bool:
    """True if the folder's tokenizer has one, in a file of its own or in its configuration."""
    in_files = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    return in_files or bool(_fields(folder / "tokenizer_config.json").get("chat_template"))


def _tokenizer_file_problems(field: str, folder: Path, where: str = "") -> Problems:
    if not (folder / "tokenizer.json").is_file():
        fix = f"the folder holds no tokenizer.json: name a folder that does{where}"
        yield Problem(field, str(folder), fix, is_absent=True)
    elif not isinstance(_fields(folder / "tokenizer.json").get("model"), dict):
        fix = "its tokenizer.json is not what the tokenizers library writes, or is truncated"
        yield Problem(field, str(folder), f"{fix}; download it again")


def _fields(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; none where it cannot be read or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _encoder(folder: Path) -> Callable[[str], object] | None:
    """What encodes a text; None for a tokenizer that cannot be read, which other checks report."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001  tokenizers raises no narrower class
        return None
    return partial(tokenizer.encode, add_special_tokens=False)


def _row_problems(
    path: str,
    dataset: FileDataset | GeneratorDataset,
    data: DataConfig,
    encode: Callable[[str], object] | None,
) -> Problems:
    """A source that cannot be read, wrong keys, which the first row shows, or rows that cannot be used."""
    from nemorl.data.datasets import DatasetError, row_errors  # needs numpy
    from nemorl.data.rows import count_rows, first_row

    field, value = dataset.source_field, dataset.source
    if isinstance(dataset, FileDataset) and dataset.split is None and not dataset.path.exists():
        fix = "the file cannot be read: No such file or directory; name one with one JSON object per line"
        fix = f"{fix}, or set split for a Hugging Face dataset on the hub"
        yield Problem(f"{path}.path", value, fix, is_absent=True)
        return
    try:
        first = call_within(_ROW_SECONDS, lambda: first_row(dataset))
    except (DatasetError, TimeoutError) as error:
        on_hub = isinstance(dataset, FileDataset) and not dataset.path.exists()
        fix = str(error).removeprefix(f"{value} ")
        yield Problem(f"{path}.{field}", value, fix, is_absent=on_hub)
        return
    keys = ", ".join(f"`{name}`" for name in first) or "no key at all"
    missing = [
        Problem(f"{path}.{name}", key, f"the first task of {value} has no such key, but {keys}")
        for name in type(dataset).model_fields
        if name.endswith("_key") and name != "tools_key"  # a task may offer none
        if (key := getattr(dataset, name)) is not None and key not in first
    ]
    if missing:
        yield from missing
        return
    wrong = row_errors(dataset, data, encode=encode)
    for line in wrong:
        fix = f"{line.removeprefix(f'{value}, ')}; correct or remove the row"
        yield Problem(f"{path}.{field}", value, fix)
    if wrong or (stream := getattr(dataset, "stream", None)) is None:
        return
    number = None
    try:
        with suppress(TimeoutError):  # then the run reports it
            count = partial(count_rows, dataset, stream.size, _COUNT_SECONDS)
            number = call_within(2 * _COUNT_SECONDS, count)
    except DatasetError as error:
        yield Problem(f"{path}.{field}", value, str(error).removeprefix(f"{value} "))
        return
    if number is not None and number < stream.size:
        size = "size" if isinstance(dataset, GeneratorDataset) else "stream.size"
        fix = f"{value} has {counted(number, 'row')}; set it to {number} or less"
        yield Problem(f"{path}.{size}", stream.size, fix)


def _curriculum_problems(data: DataConfig, curriculum: CurriculumConfig) -> Problems:
    from nemorl.data.datasets import DatasetError, difficulties, load_tasks  # needs numpy

    try:
        difficulties(load_tasks(data.train, data), curriculum)
    except DatasetError as error:
        fix = f"{error}; change the column or the stages"
        yield Problem("data.sampling.curriculum.key", curriculum.key, fix)


def _task_set(path: str, dataset: LibraryDataset, data: DataConfig) -> Problems:
    """Make its first task."""
    from nemorl.data.datasets import load_tasks  # needs numpy

    try:
        call_within(60.0, lambda: load_tasks(dataset, data)[0])  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  the library's own code
        field = dataset.source_field
        yield Problem(f"{path}.{field}", getattr(dataset, field), f"{error}; correct the section")


def _reasoning_gym(path: str, dataset: ReasoningGymDataset) -> Problems:
    """Make the dataset and its first task, since some datasets check their options only then."""
    import reasoning_gym  # takes seconds
    from reasoning_gym.factory import DATASETS

    name = dataset.task
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else "see its list of datasets"
        yield Problem(f"{path}.task", name, f"reasoning-gym has no dataset of this name; {hint}")
        return
    made = partial(reasoning_gym.create_dataset, name, size=dataset.size, seed=dataset.seed)
    try:
        call_within(60.0, lambda: made(**dataset.options)[0])
    except Exception as error:  # noqa: BLE001  a dataset's own code, with checks by assert
        problem = f"the dataset {name} does not accept these options ({type(error).__name__}: {error})"
        fix = f"see the fields of its {DATASETS[name][1].__name__}"
        yield Problem(f"{path}.options", dataset.options, f"{problem}; {fix}")
