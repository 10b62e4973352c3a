"""Sharded exports: equal to the model bit by bit under every layout, in bounded memory, and continued."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from nemorl.config.policy import LayoutConfig, LoraConfig
from nemorl.errors import UsageError
from nemorl.megatron import export
from nemorl.megatron.checkpoint_files import FORMAT, INDEX, write_safetensors
from nemorl.megatron.export import export_adapter, export_hf
from nemorl.models import hf_writer
from nemorl.models.hf_config import INDEX_FILE
from nemorl.models.hf_shards import StoredTensor, plan_shards, write_pieces
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.registry import load_shape
from nemorl.models.tensors import merge_adapter
from tests.megatron.cases import start_worker
from tests.megatron.examples import layout, policy_config

CASES = [
    ("llama", layout(tp=2, dp=2)),
    ("mistral", layout(pp=2, vpp=2)),
    ("qwen2", layout(tp=2, pp=2)),
    ("qwen3", layout(dp=2)),
    ("gemma3", layout(tp=2, sp=True)),
    ("qwen3-moe", layout(tp=2, sp=True, dp=2, ep=2)),
    ("mixtral", layout(tp=2, sp=True, etp=2)),
    ("gpt-oss", layout(pp=2, dp=2, ep=2)),
    ("deepseek-v3", layout(dp=2, ep=2)),
    ("deepseek-v3-mtp", layout(dp=2, ep=2)),
    ("mimo-mtp-tied", layout(tp=2, sp=True, pp=2)),
]


def save(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    worker.save_checkpoint(folder)
    worker.close()


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors by the index, each of which is in the file that it names."""
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    assert sorted(weight_map) == sorted(name for file in files.values() for name in file)
    return {name: files[file][name] for name, file in weight_map.items()}


@pytest.mark.ci
@pytest.mark.parametrize(("family", "where"), CASES, ids=[family for family, _ in CASES])
def test_a_sharded_export_is_the_model_bit_by_bit(pool, model, tmp_path, monkeypatch, family, where):
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 500)  # less than a matrix, and for experts less than a row
    folder = model(family)[1]
    further = {"loss_weight": 0.1} if "-mtp" in family else None
    config = policy_config(folder, layout=where, multi_token_prediction=further)
    pool.run(where.world_size, save, config, tmp_path / "saved")
    source = load_file(folder / "model.safetensors")
    # With layers for further tokens also what these have of the model's.
    expected = source if further else {name: source[name] for name in hf_tensors(load_shape(folder))}
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        out = tmp_path / precision
        export_hf(
            tmp_path / "saved",
            out,
            config.model_copy(update={"precision": precision}),
            shard_bytes=100_000,
        )
        tensors = exported(out)
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            kept = tensor.dtype if name.endswith("e_score_correction_bias") else dtype
            assert torch.equal(tensor, expected[name].to(kept)), name
        sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert len(sizes) > 2
        assert max(sizes) < max(100_000, largest) + 10_000  # a header besides


