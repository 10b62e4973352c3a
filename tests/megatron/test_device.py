"""How a process of a GPU is set up, without one."""

import pytest
import torch
import torch._dynamo as dynamo

from nemorl.megatron.device import select_device
from tests.megatron.cases import num_threads, start_worker
from tests.megatron.examples import layout, policy_config


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


def threads_of_connections(rank, world_size, rendezvous, config):
    """How many threads of gloo's devices a worker adds: each wakes up 100 times a second."""
    before = num_threads("gloo_tcp_loop")
    worker = start_worker(rank, world_size, rendezvous, config)
    added = num_threads("gloo_tcp_loop") - before
    worker.close()
    return added


def test_groups_of_one_member_share_a_thread(pool, model):
    alone = policy_config(model("llama")[1])
    (added,) = pool.run(1, threads_of_connections, alone)
    assert added <= 1  # an earlier worker of this process has started it
    of_two = pool.run(2, threads_of_connections, alone.model_copy(update={"layout": layout(tp=2)}))
    assert 0 < max(of_two) < 15
