"""What one vLLM worker requires, and how it takes that into use.

    traced     slices, straight into the shape of its parameters   -> copied over (staged) or written there
    reloaded   whole tensors, for modules that compute with memory of their own -> vLLM's own loader
    streamed   whole tensors of all modules, each into vLLM's loader as it arrives
    adapters   a policy's LoRA, which vLLM computes on top of weights that stay as they are

Layers (MTP) or a head that drafts, where the policy trains them, are a second model with a loader of its own.

The layout is learned when weights are loaded, before post-processing replaces, changes or copies parameters
for its kernels. Writing into these would not be seen, or would be wrong, so their modules are reloaded.
"""

import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nemorl.config.policy import LoraConfig
from nemorl.device import packs_loaded_weights
from nemorl.models.slices import TensorSlice
from nemorl.weights.whole_tensors import whole_slices

from .trace import LoaderTrace, storage_of, trace_loader, uncovered

if TYPE_CHECKING:
    from .cpu_linear import PackedLayers

_CHUNK = 1 << 20
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by element size
# Modules are looked at one by one.
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type, nn.Module)
_DEEPEST = 4  # objects in objects that are looked into


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once, by the first of its names."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def touched_by(process: Callable[[], None], model: nn.Module) -> dict[str, str]:
    """Run the post-processing; the parameters of modules that it touched, and why.

    Those of the modules in such a module count too: latent attention may multiply by copies of `kv_b_proj`.
    Views of parameters are no copies.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    before = {
        name: (_states(module), _attributes(module), [first[id(p)] for p in module.parameters()])
        for name, module in model.named_modules()
    }
    process()
    changed: dict[str, str] = {}
    for name, module in model.named_modules():
        states, attributes, inside = before.get(name, ({}, {}, []))
        if (reason := _difference(module, states, attributes)) is not None:
            own = {*states, *dict(module.named_parameters(recurse=False))}
            changed |= dict.fromkeys(
                [*inside, *(f"{name}.{parameter}".lstrip(".") for parameter in own)], reason
            )
    return changed


def _difference(
    module: nn.Module, states: Mapping[str, object], attributes: Mapping[str, object]
) -> str | None:
    now = _states(module)
    new = now.keys() - states.keys()
    own = {storage_of(parameter) for name, parameter in module.named_parameters() if name not in new}
    if states.keys() - now.keys() or not own.issuperset(storage_of(module.get_parameter(n)) for n in new):
        return "post-processing gave the module other parameters"
    if changed := [name for name, state in states.items() if now[name] != state]:
        return f"post-processing changed {changed[0]}"
    own |= {storage_of(buffer) for buffer in module.buffers(recurse=False)}
    for name, value in _attributes(module).items():
        if attributes.get(name) is not value and _other_memory(value, own, _DEEPEST):
            return f"post-processing keeps memory of its own in {name}"
    return None


def _states(module: nn.Module) -> dict[str, object]:
    """Of each parameter where it lies, how, and what is in it."""
    return {
        name: (storage_of(p), tuple(p.shape), p.stride(), p.dtype, _digest(p))
        for name, p in module.named_parameters(recurse=False)
    }


def _attributes(module: nn.Module) -> dict[str, object]:
    kept = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    of_method = getattr(getattr(module, "quant_method", None), "__dict__", {})
    return kept | {f"quant_method.{name}": value for name, value in of_method.items()}


def _other_memory(value: object, own: set[int], depth: int) -> bool:
    """True if tensors other than `own` are reachable; what lies too deep counts as such."""
    if value is None or isinstance(value, _PLAIN):
        return False
    if isinstance(value, Tensor):
        return value.numel() > 1 and storage_of(value) not in own
    return depth == 0 or any(_other_memory(part, own, depth - 1) for part in _parts(value))


def _parts(value: object) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell.cell_contents is not value]
        return [*cells, *(value.__defaults__ or ())]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _digest(parameter: Tensor) -> int:
    """A number that changes with any element and with their order."""
    total, first = 0, 1
    for chunk in parameter.detach().reshape(-1).split(_CHUNK):
        bits = chunk.contiguous().view(_INTEGERS[chunk.element_size()]).to(torch.int64)
        weights = torch.arange(first, first + 2 * bits.numel(), 2, device=bits.device)  # odd numbers
        total += int((bits * weights).sum())
        first += 2 * bits.numel()
    return total


Shapes = Mapping[str, tuple[int, ...]]  # of a checkpoint's tensors
WHOLE = "whole:"  # before the HF name of a tensor that is delivered whole: the name of the memory it waits in
_RELOADER = "vllm.model_executor.model_loader.reload"


class Untraceable(ValueError):
    """A model into whose weights nothing can be written, and why."""


class SharedHead(ValueError):
    """A head for drafts to which vLLM has given the policy's `lm_head`, which an update would overwrite."""

    def __init__(self, folder: Path) -> None:
        reason = "vLLM has given it the policy's, which it would share"
        super().__init__(f"the head in {folder} has no lm_head of its own, or has the policy's: {reason}")


