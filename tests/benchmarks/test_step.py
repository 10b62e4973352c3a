"""The benchmark of a step: the answers of both sides have the lengths that it draws."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from step import OneAnswerFactory
from transformers import GenerationConfig
from trl_side import in_lengths, vllm_in_lengths

from nemorl.trajectories import Task
from tests.megatron.examples import VOCABULARY, random_model

END = 7


def test_rows_of_transformers_end_where_they_should():
    model, lengths = random_model("llama"), iter((1, 5, 3, 2))
    prompts = torch.randint(8, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(do_sample=True, max_new_tokens=6, eos_token_id=END, pad_token_id=0)
    model.generate = in_lengths(model, lengths)

    for expected in ((1, 5), (3, 2)):
        rows = model.generate(input_ids=prompts, generation_config=config)
        assert rows.shape == (2, 4 + max(expected))
        for row, length in zip(rows[:, 4:].tolist(), expected, strict=True):
            assert row.index(END) == length - 1
            assert set(row[length:]) <= {0}


@dataclass
class SamplingParams:
    """Of vLLM, which takes long to import."""

    temperature: float
    max_tokens: int
    ignore_eos: bool = False

    def clone(self) -> "SamplingParams":
        return replace(self)


def test_each_prompt_of_vllm_gets_its_length_and_the_other_settings():
    engine = SimpleNamespace(generate=lambda prompts, sampling_params, **_: sampling_params)
    generate = vllm_in_lengths(engine, iter((3, 1, 4)))

    given = SamplingParams(temperature=0.5, max_tokens=9)
    each = [*generate([1, 2], sampling_params=given, use_tqdm=False), *generate([3], sampling_params=given)]
    assert each == [SamplingParams(0.5, length, ignore_eos=True) for length in (3, 1, 4)]
    assert given == SamplingParams(0.5, 9)


def test_the_samples_of_a_task_get_its_lengths_in_turn():
    factory = OneAnswerFactory()
    first, second = (Task(index, (), columns={"lengths": [3, 9, 4]}) for index in range(2))

    assert [factory.next_length(task) for task in (first, second, first, first, second)] == [3, 3, 9, 4, 9]
