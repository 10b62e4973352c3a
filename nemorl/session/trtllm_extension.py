"""What is mixed into TensorRT-LLM's workers (`ray_worker_extension_cls`): standing still, and taking weights.

Everything that touches weights goes through the worker's own `update_weights` body, which takes handles
`{gpu: [(name, (rebuild, arguments)), ...]}` and, when all have come, None. It is called undecorated: the
engine is held once around a whole update, since between two calls it would step with half of the weights.

Methods have a prefix, since a name that the worker has already is refused; they run one at a time, in the
worker's main thread.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensorrt_llm._torch.utils import get_device_uuid
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor

from nemorl.weights.messages import Part, ReceiveReport, ReceiverLayout
from nemorl.weights.session import RefitSession
from nemorl.weights.whole_tensors import WholeTensorReceiver

_take_handles = WorkerExtension.update_weights.__wrapped__
_DEVICE_ARGUMENT = 6  # of a rebuild function's arguments; the worker puts its own device there


class NemorlExtension(WorkerExtension):
    """`self.engine` is the worker's PyExecutor, `self.device_id` its GPU, `self.global_rank` its rank."""

    _nemorl_control: Any = None  # held while it is there
    _nemorl_unfinished = False  # weights have been loaded since the last None
    _nemorl_receiver: WholeTensorReceiver | None = None

    def nemorl_device(self) -> str:
        """The name of this worker's GPU in handles."""
        return str(get_device_uuid(self.device_id))

    def nemorl_hold(self) -> dict[int, int]:
        """Stand between two steps; the tokens sampled so far of every request in the batch."""
        if self._nemorl_control is None:  # else it stands since an update that never came to its end
            control = self.engine.control_action(drain=False)
            control.__enter__()
            self._nemorl_control = control
        return {
            request.py_client_id: request.get_num_tokens(0) - request.py_orig_prompt_len
            for request in self.engine.active_requests
        }

    def nemorl_release(self) -> None:
        """Step again. Raises RuntimeError for an update that never came to its end."""
        if self._nemorl_unfinished:
            raise RuntimeError(
                "new weights were loaded and the final None did not follow, so the model is half prepared: "
                "finish the update or give it up"
            )
        control, self._nemorl_control = self._nemorl_control, None
        control.__exit__(None, None, None)

    def nemorl_load(self, handles: Mapping[str, Any]) -> None:
        """Take some whole HF tensors by their handles, while the engine is held."""
        if self._nemorl_control is None:
            raise RuntimeError("weights came while the engine was sampling: hold it first")
        self._nemorl_unfinished = True
        _take_handles(self, handles)

    def nemorl_finish(self, recompute: bool) -> None:
        """All have come. `recompute` the KV cache of sequences in flight."""
        _take_handles(self, None)
        if recompute:
            self.engine.recompute_active_requests()
        self._nemorl_unfinished = False

    def nemorl_give_up(self) -> str | None:
        """Forget an update; why the weights are of two versions, if they are."""
        self._nemorl_unfinished = False
        if self._nemorl_receiver is None:
            return None
        self._nemorl_receiver.abandon()
        return self._nemorl_receiver.torn

    def nemorl_describe(
        self, tensors: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], kind: str, batch_bytes: int
    ) -> ReceiverLayout:
        """Become a receiver of whole tensors on this worker's device, which is of `kind`."""
        device = torch.device(kind, self.device_id) if kind == "cuda" else torch.device(kind)
        self._nemorl_receiver = WholeTensorReceiver(
            tensors, dtypes, _OwnLoader(self), device=device, batch_bytes=batch_bytes
        )
        return self._nemorl_receiver.describe()

    def nemorl_prepare(self, parts: tuple[Part, ...]) -> None:
        """Keep this rank's part of the plan, out of those of all the engine's ranks."""
        self._nemorl_own.prepare(parts[self.global_rank])

    def nemorl_receive(self, session: RefitSession) -> ReceiveReport:
        """Load what comes, while the engine is held."""
        return self._nemorl_own.receive(session)

    def nemorl_commit(self, version: int, recompute: bool) -> None:
        """Make what was loaded the weights in use."""
        self._nemorl_own.commit(version)
        if recompute:
            self.engine.recompute_active_requests()

    @property
    def _nemorl_own(self) -> WholeTensorReceiver:
        assert self._nemorl_receiver is not None, "describe comes first"
        return self._nemorl_receiver


class _OwnLoader:
    """A worker's loader for tensors of its own process: handles that give back what was put into them."""

    def __init__(self, worker: NemorlExtension) -> None:
        self._worker = worker

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take some whole tensors."""
        handles = [(name, (_given, (tensor, *[None] * _DEVICE_ARGUMENT))) for name, tensor in tensors.items()]
        self._worker.nemorl_load({self._worker.nemorl_device(): handles})

    def finish(self) -> None:
        """All have come."""
        self._worker.nemorl_finish(recompute=False)


def _given(tensor: Tensor, *_: object) -> Tensor:
    return tensor
