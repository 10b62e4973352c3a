"""What one vLLM worker wants to be sent, and how it takes that into use.

    traced     slices, straight into the shape of its parameters   -> copied over (staged) or written there
    reloaded   whole tensors, for modules that compute with memory of their own -> vLLM's own loader

The layout is learned while the model is loaded: after its weights are there, and before post-processing has
given some of them the form that kernels want.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemorl.config.generation import Update
from nemorl.models.slices import TensorSlice

from .processing import parameters_of, watching
from .trace import LoaderTrace, trace_loader, uncovered
from .views import contiguous_strides

Shapes = Mapping[str, tuple[int, ...]]
"""Names and shapes of a checkpoint's tensors."""
Reload = Callable[[Iterable[tuple[str, Tensor]]], Any]

WHOLE = "whole:"
"""Before the HF name of a tensor that is delivered whole: the name of the memory it waits in."""

_RELOADER = "vllm.model_executor.model_loader.reload"


class Untraceable(ValueError):
    """A model into whose weights nothing can be written, and why."""


@dataclass(frozen=True)
class Learned:
    """What was seen while a model was loaded."""

    trace: LoaderTrace
    changed: Mapping[str, str]  # parameters of modules that post-processing touched, and why that counts
    problem: str | None  # why nothing can be written into the others; None where it can


def learn(model: nn.Module, tensors: Shapes, process: Callable[[], None]) -> Learned:
    """Trace the loader of a model that is loaded, and watch what `process`, the post-processing, changes."""
    changed: dict[str, str] = {}
    trace, problem = _trace(model, tensors)
    apart = _shared(model)
    with watching(model, changed):
        process()
    if tied := _shared(model) - apart:
        problem = (
            f"vLLM has tied {' and '.join(sorted(tied)[0])}, which the checkpoint keeps apart with equal "
            "values; training would part them"
        )
    if problem is None:
        problem = _uncovered(model, trace, changed)
    return Learned(trace, changed, problem)


@dataclass(frozen=True)
class WorkerLayout:
    """Where what comes from the checkpoint lies in a worker."""

    slices: tuple[TensorSlice, ...]
    whole: tuple[str, ...] = ()  # HF tensors that are delivered whole
    reasons: Mapping[str, str] = field(default_factory=dict)  # of parameters that therefore are not written


def layout_of(learned: Learned, tensors: Shapes, update: Update) -> WorkerLayout:
    """What a worker wants. Raises Untraceable where shards cannot be written."""
    if update == "reload":
        return WorkerLayout(_whole_slices(tensors, tensors), tuple(tensors))
    if learned.problem is not None:
        raise Untraceable(f"{learned.problem}. Set generation.update to reload")
    direct = (part for part in learned.trace.slices if part.param not in learned.changed)
    whole = learned.trace.sources(learned.changed)
    return WorkerLayout((*direct, *_whole_slices(tensors, whole)), whole, learned.changed)


@dataclass
class WorkerWeights:
    """Held by a worker. `tensors` is what an exchange writes; `commit` makes it the weights in use."""

    model: nn.Module
    layout: WorkerLayout
    reload: Reload
    in_place: bool
    dtype: torch.dtype  # of tensors that are delivered whole
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Mapping[str, Tensor]:
        """By the names of the layout; the same memory every time. Without `in_place` none of it is in use."""
        if not self._tensors:
            own = _targets(self.model)
            for part in self.layout.slices:
                if part.param in self._tensors:
                    continue
                if part.param.startswith(WHOLE):
                    self._tensors[part.param] = torch.empty(part.shape, dtype=self.dtype)
                else:
                    target = own[part.param]
                    self._tensors[part.param] = target if self.in_place else target.clone()
        return self._tensors

    def commit(self) -> None:
        """Take into use what was written: no step of the engine runs meanwhile."""
        tensors = self.tensors()
        if not self.in_place:
            own = _targets(self.model)
            for name, tensor in tensors.items():
                if not name.startswith(WHOLE):
                    own[name].copy_(tensor)
        if self.layout.whole:
            _forget_kernels(self.model)
            # Layers for which nothing comes keep what they have, of which the loader would warn one by one.
            with _quiet(bool(self.layout.reasons)), torch.no_grad():
                self.reload((name, tensors[WHOLE + name]) for name in self.layout.whole)
        _refresh_tied(self.model)


def _trace(model: nn.Module, tensors: Shapes) -> tuple[LoaderTrace, str | None]:
    load: Any = model.load_weights
    targets = _targets(model)
    try:
        trace = trace_loader(load, tensors, targets, next(iter(targets.values())).dtype)
    except Exception as error:  # noqa: BLE001 - whatever a loader does with tensors that have no memory
        cause = f"{type(error).__name__}: {error}"
        return LoaderTrace((), {}), f"the loader of {type(model).__name__} cannot be followed ({cause})"
    return trace, next((f"{name}: {reason}" for name, reason in trace.unclear.items()), None)


def _uncovered(model: nn.Module, trace: LoaderTrace, changed: Mapping[str, str]) -> str | None:
    """What is wrong with those that are to be written; buffers count where something of them is loaded."""
    loaded = {part.param for part in trace.slices}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in loaded}
    wanted = {name: t for name, t in (parameters_of(model) | buffers).items() if name not in changed}
    direct = LoaderTrace(tuple(part for part in trace.slices if part.param in wanted), {})
    wrong = uncovered(direct, wanted)
    if not wrong:
        return None
    name, reason = next(iter(wrong.items()))
    return f"{len(wrong)} of {len(wanted)} parameters cannot be written in shards, first {name}: {reason}"


def _shared(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of parameters that are one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(int(parameter.untyped_storage()._cdata), []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


def _whole_slices(tensors: Shapes, names: Iterable[str]) -> tuple[TensorSlice, ...]:
    shapes = {name: tensors[name] for name in names}
    return tuple(
        TensorSlice(name, shape, (0,) * len(shape), shape, WHOLE + name, 0, contiguous_strides(shape))
        for name, shape in shapes.items()
    )


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Everything that a loader may fill: parameters, and buffers such as a router's bias."""
    return parameters_of(model) | dict(model.named_buffers())


def _forget_kernels(model: nn.Module) -> None:
    """Have the loader make the kernels of experts on a CPU anew.

    vLLM 0.32 packs experts for a CPU when it makes their kernel, and only then: reloaded under a kernel that
    is there, they would be multiplied unpacked. Nothing on a CPU has captured where the old ones lie.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _refresh_tied(model: nn.Module) -> None:
    """Have heads that share the embedding's weights pack them again, where a CPU's kernels keep a copy.

    vLLM's loader sees to the embedding alone, into which the checkpoint's tensor goes.
    """
    for _, *others in _shared(model):
        for name in others:
            module = model.get_submodule(name.rpartition(".")[0])
            method: Any = getattr(module, "quant_method", None)
            on_cpu = next(module.parameters()).device.type == "cpu"
            if on_cpu and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)


@contextmanager
def _quiet(partial: bool) -> Iterator[None]:
    logger = logging.getLogger(_RELOADER)
    level = logger.level
    if partial:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
