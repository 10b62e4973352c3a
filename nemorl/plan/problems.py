"""Whether an experiment fits its model, its files and this machine, said before a process starts.

Imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, generates, models_of
from nemorl.errors import Violation
from nemorl.models.adapters import PEFT_PREFIX, adaptable_projections, adapter_tensors
from nemorl.models.errors import BrokenModelFolder, UnsupportedModel
from nemorl.models.layout_rules import (
    layout_violations,
    moe_violations,
    norms_are_fused,
    recompute_violations,
)
from nemorl.models.shape import ModelShape

from .files import file_violations, head_violations, own_tokenizer_violations, tokenizer_violations
from .machine import Machine
from .memory import ProcessMemory, estimate_memory
from .room import is_this_machine, memory_violations
from .vllm import vllm_violations
from .weights import weight_problems


@dataclass(frozen=True)
class Plan:
    """What a run would start, and why it cannot."""

    processes: tuple[ProcessMemory, ...]  # empty where the model is missing or does not divide
    violations: tuple[Violation, ...]


def plan_run(experiment: Experiment, machine: Machine, *, training: bool = True) -> Plan:
    """Look at the model folder, the files and the machine; `training=False` plans an evaluation.

    There a policy is started only where it samples by itself.
    """
    starts_policy = training or not experiment.generation.has_engines
    violations = [
        *file_violations(experiment, machine.same_packages),
        *_thread_violations(experiment, machine),
    ]
    try:
        shape = ModelShape.load(experiment.policy.model_path, experiment.policy.head)
    except (BrokenModelFolder, UnsupportedModel) as error:
        violations.append(_model_violation("policy", experiment.policy.model_path, str(error)))
        return Plan((), tuple(violations))
    violations += _length_violations(experiment, shape)
    if training:
        violations += _precision_violations(experiment, shape)
    violations += _adapter_violations(experiment, shape)
    sampler = experiment.generation if generates(experiment.algorithm) else None
    gpus = experiment.cluster.gpus_per_node > 0
    violations += moe_violations(shape, experiment.policy.moe, sampler, gpus=gpus)
    if generates(experiment.algorithm) or not training:
        violations += _engine_violations(experiment, shape)
        violations += vllm_violations(experiment, shape, installed=machine.same_packages)
    refused_layout = list(_layout_violations(experiment, shape)) if starts_policy else []
    if refused_layout:
        return Plan((), (*violations, *refused_layout))
    samples = generates(experiment.algorithm) or not training
    started = [m for m in models_of(experiment)[1:] if (samples if m.scores else training)]
    beside, refused_beside = models_beside(experiment, shape, started)
    if refused_beside:
        return Plan((), (*violations, *(v for v in refused_beside if v not in violations)))
    processes = estimate_memory(experiment, shape, training, beside)
    violations += memory_violations(experiment, processes, machine)
    return Plan(processes, tuple(violations))


def _model_violation(section: str, path: Path, problem: str) -> Violation:
    if not path.is_dir():
        found = "this is a file" if path.exists() else "there is no such folder"
        problem = (
            f"{found}: name one with config.json and safetensors; `nemorl models fetch` and "
            "`nemorl models create` make some"
        )
    return Violation(f"{section}.model_path", str(path), problem)


def models_beside(
    experiment: Experiment, of_policy: ModelShape, models: Sequence[ModelSpec]
) -> tuple[list[tuple[ModelSpec, ModelShape]], list[Violation]]:
    """These models with their shapes, and why one cannot be started."""
    found, refused = [], []
    for model in models:
        config = model.config
        try:
            shape = ModelShape.load(config.model_path, config.head)
        except (BrokenModelFolder, UnsupportedModel) as error:
            refused.append(_model_violation(model.section, config.model_path, str(error)))
            continue
        alone = experiment.model_copy(update={"policy": config})
        if config.model_path != experiment.policy.model_path:
            wrong = weight_problems(config.model_path, config.head, trained_head=model.scores)
            refused += [_model_violation(model.section, config.model_path, problem) for problem in wrong]
        problems = [*_length_violations(alone, shape), *_precision_violations(alone, shape)]
        problems += [*_adapter_violations(alone, shape), *_layout_violations(alone, shape)]
        if model.scores:  # it reads text, by a tokenizer of its own
            problems = [p for p in problems if not p.field.startswith("generation.")]
            problems += head_violations(config.model_path)
            refused += own_tokenizer_violations(model.section, config.model_path)
        refused += [_of_section(violation, model.section) for violation in problems]
        mend = None if model.scores else _vocabulary_mend(experiment, shape, of_policy)
        if mend is not None:
            refused.append(Violation(f"{model.section}.model_path", str(config.model_path), mend))
        elif not model.scores and config.model_path != experiment.policy.model_path:
            refused += tokenizer_violations(experiment, model.section, config.model_path)
        found.append((model, shape))
    return found, refused


def _vocabulary_mend(experiment: Experiment, shape: ModelShape, of_policy: ModelShape) -> str | None:
    """What to do about a model that does not speak of the policy's tokens."""
    if shape.vocab_size < of_policy.vocab_size:
        return (
            f"its vocabulary of {shape.vocab_size} tokens lacks some of the policy's "
            f"{of_policy.vocab_size}: name a model with the policy's tokenizer"
        )
    if experiment.algorithm.keeps_teachers and shape.vocab_size != of_policy.vocab_size:
        return (
            f"a teacher and the policy speak of the same tokens, and it has {shape.vocab_size} and the "
            f"policy {of_policy.vocab_size}: name a model with the policy's tokenizer"
        )
    return None


