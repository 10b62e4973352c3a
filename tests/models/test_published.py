"""The shapes of published models that are known without their files."""

import math
from pathlib import Path

import pytest

from nemorl.models.layout import hf_tensors
from nemorl.models.published import PUBLISHED
from nemorl.models.registry import FAMILIES, load_shape, model_config

# Weights of each as its page on the hub counts them, a tied head once.
WEIGHTS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "google/gemma-3-1b-it": 999_885_952,
}
# The same in billions, as reports have them: arXiv 2508.10925, 2412.19437 and 2503.19786, which
# counts Gemma's embedding and the rest.
BILLIONS = {
    "lmsys/gpt-oss-20b-bf16": 20.91,
    "lmsys/gpt-oss-120b-bf16": 116.83,
    "unsloth/DeepSeek-V3-bf16": 671,
    "Changgil/google-gemma-3-27b-it-text": 1.416 + 25.6,
}


def weights(model: str) -> int:
    return sum(map(math.prod, hf_tensors(load_shape(model)).values()))


@pytest.mark.parametrize("model", WEIGHTS)
def test_it_has_as_many_weights_as_published(model: str) -> None:
    assert weights(model) == WEIGHTS[model]


@pytest.mark.parametrize("model", BILLIONS)
def test_it_has_as_many_billions_as_reported(model: str) -> None:
    assert weights(model) / 1e9 == pytest.approx(BILLIONS[model], rel=1e-3)


def test_every_family_has_one() -> None:
    models = {model for model in PUBLISHED if "Reward" not in model}
    assert {load_shape(model).family for model in models} == {family.name for family in FAMILIES}


def test_a_folder_of_the_same_name_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = "Qwen/Qwen3-0.6B"
    assert model_config(model) == PUBLISHED[model]
    folder = tmp_path / model
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 7}', encoding="utf-8")

    assert model_config(model) == {"hidden_size": 7}
