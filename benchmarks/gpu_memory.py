"""How fast does a policy leave its GPU and come back, and what does the host hold meanwhile?

Also the two other users of the host's memory: an optimizer whose state lives there, and the copy that an
asynchronous checkpoint writes from.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpu_setting import Row, Setting, per_second, policy
from gpu_training import batch_of
from meter import measured
from training_work import Work, equal_work

from nemorl.algorithms.policy_losses import CrossEntropyLoss
from nemorl.config.policy import AdamConfig, OffloadConfig
from nemorl.megatron.worker import PolicyWorker

ROUNDS = 3


def measure(setting: Setting) -> tuple[list[Row], Row]:
    folder, shape = setting.large()
    length = 64 if setting.small else 1024
    work = equal_work(2, length, 2 * length, shape.vocab_size)
    fields: Row = {"max_sequence_length": length, "micro_batch_tokens": 2 * length}
    rows: list[Row] = []
    details: Row = {}
    offload = OffloadConfig(weights=True, optimizer=True)
    with policy(setting, folder, optimizer=AdamConfig(lr=1e-6), offload=offload, **fields) as worker:
        worker.load_batch(batch_of(work))
        worker.train([[0, 1]], CrossEntropyLoss())
        before = state(worker)
        addresses = [tensor.data_ptr() for tensor in worker.parameters().values()]
        moved = worker.offload()
        pinned = pinned_bytes(setting)
        worker.onload()
        details["state is equal to the bit"] = all(map(torch.equal, before, state(worker)))
        back = [tensor.data_ptr() for tensor in worker.parameters().values()]
        details["addresses are unchanged"] = "yes" if addresses == back else "no, and nothing relies on it"
        details["pinned bytes over moved bytes"] = pinned / moved if pinned else 0.0
        # Gradients are freed, not copied: they are zero when they come back.
        rows.append(row_of(setting, "offload", moved, worker.offload, after=worker.onload))
        rows.append(row_of(setting, "onload", moved, worker.onload, before=worker.offload))
        size = sum(tensor.nbytes for tensor in state(worker))
        rows.append(row_of(setting, "copy for a checkpoint", size, worker.copy_for_checkpoint))
    on_host = AdamConfig(lr=1e-6, on_host=True)
    rows.append(step_row(setting, "Adam on the device", work, optimizer=AdamConfig(lr=1e-6), **fields))
    rows.append(step_row(setting, "Adam in host memory", work, optimizer=on_host, **fields))
    return rows, details


def step_row(setting: Setting, name: str, work: Work, **fields: Any) -> Row:
    """A step of an optimizer on gradients that are there."""
    with policy(setting, setting.large()[0], **fields) as worker:
        worker.load_batch(batch_of(work))
        worker.train([[0, 1]], CrossEntropyLoss())
        size = sum(tensor.nbytes for tensor in worker.parameters().values())
        return row_of(setting, name, size, lambda: worker.optimizer.step({}))


def state(worker: PolicyWorker) -> list[torch.Tensor]:
    """Copies of weights and of the optimizer's state, on the host."""
    tensors = [*worker.parameters().values(), *worker.optimizer.device_tensors()]
    return [tensor.detach().cpu().clone() for tensor in tensors]


def row_of(
    setting: Setting,
    name: str,
    num_bytes: int,
    work: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Row:
    """The best time of `work`; `before` and `after` it is what is not measured."""
    seconds = []
    for _ in range(ROUNDS):
        before()
        seconds.append(measured(setting.device, work)[1].seconds)
        after()
    best = min(seconds)
    return {
        "what": name,
        "megabytes": num_bytes / 1e6,
        "seconds": best,
        "gigabytes_per_second": per_second(num_bytes / 1e9, best),
    }


def pinned_bytes(setting: Setting) -> int:
    """That torch holds in pinned memory, rounded up as it does."""
    if setting.device == "cpu":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