@dataclass(frozen=True)
class Learned:
    trace: LoaderTrace
    changed: Mapping[str, str]  # parameters of modules that post-processing touched, and why that counts
    problem: str | None  # why nothing can be written into the others; None where it can

    def named(self, prefix: str) -> "Learned":
        """The same for tensors that have this before their names in updates."""
        slices = tuple(replace(part, name=prefix + part.name) for part in self.trace.slices)
        return replace(self, trace=replace(self.trace, slices=slices))


def learn(
    model: nn.Module, tensors: Shapes, process: Callable[[], None], elsewhere: Collection[str] = ()
) -> Learned:
    """Trace the loader of a model that is loaded, and watch what `process`, the post-processing, changes.

    Parameters `elsewhere` are another model's in the end, which brings them: `tensors` do not fill them.
    """
    load: Any = model.load_weights
    targets = _targets(model)
    try:
        trace = trace_loader(load, tensors, targets, next(iter(targets.values())).dtype)
        problem = next((f"{name}: {reason}" for name, reason in trace.unclear.items()), None)
    except Exception as error:  # noqa: BLE001 - whatever a loader does with tensors that have no memory
        trace, cause = LoaderTrace((), {}), f"{type(error).__name__}: {error}"
        problem = f"the loader of {type(model).__name__} cannot be followed ({cause})"
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(elsewhere)
    apart = _shared(model, own)
    changed = touched_by(process, model)
    if tied := _shared(model, own) - apart:
        names = " and ".join(min(tied))
        problem = f"vLLM has tied {names}, which the checkpoint keeps apart; training would part them"
    if problem is None:  # check that what is to be written is covered; buffers count if some of one is loaded
        loaded = {part.param for part in trace.slices}
        targets = {n: p for n, p in parameters_of(model).items() if n in own}
        targets |= {n: b for n, b in model.named_buffers() if n in loaded}
        writable = {name: tensor for name, tensor in targets.items() if name not in changed}
        direct = LoaderTrace(tuple(part for part in trace.slices if part.param in writable), {})
        if wrong := uncovered(direct, writable):
            name, reason = next(iter(wrong.items()))
            counts = f"{len(wrong)} of {len(writable)} parameters"
            problem = f"{counts} cannot be written in shards, first {name}: {reason}"
    return Learned(trace, changed, problem)


@dataclass(frozen=True)
class WorkerLayout:
    slices: tuple[TensorSlice, ...]
    whole: tuple[str, ...] = ()  # HF tensors that are delivered whole
    reasons: Mapping[str, str] = field(default_factory=dict)  # of parameters that therefore are not written


def layout_of(learned: Learned, tensors: Shapes) -> WorkerLayout:
    """What a worker requires that writes shards. Raises Untraceable where they cannot be written."""
    if learned.problem is not None:
        raise Untraceable(f"{learned.problem}. Set generation.update to reload")
    slices, changed = learned.trace.slices, learned.changed
    direct = (part for part in slices if part.param not in changed)
    loaded_again = [part for part in slices if part.param in changed]
    whole = tuple(dict.fromkeys(part.name for part in loaded_again))
    reasons = {part.param: changed[part.param] for part in loaded_again}
    return WorkerLayout((*direct, *_whole_slices(tensors, whole)), whole, reasons)


