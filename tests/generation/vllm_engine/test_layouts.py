"""Layouts learned from vLLM's own loader, in the processes of one and of two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nemorl.device import has_packed_linear
from tests.generation.vllm_engine.models import make
from tests.generation.vllm_engine.rank_refits import TRANSPORTS

ROOT = Path(__file__).parents[3]
# A mixture comes first: process groups that are made for it serve the others too. Not gpt-oss: vLLM computes
# its experts from tensors of the checkpoint, so no layout is learned, and `update: reload` brings them.
FAMILIES = ("qwen3_moe", "mixtral", "llama", "qwen3", "qwen2")


@pytest.fixture(scope="module")
def reports(model_folder: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """By family, number of ranks and rank; results of heads of packed layers come with rank 0 of one."""
    folders = [model_folder / "layouts" / family for family in FAMILIES]
    for folder in folders:
        make(folder.name, folder)
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    programs = [_start(rank, model_folder / "meeting", folders) for rank in range(2)]
    try:
        for program in programs:
            for report in _reports(program):
                found.setdefault((report["family"], report["ranks"], report["rank"]), {}).update(report)
    finally:
        for program in programs:  # one waits for the other, also for one that failed
            program.kill()
    return found


CASES = [(family, ranks, rank) for family in FAMILIES for ranks in (1, 2) for rank in range(ranks)]


@pytest.mark.parametrize(("family", "ranks", "rank"), CASES)
def test_a_layout_brings_back_every_bit(reports: Any, family: str, ranks: int, rank: int) -> None:
    assert reports[family, ranks, rank]["different"] == []


@pytest.mark.parametrize(("family", "ranks", "rank"), CASES)
def test_a_rank_is_sent_its_shard_and_nothing_else(reports: Any, family: str, ranks: int, rank: int) -> None:
    report = reports[family, ranks, rank]
    # What comes from no tensor is zero: the rows that round a vocabulary of 97 up.
    missing = report["elements_of_parameters"] - report["elements_sent_in_shards"]
    assert missing == report["zeros"]
    assert missing % 64 == 0


@pytest.mark.parametrize(("family", "ranks", "rank"), CASES)
def test_packed_layers_compute_the_weights_of_the_last_commit(
    reports: Any, family: str, ranks: int, rank: int
) -> None:
    """To the bit: before an update, while one writes zeros, and after another brought the weights back."""
    report = reports[family, ranks, rank]
    unread = report["unread"]
    dtype = torch.float32 if ranks == 1 else torch.bfloat16
    packs = has_packed_linear(torch.device("cpu"), dtype)  # of bfloat16 not on every processor
    assert ("model.layers.1.self_attn.qkv_proj.weight" in unread) == packs
    # The head of llama is tied to the embedding.
    assert ("lm_head.weight" in unread) == (packs and family != "llama")
    assert "model.embed_tokens.weight" not in unread
    assert report["products"] > len(unread)
    assert report["product_error"] < (1e-6 if ranks == 1 else 4e-3)  # float32, and bfloat16's 2^-8
    assert report["undisturbed"]
    assert report["restored"]


def test_dense_models_need_no_whole_tensor(reports: Any) -> None:
    assert all(reports[case]["whole"] == [] for case in CASES if case[0] in ("llama", "qwen3", "qwen2"))


def test_experts_that_the_kernels_repack_are_complete(reports: Any) -> None:
    for family, names in (("qwen3_moe", 2 * 4 * 3), ("mixtral", 2 * 4 * 3)):
        report = reports[family, 2, 0]
        assert len(report["whole"]) == names  # layers, experts, matrices
        assert all("expert" in name for name in report["whole"])
        assert all("expert" in name for name in report["reloaded"])


UPDATES = ("staged", "in_place")
MOST = FAMILIES[0]  # refitted over every transport: it has whole tensors next to shards
SHARDED = [(family, rank, update) for family in FAMILIES for rank in range(2) for update in UPDATES]


@pytest.mark.parametrize(("family", "rank", "update"), SHARDED)
def test_a_sharded_policy_brings_every_bit_in_bfloat16(
    reports: Any, family: str, rank: int, update: str
) -> None:
    """One that is sharded otherwise; whole, then what changed, twice. The reference is a direct load."""
    refits = reports[family, 2, rank]["refits"][update]
    for transport in TRANSPORTS if family == MOST else TRANSPORTS[:1]:
        assert refits[transport]["different"] == []
        whole, *others = refits[transport]["shares"]
        if transport == "files":  # of complete tensors that were written, this rank reads its own parts
            assert 0.4 < whole < 1
        else:
            assert whole == 1
        assert all(0.01 * whole < share < 0.03 * whole for share in others)


@pytest.mark.parametrize(("family", "rank"), [(family, rank) for family in FAMILIES for rank in range(2)])
def test_a_policy_of_any_layout_brings_every_bit(reports: Any, family: str, rank: int) -> None:
    layouts = ["one process", "PP2", "DP2"]
    if family in ("qwen3_moe", "mixtral"):
        layouts += ["EP2 of DP2", "ETP2"]
    found = reports[family, 2, rank]["refits"]["staged"]["layouts"]
    assert found == {layout: [] for layout in layouts}


@pytest.mark.parametrize(("family", "rank", "update"), SHARDED)
def test_changes_onto_another_base_are_refused(reports: Any, family: str, rank: int, update: str) -> None:
    found = reports[family, 2, rank]["refits"][update]["without base"]
    assert "received the changes since version 100, but holds version 200" in found["error"]
    assert found["share"] == 1
    assert found["different"] == []


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_heads_tied_or_not_compute_with_reloaded_weights(reports: Any, family: str) -> None:
    assert reports[family, 1, 0]["head_error"] < 1e-5


def _reports(program: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    output, _ = program.communicate(timeout=300)
    assert program.returncode == 0, output
    lines = output.splitlines()
    return [json.loads(line.removeprefix("REPORT ")) for line in lines if line.startswith("REPORT ")]


def _start(rank: int, rendezvous: Path, folders: list[Path]) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "tests.generation.vllm_engine.loading", rank, rendezvous, *folders]
    # Hosts of other tests leave variables of theirs, such as that of a folder that is gone.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, words)), cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