def write_checkpoint(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The files of one rank that holds the whole model, with random weights; these by HF's names."""
    shape = load_shape(model)
    folder.mkdir()
    parts: dict[str, torch.Tensor] = {}
    tensors = {}
    sizes: dict[str, int] = {}
    for part in policy_slices(shape, PolicyRank()):
        sizes[part.param] = sizes.get(part.param, 0) + part.num_elements
    for name, size in sizes.items():
        parts[name] = torch.rand(size)
    for part in policy_slices(shape, PolicyRank()):
        tensor = tensors.setdefault(part.name, torch.empty(part.shape))
        tensor[part.box] = parts[part.param].as_strided(part.size, part.strides, part.offset)
    starts = json.dumps(dict.fromkeys(parts, 0))
    write_safetensors(folder / "weight_00000.safetensors", parts, {"starts": starts})
    content = {
        "format": FORMAT,
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "adapter_scale": None,
        "layout": LayoutConfig().model_dump(),
        "states": [],
        "progress": {},
    }
    (folder / INDEX).write_text(json.dumps(content))
    return tensors


def write_model(folder: Path, hidden_size: int, vocabulary: int) -> Path:
    """config.json alone: all weights come from a checkpoint."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


class MemoryMeter:
    """The most memory of this process that is no page of a file, from /proc, in bytes above the start."""

    def __enter__(self):
        self.most, self._done, self._start = 0, threading.Event(), self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        while not self._done.wait(0.001):
            self.most = max(self.most, self._now() - self._start)

    def _now(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_memory_is_bounded_by_pieces_and_not_by_tensors_or_files(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 2**17)  # 0.5 MB
    model = write_model(tmp_path / "model", 512, 60_000)
    tensors = write_checkpoint(model, tmp_path / "saved")
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert largest > 120e6
    del tensors
    config = policy_config(model, precision="bfloat16")
    export_hf(tmp_path / "saved", tmp_path / "first", config)  # what libraries keep after a first use
    with MemoryMeter() as meter:
        export_hf(tmp_path / "saved", tmp_path / "out", config)
    # A piece of each file that is written at a time, in float32 and bfloat16, and the digest's part of it.
    assert meter.most < 20e6, meter.most


def test_a_killed_export_continues_with_the_files_that_are_complete(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", 64, 1000)
    tensors = write_checkpoint(model, tmp_path / "saved")
    config = policy_config(model)
    write = hf_writer.write_shard
    written: list[str] = []

    def killed_in_the_fourth(path, stored, pieces):
        written.append(path.name)
        if len(written) > 3:
            raise KeyboardInterrupt
        return write(path, stored, pieces)

    monkeypatch.setattr(export, "MAX_THREADS", 1)
    monkeypatch.setattr(hf_writer, "write_shard", killed_in_the_fourth)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process removes nothing
        with pytest.raises(KeyboardInterrupt):
            export_hf(tmp_path / "saved", tmp_path / "out", config, shard_bytes=100_000)
    assert not (tmp_path / "out").exists()
    complete = written[:3]
    written.clear()

    def recorded(path, stored, pieces):
        written.append(path.name)
        return write(path, stored, pieces)

    monkeypatch.setattr(hf_writer, "write_shard", recorded)
    export_hf(tmp_path / "saved", tmp_path / "out", config, shard_bytes=100_000)
    assert written
    assert not set(written) & set(complete)
    for name, tensor in exported(tmp_path / "out").items():
        assert torch.equal(tensor, tensors[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "saved"]
    listed = (tmp_path / "out" / hf_writer.CHECKSUM_FILE).read_text().splitlines()
    assert len(listed) == len(list((tmp_path / "out").iterdir())) - 1


def test_what_an_export_of_other_files_left_is_removed(tmp_path):
    model = write_model(tmp_path / "model", 64, 1000)
    write_checkpoint(model, tmp_path / "saved")
    left = tmp_path / ".out.partial-0123456789abcdef"
    left.mkdir()
    (left / "0.shard").write_bytes(b"of another checkpoint")
    export_hf(tmp_path / "saved", tmp_path / "out", policy_config(model))
    assert not left.exists()


def test_two_exports_of_the_same_folder_do_not_mix(tmp_path):
    model = write_model(tmp_path / "model", 64, 1000)
    tensors = write_checkpoint(model, tmp_path / "saved")
    with hf_writer.HfFolderWriter(tmp_path / "out", model, resume_key="same") as writer:
        with pytest.raises(UsageError, match="another process is writing"):
            hf_writer.HfFolderWriter(tmp_path / "out", model, resume_key="same")
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    assert (tmp_path / "out").is_dir()


def test_adapters_are_merged_piece_by_piece_with_the_same_bits(pool, model, tmp_path, monkeypatch):
    lora = LoraConfig(rank=4, alpha=8)
    config = policy_config(model("qwen3")[1], lora=lora, precision="bfloat16")
    pool.run(1, save_with_b, config, tmp_path / "saved")
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 100)  # less than two rows
    export_hf(tmp_path / "saved", tmp_path / "out", config, shard_bytes=50_000)
    export_adapter(tmp_path / "saved", tmp_path / "adapter", config)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged, source = exported(tmp_path / "out"), load_file(model("qwen3")[1] / "model.safetensors")
    matrix = "model.layers.1.mlp.down_proj"
    weight = source[f"{matrix}.weight"].bfloat16()
    pair = (adapter[f"base_model.model.{matrix}.lora_{side}.weight"] for side in "AB")
    merge_adapter(weight, *pair, lora.scale)
    assert torch.equal(merged[f"{matrix}.weight"], weight)
    assert not torch.equal(weight, source[f"{matrix}.weight"].bfloat16())


def save_with_b(rank, world_size, rendezvous, config, folder):
    worker = start_worker(rank, world_size, rendezvous, config)
    for name, values in worker.parameters().items():
        if ".lora." in name:
            values.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    worker.optimizer.weights_changed()
    worker.save_checkpoint(folder)
    worker.close()


def test_files_are_as_the_library_writes_them(tmp_path):
    tensors = {"b": torch.rand(3, 5), "a": torch.rand(7).bfloat16(), "c": torch.arange(3)}
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    with (tmp_path / "ours").open("wb") as file:
        write_pieces(file, stored, {"format": "pt"}, lambda name: tensors[name].split(2))
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "library")
    assert {name: t.tolist() for name, t in ours.items()} == {n: t.tolist() for n, t in theirs.items()}
    with (tmp_path / "short").open("wb") as file, pytest.raises(ValueError, match=r"c: its pieces have"):
        write_pieces(file, stored, {}, lambda name: tensors[name].split(2)[:1])


def test_files_are_full_before_the_next_begins():
    sizes = {
        name: StoredTensor((size,), torch.uint8) for name, size in zip("abcde", (4, 5, 30, 1, 9), strict=True)
    }
    assert [list(shard) for shard in plan_shards(sizes, 10)] == [["a", "b"], ["c"], ["d", "e"]]