def _of_section(problem: Violation, section: str) -> Violation:
    """A violation of a policy as one of another model; its length is the policy's also there."""
    if not problem.field.startswith("policy.") or problem.field == "policy.max_sequence_length":
        return problem
    return replace(
        problem,
        field=problem.field.replace("policy.", f"{section}.", 1),
        mend=problem.mend.replace("policy.layout", f"{section}.layout"),
    )


def _layout_violations(experiment: Experiment, shape: ModelShape) -> Iterator[Violation]:
    policy = experiment.policy
    device: Literal["cpu", "cuda"] = "cuda" if experiment.cluster.gpus_per_node else "cpu"
    adapters = policy.lora is not None
    found = list(layout_violations(shape, policy.layout, device, adapters=adapters))
    yield from found or recompute_violations(shape, policy.layout, policy.recompute)
    modules = policy.recompute.modules if policy.recompute.name == "selective" else ()
    if "layernorm" in modules and policy.kernels == "transformer_engine" and norms_are_fused(shape):
        mend = "Transformer Engine computes the norms with the matrices behind them: remove layernorm"
        yield Violation("policy.recompute.modules", list(modules), mend)


def _length_violations(experiment: Experiment, shape: ModelShape) -> Iterator[Violation]:
    length = experiment.policy.max_sequence_length
    if length > shape.max_position_embeddings:
        mend = f"the model knows positions up to {shape.max_position_embeddings}: take no more than that"
        yield Violation("policy.max_sequence_length", length, mend)
    unknown = [token for token in experiment.generation.stop_token_ids if token >= shape.vocab_size]
    if unknown:
        mend = f"the model's vocabulary ends at {shape.vocab_size - 1}: remove {', '.join(map(str, unknown))}"
        yield Violation("generation.stop_token_ids", list(experiment.generation.stop_token_ids), mend)


def _precision_violations(experiment: Experiment, shape: ModelShape) -> Iterator[Violation]:
    precision = experiment.policy.precision
    if shape.sinks and precision == "float32" and experiment.cluster.gpus_per_node:
        mend = (
            "on a GPU the kernel for attention sinks, which the model has, takes bfloat16 only: set bfloat16"
        )
        yield Violation("policy.precision", precision, mend)


def _adapter_violations(experiment: Experiment, shape: ModelShape) -> Iterator[Violation]:
    lora, possible = experiment.policy.lora, adaptable_projections(shape)
    if lora is None:
        return
    impossible = [name for name in lora.targets if name not in (*possible, "all-linear")]
    if impossible or not lora.targets:
        of_experts = " (the matrices of experts have none)" if shape.moe else ""
        mend = f"in this model {', '.join(possible)} can have an adapter{of_experts}"
        change = f"remove {', '.join(impossible)}" if impossible else "name some of them, or all-linear"
        yield Violation("policy.lora.targets", list(lora.targets), f"{mend}: {change}")
        return
    twice = sorted({name for name in lora.targets if lora.targets.count(name) > 1})
    if twice:
        mend = f"a matrix has one adapter: name {', '.join(twice)} once"
        yield Violation("policy.lora.targets", list(lora.targets), mend)
    # A is [rank, columns] and B is [rows, rank].
    tensors = adapter_tensors(shape, lora)
    widths = {name: size[1] if ".lora_A." in name else size[0] for name, size in tensors.items()}
    narrowest = min(widths, key=lambda name: widths[name])
    if lora.rank > widths[narrowest]:
        matrix = narrowest.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
        mend = f"{matrix} has a side of {widths[narrowest]}, and no higher rank than that: take it or less"
        yield Violation("policy.lora.rank", lora.rank, mend)


def _engine_violations(experiment: Experiment, shape: ModelShape) -> Iterator[Violation]:
    """The embedded engine is a plain dense decoder; a window that no sequence fills is none."""
    length = experiment.policy.max_sequence_length
    beyond = {
        "experts": shape.moe,
        "latent attention (MLA)": shape.mla,
        "sliding windows": any(window is not None and window < length for window in shape.windows),
        "attention sinks": shape.sinks,
        "norms after attention and MLP": shape.post_norms,
        f"the activation {shape.activation!r}": shape.activation != "silu",
    }
    found = [what for what, there in beyond.items() if there]
    if experiment.generation.backend == "torch" and found:
        mend = (
            f"the embedded engine samples dense Llama-like models only, and this one has {', '.join(found)}"
        )
        yield Violation("generation.backend", "torch", f"{mend}: take another model or back end")


def _thread_violations(experiment: Experiment, machine: Machine) -> Iterator[Violation]:
    """Threads beyond the cores wait for each other, and some thousands cannot be started."""
    if not is_this_machine(experiment, machine):
        return
    wanted = {
        "generation.threads": experiment.generation.threads,
        "cluster.policy_threads": experiment.cluster.policy_threads,
    }
    for field, threads in wanted.items():
        if threads is not None and threads > machine.cores:
            where = "a node of the job" if machine.nodes else "this machine"
            mend = f"{where} has {machine.cores} cores: take no more than that, or leave it out"
            yield Violation(field, threads, mend)
