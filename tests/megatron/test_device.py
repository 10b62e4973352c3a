"""How a process of a GPU is set up, without one."""

import pytest
import torch
import torch._dynamo as dynamo

from nemorl.megatron.device import select_device


def test_attention_on_a_gpu_does_not_build_a_graph_for_each_shape(monkeypatch):
    made_current = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made_current.append)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert select_device("cuda", 6) == torch.device("cuda", 2)
        assert made_current == [torch.device("cuda", 2)]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_process_without_the_gpu_it_was_placed_on_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(RuntimeError, match="rank 1 was placed on a GPU but this process sees none"):
        select_device("cuda", 1)


def test_nothing_is_compiled_for_a_cpu():
    fused = torch.compile(torch.square)
    select_device("cpu", 0)
    dynamo.utils.counters.clear()
    fused(torch.ones(2))
    assert not dynamo.utils.counters["stats"]
