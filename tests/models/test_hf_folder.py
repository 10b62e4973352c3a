"""Reading boxes of a folder, writing folders, and what is said about broken ones."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemorl.models.hf_config import INDEX_FILE, SINGLE_FILE, BrokenModelFolder
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import CHECKSUM_FILE, HfFolderWriter
from nemorl.models.layout import PolicyRank, hf_tensors, policy_slices
from nemorl.models.slices import TensorSlice
from tests.models.megatron_ranks import empty_parameters, ranks
from tests.models.tiny_models import TinyModel

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"  # [32, 32]


def a_copy(tiny: TinyModel, folder: Path) -> Path:
    return shutil.copytree(tiny.folder, folder / "copy")


def write(tiny: TinyModel, out: Path, shard_bytes: int = 10**9, dtype: torch.dtype = torch.float32) -> None:
    with HfFolderWriter(out, tiny.folder, shard_bytes=shard_bytes) as writer:
        for name, tensor in tiny.tensors.items():
            writer.add(name, tensor.to(dtype))


def test_a_box_is_read(tiny_llama: TinyModel) -> None:
    name = "model.embed_tokens.weight"
    box = TensorSlice(name, (101, 32), start=(10, 8), size=(3, 4), param="p", offset=0, strides=(4, 1))
    parameters = {"p": torch.zeros(3, 4)}
    HfFolder(tiny_llama.folder).load_into(parameters, [box])
    assert torch.equal(parameters["p"], tiny_llama.tensors[name][10:13, 8:12])


def test_weights_take_the_type_of_the_parameter(tiny_llama: TinyModel) -> None:
    shape = tiny_llama.shape
    parameters = {n: p.bfloat16() for n, p in empty_parameters(shape, PolicyRank()).items()}
    HfFolder(tiny_llama.folder).load_into(parameters, policy_slices(shape, PolicyRank()))
    expected = tiny_llama.tensors["lm_head.weight"].bfloat16()
    assert torch.equal(parameters["output_layer.weight"], expected)


def test_what_is_written_loads_in_transformers(tiny: TinyModel, tmp_path: Path) -> None:
    write(tiny, tmp_path / "out")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", tiny.folder))
    state = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_several_files_and_an_index_hold_the_same(tiny: TinyModel, tmp_path: Path) -> None:
    write(tiny, tmp_path / "out", shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    folder = HfFolder(tmp_path / "out")
    for name, tensor in tiny.tensors.items():
        assert torch.equal(folder.tensor(name, tuple(tensor.shape)), tensor), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_written_type_is_kept_and_reported(tiny_llama: TinyModel, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "out", dtype=torch.bfloat16)
    tensor = tiny_llama.tensors[Q_PROJ]
    assert HfFolder(tmp_path / "out").tensor(Q_PROJ, tuple(tensor.shape)).dtype is torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_checksums_are_what_sha256sum_reads(tiny_llama: TinyModel, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "out")
    check = ["sha256sum", "--check", "--quiet", CHECKSUM_FILE]
    assert subprocess.run(check, cwd=tmp_path / "out", check=False).returncode == 0
    weights = bytearray((tmp_path / "out" / SINGLE_FILE).read_bytes())
    weights[-1] ^= 1
    (tmp_path / "out" / SINGLE_FILE).write_bytes(weights)
    assert subprocess.run(check, cwd=tmp_path / "out", check=False, capture_output=True).returncode == 1


def test_nothing_appears_when_writing_fails(tiny_llama: TinyModel, tmp_path: Path) -> None:
    def fail_in_the_middle() -> None:
        with HfFolderWriter(tmp_path / "out", tiny_llama.folder) as writer:
            writer.add(Q_PROJ, tiny_llama.tensors[Q_PROJ])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_would_lack_tensors_is_not_written(tiny_llama: TinyModel, tmp_path: Path) -> None:
    def write_one() -> None:
        with HfFolderWriter(tmp_path / "out", tiny_llama.folder) as writer:
            writer.add(Q_PROJ, tiny_llama.tensors[Q_PROJ])

    missing = len(hf_tensors(tiny_llama.shape)) - 1
    with pytest.raises(BrokenModelFolder, match=f"would lack {missing} tensors, among them model.embed"):
        write_one()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_takes_each_tensor_once_and_in_its_shape(tiny_llama: TinyModel, tmp_path: Path) -> None:
    with HfFolderWriter(tmp_path / "out", tiny_llama.folder) as writer:
        with pytest.raises(BrokenModelFolder, match=r"lm_head.weight has shape \(2,\), the model in"):
            writer.add("lm_head.weight", torch.zeros(2))
        for name, tensor in tiny_llama.tensors.items():
            writer.add(name, tensor)
        with pytest.raises(BrokenModelFolder, match=r"is no tensor of the model .* or was added twice"):
            writer.add(Q_PROJ, tiny_llama.tensors[Q_PROJ])


def test_an_existing_folder_is_not_overwritten(tiny_llama: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already; choose another folder"):
        HfFolderWriter(tmp_path, tiny_llama.folder)


def test_a_missing_tensor_is_named(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = a_copy(tiny_llama, tmp_path)
    tensors = load_file(folder / SINGLE_FILE)
    del tensors[Q_PROJ]
    save_file(tensors, folder / SINGLE_FILE)
    with pytest.raises(BrokenModelFolder, match=f"copy holds no tensor '{Q_PROJ}'"):
        HfFolder(folder).check(hf_tensors(tiny_llama.shape))


def test_a_wrong_shape_is_named(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = a_copy(tiny_llama, tmp_path)
    save_file({**load_file(folder / SINGLE_FILE), Q_PROJ: torch.zeros(8, 32)}, folder / SINGLE_FILE)
    message = rf"{SINGLE_FILE}: {Q_PROJ} has shape \(8, 32\), the model's config.json says \(32, 32\)"
    with pytest.raises(BrokenModelFolder, match=message):
        HfFolder(folder).load_into(
            empty_parameters(tiny_llama.shape, PolicyRank()), policy_slices(tiny_llama.shape, PolicyRank())
        )


def test_a_type_that_is_no_weight_is_named(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = a_copy(tiny_llama, tmp_path)
    quantised = torch.zeros(32, 32, dtype=torch.int8)
    save_file({**load_file(folder / SINGLE_FILE), Q_PROJ: quantised}, folder / SINGLE_FILE)
    with pytest.raises(BrokenModelFolder, match=f"{Q_PROJ} is of type I8; weights may be F32, BF16, F16"):
        HfFolder(folder).check(hf_tensors(tiny_llama.shape))


def test_a_truncated_file_is_named(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = a_copy(tiny_llama, tmp_path)
    (folder / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes()[:-100])
    with pytest.raises(BrokenModelFolder, match=f"{SINGLE_FILE} is not a complete safetensors file"):
        HfFolder(folder)


def test_a_file_that_the_index_names_is_missing(tiny_llama: TinyModel, tmp_path: Path) -> None:
    write(tiny_llama, tmp_path / "out", shard_bytes=20_000)
    folder = HfFolder(tmp_path / "out")
    folder.file(Q_PROJ).unlink()
    with pytest.raises(BrokenModelFolder, match=f"is missing, though {INDEX_FILE} names it"):
        folder.tensor(Q_PROJ, tuple(tiny_llama.tensors[Q_PROJ].shape))


def test_weights_in_other_formats_are_refused(tiny_llama: TinyModel, tmp_path: Path) -> None:
    folder = a_copy(tiny_llama, tmp_path)
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(BrokenModelFolder, match="weights are read from safetensors only"):
        HfFolder(folder)


def test_a_parameter_that_does_not_fit_is_named(tiny_llama: TinyModel) -> None:
    folder, shape = HfFolder(tiny_llama.folder), tiny_llama.shape
    parameters = empty_parameters(shape, ranks(tp_size=2, pp_size=1)[0])
    with pytest.raises(
        ValueError, match=r"the slice reaches element \d+ of .* model and layout do not agree"
    ):
        folder.load_into(parameters, policy_slices(shape, PolicyRank()))
    with pytest.raises(ValueError, match="there is no local parameter 'embedding"):
        folder.load_into({}, policy_slices(shape, PolicyRank()))
