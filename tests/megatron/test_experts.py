"""Experts: every layout computes what one process computes."""

import gc

import pytest
import torch
from safetensors.torch import load_file

from nemorl.megatron.export import export_hf
from tests.megatron.cases import live, num_threads, start_worker
from tests.megatron.course import assert_same_course
from tests.megatron.examples import layout, policy_config, ragged_batch
from tests.selection import in_all

LAYOUTS = {
    "DP2": layout(dp=2),  # each copy has all experts
    "EP2": layout(dp=2, ep=2),
    "TP2-SP": layout(tp=2, sp=True),  # whole experts on both TP ranks, each with half of the tokens
    "TP2-SP-EP2": layout(tp=2, sp=True, ep=2),
    "TP2-SP-ETP2": layout(tp=2, sp=True, etp=2),
    "TP2-SP-DP2-EP2": layout(tp=2, sp=True, dp=2, ep=2),
    "TP2-SP-DP2-EP4": layout(tp=2, sp=True, dp=2, ep=4),
    "PP2-EP2": layout(pp=2, dp=2, ep=2),  # of Qwen3's stages the first has no experts
    "PP2-VPP2": layout(pp=2, vpp=2),
    "CP2-EP2": layout(cp=2, ep=2),
}
IN_CI = ("EP2", "TP2-SP", "TP2-SP-DP2-EP2", "PP2-VPP2", "CP2-EP2")
# All for the one with layers of both kinds; for the others what their weights could upset.
CASES = [
    *(("qwen3-moe", name) for name in IN_CI),
    *in_all(*(("qwen3-moe", name) for name in LAYOUTS if name not in IN_CI)),
    ("mixtral", "TP2-SP-ETP2"),
    ("gpt-oss", "TP2-SP-EP2"),
    ("gpt-oss", "PP2-EP2"),
    *in_all(("gpt-oss", "TP2-SP"), ("gpt-oss", "CP2-EP2")),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_five_steps_equal_one_process(run, family, name):
    (alone,) = run(family, layout(), 8)
    for life in run(family, LAYOUTS[name], 3):
        assert_same_course(life, alone)


def threads_of_groups(rank, world_size, rendezvous):
    gc.collect()
    return num_threads("pt_gloo_runloop")


def test_a_closed_worker_lets_go_of_its_threads(pool, model):
    """Some fifty of gloo; what the dispatcher kept of the last forward pass held the model, and that them."""
    config = policy_config(model("qwen3-moe")[1])
    pool.run(1, live, config, [ragged_batch()], 3)  # of the first one in a process a group remains
    before = pool.run(1, threads_of_groups)[0]
    pool.run(1, live, config, [ragged_batch()], 3)
    assert pool.run(1, threads_of_groups)[0] <= before


def save(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.save_checkpoint(folder)
    worker.close()


def test_experts_that_share_a_tensor_are_exported_as_they_were_read(pool, model, tmp_path):
    """gpt-oss keeps all experts of a layer in one tensor, gate and up in turns."""
    folder = model("gpt-oss")[1]
    where = layout(tp=2, sp=True, pp=2, ep=2)
    pool.run(4, save, policy_config(folder, layout=where), tmp_path / "saved")
    export_hf(tmp_path / "saved", tmp_path / "out", policy_config(folder))
    source, out = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert source.keys() == out.keys()
    for name, tensor in source.items():
        assert torch.equal(out[name], tensor), name
