"""Extension of vLLM's worker class: the receiving side of the weight exchange, in every worker process.

vLLM imports it before the model is loaded (`worker_extension_cls`), and `collective_rpc` calls its methods
with texts and numbers. A refit runs in a thread next to the steps; its report goes to a socket.
"""

import ctypes
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import base_loader

from nemorl.config.generation import Update
from nemorl.config.policy import LoraConfig
from nemorl.config.quantization import QuantizationConfig
from nemorl.device import make_current
from nemorl.models.adapters import adapter_tensors
from nemorl.models.eagle3_shape import ANY_LAYERS, SENT, Eagle3Shape, is_head
from nemorl.models.layout import hf_tensors, mtp_tensors
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.weights.endpoints import WeightReceiver
from nemorl.weights.messages import ReceiveReport
from nemorl.weights.whole_tensors import WholeTensorReceiver, whole_slices

from . import quantized
from .arguments import LEARNED_LAYOUT, OWNER, QUANTIZATION, TRAINED_DRAFTS
from .cpu_linear import PackedLayers, embeddings_of, int8_kernels_for_float32, load_unpacked
from .host import LAYOUT, PARTS, REPORT, SESSION, remove_folder
from .trace import LoaderTrace
from .weights import (
    Learned,
    SharedHead,
    StreamingLoader,
    WorkerAdapters,
    WorkerModels,
    WorkerWeights,
    compute_one_adapter,
    end_reload,
    layout_of,
    learn,
    reload_both,
    reload_drafts,
    reload_with_sinks,
)

_PR_SET_PDEATHSIG = 1
_END_SECONDS = 2.0  # that an update which was given up may take to end
_process = base_loader.process_weights_after_loading
_NOTHING = Learned(LoaderTrace((), {}), {}, "its loading was not watched")
_learned: dict[str, Learned] = {}  # of the models of this process, by the prefix of their parameters
_POLICY, _DRAFTS = "", "drafts."  # these prefixes
_LM_HEAD, _D2T = "lm_head.", "draft_id_to_target_id"  # parameters of vLLM's class of a head for drafts
_trains_drafts = bool(os.environ.get(TRAINED_DRAFTS))


