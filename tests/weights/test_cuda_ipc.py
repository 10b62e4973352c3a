"""Slots on a device, and when they are chosen; refits through them are in `test_faults`."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.exchange import TransportOptions, make_venue
from nemorl.weights.messages import ReceiverLayout, RefitFailed, SenderLayout
from nemorl.weights.shared_memory import CudaDevice, DeviceSlots, SharedStorage
from nemorl.weights.whole_tensors import WholeTensorReceiver, whole_slices
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


def chosen(senders: dict[str, str], receivers: dict[str, str]) -> str:
    """The transport between ranks on these GPUs, each with its machine."""
    from_policy = [SenderLayout((), node, gpu) for gpu, node in senders.items()]
    to_engines = [ReceiverLayout((), (), node, gpu=gpu) for gpu, node in receivers.items()]
    with make_venue(TransportOptions(), from_policy, to_engines, 1.0).session(1, 1, 1) as session:
        return session.transport


def test_weights_travel_between_gpus_without_memory_of_hosts() -> None:
    assert chosen({"g0": "a", "g1": "a"}, {"g2": "a", "g3": "a"}) == "nccl"
    assert chosen({"g0": "a", "g1": "a"}, {"g2": "b", "g3": "b"}) == "nccl"
    assert chosen({"g0": "a", "g1": "a"}, {"g0": "a", "g1": "a"}) == "cuda_ipc"
    assert chosen({"g0": "a", "g1": "a"}, {"g1": "a"}) == "cuda_ipc"


def test_weights_travel_through_memory_of_hosts_where_gpus_cannot_meet() -> None:
    assert chosen({"": "a"}, {"": "a"}) == "shared_memory"
    assert chosen({"": "a"}, {"": "b"}) == "gloo"
    assert (
        chosen({"g0": "a"}, {"": "a"}) == "shared_memory"
    )  # such as adapters, which vLLM takes from the host
    assert chosen({"g0": "a"}, {"": "b"}) == "gloo"
    # NCCL takes one process on a GPU; engines of which only some share GPUs may not see the others'
    assert chosen({"g0": "a"}, {"g0": "a", "g1": "a"}) == "shared_memory"
    assert chosen({"g0": "a", "g1": "b"}, {"g0": "a", "g1": "b"}) == "gloo"


def test_memory_of_a_gpu_is_not_shared_between_machines() -> None:
    with pytest.raises(ValueError, match="by cuda_ipc between 2 machines"):
        make_venue(TransportOptions("cuda_ipc"), [SenderLayout((), "a")], [ReceiverLayout((), (), "b")], 1.0)


def test_both_sides_name_the_gpu_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index)
    )
    assert WeightSender([], dict, torch.device("cuda", 3)).describe().gpu == "3"
    whole = {"a": (2,)}
    options: Any = {"loader": None, "device": torch.device("cuda", 5)}
    assert WholeTensorReceiver(whole, {"a": "float32"}, **options).describe().gpu == "5"
    weights: Any = {
        "on_gpu": SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 4)),
        "on_host": torch.zeros(2),
    }
    slices = [replace(part, param=name) for part in whole_slices(whole) for name in weights]
    receiver = WeightReceiver(slices, lambda: weights, lambda version: None)
    assert receiver.describe().gpu == "4"
    assert WeightReceiver(slices[1:], lambda: weights, lambda version: None).describe().gpu == ""
