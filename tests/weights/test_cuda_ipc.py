"""Slots on a device, and when they are chosen; refits through them are in `test_faults`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemorl.weights.exchange import TransportOptions, make_venue
from nemorl.weights.messages import ReceiverLayout, RefitFailed, SenderLayout
from nemorl.weights.shared_memory import CudaDevice, DeviceSlots, SharedStorage
from tests.weights.cuda_stand_in import FileDevice


def test_each_receiver_opens_a_handle_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSlots, "device", FileDevice(tmp_path))
    with DeviceSlots.make("slots", 64) as slots:
        slots.bucket(3, 10).copy_(torch.arange(10))
        slots.settle()
        for offer, descriptors in (slots.offer(), slots.offer()):
            opened = DeviceSlots.open(offer, descriptors, 64)
            assert opened.bucket(1, 10).tolist() == list(range(10))
            assert opened.bucket(0, 64).tolist() == [0] * 64
        assert slots.memory.numel() == 128


def test_a_handle_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(RefitFailed, match="a handle of a GPU's memory cannot be read"):
        DeviceSlots.open(b'{"device": 3}', [], 64)


def test_a_gpu_that_is_not_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="b2"))
    with pytest.raises(
        RefitFailed, match=r"lie on GPU a1, and this process sees b2: set generation\.transport"
    ):
        CudaDevice().open(SharedStorage("a1", b"", 64, 0, b"", 0, b"", False))


def test_it_is_chosen_where_gpus_are_shared_on_one_machine() -> None:
    options = TransportOptions(share_gpus=True)
    sender, receiver = SenderLayout((), "a"), ReceiverLayout((), (), "a")
    with make_venue(options, [sender], [receiver], 1.0).session(1, 1, 1) as session:
        assert session.transport == "cuda_ipc"
    with make_venue(options, [sender], [ReceiverLayout((), (), "b")], 1.0).session(1, 1, 1) as session:
        assert session.transport == "gloo"
    with pytest.raises(ValueError, match="by cuda_ipc between 2 machines"):
        make_venue(TransportOptions("cuda_ipc"), [sender], [ReceiverLayout((), (), "b")], 1.0)
