"""A checkpoint is complete or absent; a corrupt one is named and the one before is used."""

import json
import subprocess
import sys

import pytest
import torch

from nemorl.megatron.checkpoint_files import Shard, write_state
from nemorl.megatron.checkpoint_store import CheckpointStore, CorruptCheckpoint, verify


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def write(store, step, **metrics):
    folder = store.begin(step)
    (folder / "driver.json").write_text(json.dumps({"step": step}))
    (folder / "policy").mkdir()
    (folder / "policy" / "weight_00000.safetensors").write_bytes(bytes(range(256)) * 100)
    return store.commit(step, metrics)


def test_an_empty_store_has_no_checkpoint(store):
    assert store.latest_valid() is None


def test_the_newest_is_found_with_its_metrics(store):
    write(store, 9, reward=0.5)
    path = write(store, 10, reward=0.25)
    found = store.latest_valid()
    assert (found.step, found.path, found.metrics, found.skipped) == (10, path, {"reward": 0.25}, ())
    assert {f.path: f.size for f in verify(path).files} == {
        "driver.json": 12,
        "policy/weight_00000.safetensors": 25600,
    }


def test_what_was_begun_but_not_committed_does_not_count(store):
    write(store, 1)
    (store.begin(2) / "weights").write_text("half")
    assert store.latest_valid().step == 1
    assert store.steps() == [1]


WRITER = """
import sys
from pathlib import Path
import torch
from nemorl.megatron.checkpoint_files import Shard, write_state
from nemorl.megatron.checkpoint_store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
for step in (1, 2):
    folder = store.begin(step)
    if step == 2:
        import os
        os.mkfifo(folder / "weight_00001.safetensors")
        print("writing", flush=True)
    records = [write_state(folder, "weight", rank, {"w": Shard(0, torch.rand(100000))}) for rank in range(3)]
    store.commit(step, {}, records)
"""


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(store):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, store.folder], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "writing\n"
    with (store.folder / ".step_00000002.tmp" / "weight_00001.safetensors").open("rb") as pipe:
        assert len(pipe.read(1000)) == 1000  # in the middle of a file
        writer.kill()
        writer.communicate()
    found = store.latest_valid()
    assert (found.step, found.skipped) == (1, ())
    assert store.steps() == [1]
    write(store, 2)
    assert store.latest_valid().step == 2


def test_records_of_the_writers_are_taken_and_held_against_the_files(store):
    folder = store.begin(1)
    record = write_state(folder, "weight", 0, {"w": Shard(0, torch.rand(10))})
    (folder / "driver.json").write_text("{}")
    assert verify(store.commit(1, {}, [record])).files[1] == record

    folder = store.begin(2)
    record = write_state(folder, "weight", 0, {"w": Shard(0, torch.rand(10))})
    truncate(folder / record.path)
    with pytest.raises(CorruptCheckpoint, match=r"bytes where \d+ were written"):
        store.commit(2, {}, [record])
    assert store.latest_valid().step == 1


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "weight_00000.safetensors has 25599 bytes where 25600 were written"),
        (flip_a_bit, "weight_00000.safetensors has other contents than were written"),
        (lambda path: path.unlink(), "weight_00000.safetensors is missing"),
    ],
)
def test_a_corrupt_file_is_named_and_the_checkpoint_before_is_used(store, caplog, damage, message):
    write(store, 1)
    newest = write(store, 2)
    damage(newest / "policy" / "weight_00000.safetensors")
    found = store.latest_valid()
    assert found.step == 1
    assert [message in reason for reason in found.skipped] == [True]
    assert "checkpoint of step 2 is not used" in caplog.text


def test_a_corrupt_checkpoint_does_not_count_among_those_kept(store):
    write(store, 4)
    truncate(write(store, 6) / "policy" / "weight_00000.safetensors")
    assert store.latest_valid().step == 4
    assert store.corrupt() == ["step_00000006.corrupt"]
    write(store, 5)
    store.prune(keep=1)
    assert store.latest_valid().step == 5


def test_a_metric_that_is_no_number_is_never_the_best(store):
    for step, reward in ((1, 0.5), (2, float("nan")), (3, 0.25)):
        write(store, step, reward=reward)
    assert store.best("reward", higher_is_better=True) == 1


@pytest.mark.parametrize("content", [None, "", "{}", '{"step": 1, "metrics": {}, "files": [{"path": "x"}]}'])
def test_a_manifest_that_is_missing_or_broken_is_damage(store, content):
    path = write(store, 1)
    (path / "manifest.json").unlink()
    if content is not None:
        (path / "manifest.json").write_text(content)
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        verify(path)
    assert store.latest_valid() is None


def test_a_step_written_again_replaces_the_old_one(store):
    write(store, 3, reward=1.0)
    write(store, 3, reward=2.0)
    assert store.latest_valid().metrics == {"reward": 2.0}
    assert [p.name for p in store.folder.iterdir()] == ["step_00000003"]


@pytest.mark.parametrize(
    ("metric", "higher", "left"),
    [(None, True, [4, 5]), ("reward", True, [2, 4, 5]), ("loss", False, [3, 4, 5]), ("absent", True, [4, 5])],
)
def test_pruning_keeps_the_newest_and_the_best(store, metric, higher, left):
    for step, (reward, loss) in enumerate([(0, 9), (5, 8), (1, 2), (2, 7), (3, 7)], start=1):
        write(store, step, reward=float(reward), loss=float(loss))
    store.begin(6)
    store.prune(2, metric, higher)
    assert sorted(p.name for p in store.folder.iterdir()) == [f"step_{step:08d}" for step in left]


def test_an_empty_checkpoint_is_refused(store):
    store.begin(1)
    with pytest.raises(ValueError, match="nothing was written"):
        store.commit(1, {})


def test_an_earlier_checkpoint_and_the_removal_of_later_ones(store):
    for step in (2, 4, 6):
        write(store, step)
    assert store.latest_valid(before=6).step == 4
    assert store.latest_valid(before=2) is None
    store.remove_after(4)
    assert store.steps() == [2, 4]