@dataclass
class WorkerWeights:
    """Held by a worker. `tensors` is what an exchange writes; `commit` makes it the weights in use."""

    model: nn.Module
    layout: WorkerLayout
    reload: Callable[[Iterable[tuple[str, Tensor]]], Any]
    in_place: bool
    dtype: torch.dtype  # of tensors that are delivered whole
    packed: "PackedLayers"
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Mapping[str, Tensor]:
        """By the names of the layout; the same memory every time. Without `in_place` none of it is in use."""
        if not self._tensors:
            own = _targets(self.model)
            for name, shape in {part.param: part.shape for part in self.layout.slices}.items():
                if name.startswith(WHOLE):
                    self._tensors[name] = torch.empty(shape, dtype=self.dtype)
                else:
                    unused = self.in_place or name in self.packed.unread
                    self._tensors[name] = own[name] if unused else own[name].clone()
        return self._tensors

    def commit(self) -> None:
        tensors = self.tensors()
        if not self.in_place:
            own = _targets(self.model)
            for name, tensor in tensors.items():
                if not name.startswith(WHOLE) and name not in self.packed.unread:
                    own[name].copy_(tensor)
        if self.layout.whole:
            _forget_kernels(self.model)
            logger = logging.getLogger(_RELOADER)
            level = logger.level
            if self.layout.reasons:  # it would warn of every layer for which nothing comes
                logger.setLevel(logging.ERROR)
            try:
                with torch.no_grad():
                    self.reload((name, tensors[WHOLE + name]) for name in self.layout.whole)
            finally:
                logger.setLevel(level)
        self.packed.pack()


@dataclass(frozen=True)
class WorkerModels:
    """The weights of several models, which are exchanged and taken into use together."""

    parts: Mapping[str, WorkerWeights]  # by what their parameters' names begin with here

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        return tuple(
            replace(part, param=prefix + part.param)
            for prefix, weights in self.parts.items()
            for part in weights.layout.slices
        )

    @property
    def reasons(self) -> dict[str, str]:
        return {
            prefix + name: reason
            for prefix, weights in self.parts.items()
            for name, reason in weights.layout.reasons.items()
        }

    def tensors(self) -> Mapping[str, Tensor]:
        return {
            prefix + name: tensor
            for prefix, weights in self.parts.items()
            for name, tensor in weights.tensors().items()
        }

    def commit(self) -> None:
        for weights in self.parts.values():
            weights.commit()


@dataclass(frozen=True)
class StreamingLoader:
    """vLLM's own loader, for a `WholeTensorReceiver`: it quantizes each layer once all of it has arrived."""

    model: nn.Module
    reload: Callable[[Iterable[tuple[str, Tensor]]], Any]
    recover: Callable[[], None]  # put back what a reload that failed has taken out of the model

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        _forget_kernels(self.model)
        try:
            with torch.no_grad():
                self.reload(tensors)
        except BaseException:
            self.recover()
            raise

    def finish(self) -> None:
        _refresh_tied(self.model)