def _process_and_learn(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
    def process() -> None:
        _process(model, model_config, target_device)

    if model_config.runner_type != "draft":
        _learned[_POLICY] = learn(model, hf_tensors(load_shape(Path(model_config.model))), process)
    elif _trains_drafts:  # which then gets the embedding of the policy's model, and layers its `lm_head`
        folder, elsewhere = Path(model_config.model), embeddings_of(model)
        if is_head(folder):
            kept = {name for name in elsewhere if not name.startswith(_LM_HEAD)} | {_D2T}
            tensors = Eagle3Shape.read(folder, ANY_LAYERS).tensors()
            _learned[_DRAFTS] = learn(model, tensors, process, kept).named(SENT)
        else:
            _learned[_DRAFTS] = learn(model, _layers(folder), process, elsewhere)
    else:  # a second model, for drafts, which takes no weights
        process()


def _layers(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of the layers for further tokens."""
    return mtp_tensors(load_shape(folder, with_mtp=True))


def _quantize_in_loader(quantization: QuantizationConfig) -> None:
    """Have vLLM's loader quantize what it reads, and its int8 kernels take it."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    read = DefaultModelLoader.get_all_weights
    int8_kernels_for_float32()
    pack = CPUInt8ScaledMMLinearKernel.process_weights_for_onednn

    def read_and_quantize(
        self: DefaultModelLoader, model_config: Any, model: nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        shape = load_shape(Path(model_config.model))
        return quantized.of_folder(shape, quantization, read(self, model_config, model))

    def pack_and_keep_scales(self: Any, layer: nn.Module) -> None:
        pack(self, layer)
        self.nemorl_scales = getattr(layer, self.layer_param_names[1])

    DefaultModelLoader.get_all_weights = read_and_quantize
    # vLLM 0.32's oneDNN kernel of int8 keeps only the address of its scales. A reload makes new ones, copies
    # them into the old parameter and frees them, after which the kernel would read memory of others.
    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = pack_and_keep_scales


def _end_engine_with(owner: int, engine: int, rendezvous: Path) -> None:
    """Kill the engine when the replica's process has ended, and remove its files; both are pidfds."""
    select.select([owner], [], [])
    remove_folder(Path(os.environ["VLLM_RPC_BASE_PATH"]))
    rendezvous.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(engine, signal.SIGKILL)


_is_engine = os.environ.get(OWNER) == str(os.getppid())  # then the only worker is in the engine's process
if not _is_engine:  # a worker whose engine was killed ends too; Linux only, as vLLM's workers are
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
_quantization = None
if os.environ.get(QUANTIZATION):
    _quantization = QuantizationConfig.model_validate_json(os.environ[QUANTIZATION])
    _quantize_in_loader(_quantization)
if os.environ.get(LEARNED_LAYOUT):
    base_loader.process_weights_after_loading = _process_and_learn
    load_unpacked()


class VllmWorkerExtension:
    """The names begin with `nemorl_`, because vLLM refuses those that its worker has."""

    def nemorl_open(self: Any, update: Update, lora: str | None) -> str:
        """Get ready for updates. With `lora`, a `LoraConfig`, adapters come alone."""
        rendezvous = Path(self.distributed_init_method.removeprefix("file://"))
        owner, engine = int(os.environ[OWNER]), os.getpid() if _is_engine else os.getppid()
        # By pidfd: a number may be another process's by then, as the parent of an orphan is.
        watched = (os.pidfd_open(owner), os.pidfd_open(engine), rendezvous)
        threading.Thread(target=_end_engine_with, args=watched, name="owner watch", daemon=True).start()
        reasons = make_receiver(self, update, lora)
        layout_json = LAYOUT.dump_python(self.nemorl.describe(), mode="json")
        processes = {"process": os.getpid(), "engine": engine, "meeting": str(rendezvous)}
        return json.dumps({**processes, "layout": layout_json, "reasons": dict(reasons)})

    def nemorl_prepare(self: Any, parts: str) -> None:
        self.nemorl.prepare(PARTS.validate_json(parts)[self.rank])

    def nemorl_receive(self: Any, session: str, reports: str) -> None:
        """Begin to receive; the report, or the error, goes to the socket at `reports`."""
        receive_in_thread(self, session, lambda answer: _send(answer, reports))

    def nemorl_commit(self: Any, version: int) -> None:
        self.nemorl.commit(version)

    def nemorl_abandon(self: Any) -> str | None:
        """Forget an update that did not finish; return the reason if the weights in use are corrupt."""
        self.nemorl.abandon()
        receiving: threading.Thread | None = getattr(self, "nemorl_receiving", None)
        if receiving is not None:
            receiving.join(_END_SECONDS)  # the next update finds a process group that is not in use
        return self.nemorl.corruption  # type: ignore[no-any-return]


class _Updated(NamedTuple):
    """A model that updates reach, their tensors, and vLLM's loader of these."""

    model: nn.Module
    tensors: Mapping[str, tuple[int, ...]]
    reload: Callable[[Iterable[tuple[str, Tensor]]], None]


def _updated_models(worker: Any, shape: ModelShape) -> dict[str, _Updated]:
    """By the prefix of their parameters."""
    runner = worker.model_runner
    model = runner.get_model()

    def reload(tensors: Iterable[tuple[str, Tensor]]) -> None:
        if _quantization is not None:
            tensors = quantized.of_update(shape, _quantization, tensors)
        with set_current_vllm_config(worker.vllm_config):  # in the thread of a refit there is none
            if shape.sinks:
                reload_with_sinks(model, runner.reload_weights, tensors)
            else:
                runner.reload_weights(weights_iterator=tensors)

    found = {_POLICY: _Updated(model, hf_tensors(shape), reload)}
    if _trains_drafts:
        drafts = runner.get_draft_model()
        folder = Path(worker.vllm_config.speculative_config.draft_model_config.model)
        of_head = is_head(folder)
        if of_head and drafts.lm_head is getattr(model, "lm_head", None):
            raise SharedHead(folder)
        sent = Eagle3Shape.read(folder, ANY_LAYERS).sent_tensors() if of_head else _layers(folder)

        def reload_what_drafts(tensors: Iterable[tuple[str, Tensor]]) -> None:
            named = ((name.removeprefix(SENT), tensor) for name, tensor in tensors)
            with set_current_vllm_config(worker.vllm_config):
                reload_drafts(drafts, worker.vllm_config, named)

        found[_DRAFTS] = _Updated(drafts, sent, reload_what_drafts)
    return found


def make_receiver(worker: Any, update: Update, lora: str | None) -> Mapping[str, str]:
    """Set `nemorl` of a worker. Returns why some parameters take complete tensors."""
    runner, dtype = worker.model_runner, worker.model_runner.model_config.dtype
    shape = load_shape(Path(runner.model_config.model))
    models = _updated_models(worker, shape)
    model, _, reload = models[_POLICY]
    reasons: Mapping[str, str] = {}

    if lora is not None:
        config = LoraConfig.model_validate_json(lora)
        shapes = adapter_tensors(shape, config)
        adapters = WorkerAdapters(model, config, shapes, dtype)
        adapters.commit()  # they add nothing yet
        compute_one_adapter()
        worker.nemorl = WeightReceiver(
            whole_slices(shapes), adapters.tensors, lambda _: adapters.commit(), in_place=False
        )
    elif update == "reload":
        kind = str(dtype).removeprefix("torch.")
        tensors, kinds = quantized.update_tensors(shape, _quantization, kind)
        if drafts := models.get(_DRAFTS):
            tensors |= drafts.tensors
            kinds |= dict.fromkeys(drafts.tensors, kind)
            reload = partial(reload_both, reload, drafts.reload, drafts.tensors)

        def recover() -> None:
            for each in models.values():
                end_reload(each.model, runner.model_config)

        loader = StreamingLoader(model, reload, recover)
        worker.nemorl = WholeTensorReceiver(tensors, kinds, loader, device=worker.device)
    else:
        in_place, eager = update == "in_place", runner.model_config.enforce_eager
        if not hasattr(worker, "nemorl_packed"):  # a server makes a receiver for each run
            worker.nemorl_packed = {
                name: PackedLayers(each.model, eager=eager) for name, each in models.items()
            }
        parts = {}
        for name, each in models.items():
            layout = layout_of(_learned.get(name, _NOTHING), each.tensors)
            packed = worker.nemorl_packed[name]
            parts[name] = WorkerWeights(each.model, layout, each.reload, in_place, dtype, packed)
        held = WorkerModels(parts)
        reasons = held.reasons
        worker.nemorl = WeightReceiver(held.slices, held.tensors, lambda _: held.commit(), in_place=in_place)
    return reasons


def receive_in_thread(worker: Any, session: str, report: Callable[[str], None]) -> None:
    """Begin to receive; the thread calls `report` with what came of it."""
    work = (worker.nemorl.begin(SESSION.validate_json(session)), worker.device, worker.rank, report)
    receiving = threading.Thread(target=_receive, args=work, name="weight receiver", daemon=True)
    worker.nemorl_receiving = receiving
    receiving.start()


def _receive(
    receive: Callable[[], ReceiveReport], device: torch.device, rank: int, report: Callable[[str], None]
) -> None:
    try:
        make_current(device)  # a process group and CUDA IPC use the device of the thread
        answer = {"rank": rank, "report": REPORT.dump_python(receive(), mode="json")}
    except Exception as error:  # noqa: BLE001 - reported to the process that asked
        answer = {"rank": rank, "error": type(error).__name__, "message": str(error)}
    report(json.dumps(answer))


def _send(answer: str, address: str) -> None:
    # Who asked may have given up.
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(address)
        connection.sendall(answer.encode())
