"""Decisions about devices, without a GPU."""

import numpy as np
import torch

from nemorl import device
from nemorl.device import upload

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class HostMemory:
    """What becomes of memory of the host that is copied to a device that is not here."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def pin_memory(self) -> "HostMemory":
        self._calls.append("pin")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> "HostMemory":
        self._calls.append((device, "no wait" if non_blocking else "wait"))
        return self

    def split(self, lengths: list[int]) -> tuple[object, ...]:
        return tuple(lengths)


def test_arrays_of_any_kind_arrive_together_as_int64() -> None:
    uniform = np.array([0.25, 0.5])
    one, two, bits = upload(CPU, [3, 4, 5], np.array([6], dtype=np.int32), uniform.view(np.int64))
    assert (one.tolist(), two.tolist(), bits.view(torch.float64).tolist()) == ([3, 4, 5], [6], [0.25, 0.5])
    assert {part.dtype for part in (one, two, bits)} == {torch.int64}
    assert one.untyped_storage().data_ptr() == bits.untyped_storage().data_ptr()


def test_only_uploads_to_a_gpu_are_pinned_and_no_host_waits(monkeypatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(device.torch, "from_numpy", lambda array: HostMemory(calls))
    assert upload(GPU, [1, 2], [3]) == (2, 1)
    assert calls == ["pin", (GPU, "no wait")]
    calls.clear()
    upload(CPU, [1, 2], [3])
    assert calls == [(CPU, "no wait")]