def reload_drafts(model: nn.Module, vllm_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load tensors into what drafts: vLLM's `reload_weights` of a worker is for the policy's model."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    _forget_kernels(model)
    reload_weights(vllm_config, model, tensors, weights_path=None, is_checkpoint_format=True)


def reload_both(
    reload: Callable[[Iterable[tuple[str, Tensor]]], Any],
    reload_drafts: Callable[[Iterable[tuple[str, Tensor]]], Any],
    names: Collection[str],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Load a stream of tensors, of which those with `names` are the drafts'.

    These are held until the policy's are loaded, since vLLM's loaders expect all tensors in one call.
    """
    held: dict[str, Tensor] = {}

    def of_policy() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in names:
                held[name] = tensor
            else:
                yield name, tensor

    reload(of_policy())
    reload_drafts(held.items())


def end_reload(model: nn.Module, model_config: Any) -> None:
    """End a reload of vLLM 0.32 that failed: layers that are incomplete get their parameters back.

    vLLM would add the next reload's tensors to those that it holds back for incomplete layers.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


_FUSED_EXPERTS = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}


def reload_with_sinks(
    model: nn.Module,
    reload_weights: Callable[..., Any],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Call vLLM's `reload_weights` for a model of which vLLM 0.32's loader copies experts and sinks itself.

    A reload sees what passes through the loaders of parameters, and would put back the old experts and sinks.
    So experts come one at a time, by vLLM's names, and sinks are written afterwards.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    sinks: dict[str, Tensor] = {}

    def by_loaders() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            block, experts, kind = name.partition(".mlp.experts.")
            if name.endswith(".sinks"):
                sinks[name.replace(".self_attn.", ".attn.")] = tensor
            elif experts:
                for number, values in enumerate(tensor):
                    yield f"{block}{experts}{number}.{_FUSED_EXPERTS[kind]}", values
            else:
                yield name, tensor

    reload_weights(weights_iterator=by_loaders())
    parameters, rank = parameters_of(model), get_tensor_model_parallel_rank()
    for name in sinks.keys() & parameters.keys():  # other stages have the rest
        heads = len(parameters[name])
        parameters[name].copy_(sinks[name].narrow(0, rank * heads, heads))


def _shared(model: nn.Module, among: Collection[str] | None = None) -> set[tuple[str, ...]]:
    """Names of parameters with the same memory, all or some."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if among is None or name in among:
            names.setdefault(storage_of(parameter), []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


def _whole_slices(tensors: Shapes, names: Iterable[str]) -> tuple[TensorSlice, ...]:
    parts = whole_slices({name: tensors[name] for name in names})
    return tuple(replace(part, param=WHOLE + part.name) for part in parts)


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Everything that a loader may fill: parameters, and buffers such as a router's bias."""
    return parameters_of(model) | dict(model.named_buffers())


def _forget_kernels(model: nn.Module) -> None:
    """Have the loader make the kernels of experts on a CPU again: only then vLLM 0.32 packs experts."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        has_kernel = getattr(method, "moe_kernel", None) is not None
        if has_kernel and packs_loaded_weights(next(module.parameters()).device):
            method.moe_kernel = None


def _refresh_tied(model: nn.Module) -> None:
    """Have heads that share the embedding's weights pack them again, which vLLM's loader leaves out."""
    for _, *others in _shared(model):
        for name in others:
            module = model.get_submodule(name.rpartition(".")[0])
            method: Any = getattr(module, "quant_method", None)
            packs = packs_loaded_weights(next(module.parameters()).device)
            if packs and hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)


ADAPTER, ADAPTER_ID = "policy", 1  # vLLM's name and number for it


def compute_one_adapter() -> None:
    """Have vLLM 0.32 compute it on a CPU as two matrix products instead of copying it for every token."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    of_many = PunicaWrapperCPU.add_lora_linear

    def add_lora_linear(
        self: Any,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **options: Any,
    ) -> None:
        if self.no_lora or not bool((self.token_lora_indices == 0).all()):  # when vLLM tries itself out
            of_many(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **options)
            return
        rows, start = x.flatten(0, -2).float(), 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = (rows @ a[0, 0].float().t() * scale).to(y.dtype)
            y.view(-1, y.shape[-1])[:, start : start + width] += low @ b[0, 0].to(y.dtype).t()
            start += width

    PunicaWrapperCPU.add_lora_linear = add_lora_linear


class Unadaptable(ValueError):
    """A model in which vLLM has no place for some adapter."""


@dataclass
class WorkerAdapters:
    """Held by a worker whose engine was started with `enable_lora`, as `WorkerWeights`; names are PEFT's."""

    model: nn.Module
    lora: LoraConfig
    shapes: Shapes
    dtype: torch.dtype
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Mapping[str, Tensor]:
        """The same memory every time, none of it in use: on the host, from where vLLM takes copies."""
        if not self._tensors:
            self._tensors = {
                name: torch.zeros(size, dtype=self.dtype, device="cpu") for name, size in self.shapes.items()
            }
        return self._tensors

    def commit(self) -> None:
        """Raises Unadaptable."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.model_executor.models.utils import is_pp_missing_parameter

        model: Any = self.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in self.tensors().items()},  # it is scaled in place
            PEFTHelper(r=self.lora.rank, lora_alpha=self.lora.alpha, target_modules=[]),
            device="cpu",
            dtype=self.dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        manager = model.lora_manager
        # vLLM would leave out without a word what it does not find.
        places = set()
        for name in manager.modules:
            parent, _, own = name.rpartition(".")
            places |= {f"{parent}.{part}" for part in manager.packed_modules_mapping.get(own, [own])}
        lost = [n for n in adapter.loras if n not in places and not is_pp_missing_parameter(n, model)]
        if lost:
            problem = f"vLLM's {type(model).__name__} has no place for {len(lost)} adapters, first that of"
            raise Unadaptable(f"{problem} {lost[0]}. Set generation.adapters to merged")
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
