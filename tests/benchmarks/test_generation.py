"""The generation benchmark: engines that sample otherwise are not compared; only requested tokens count."""

import pytest
from generation import check_agreement
from generation_sides import (
    MAX_LENGTH,
    Sampled,
    Setting,
    Work,
    equal_work,
    phrase_work,
    ragged_work,
    repetitive_work,
    start,
)
from transformers import LlamaConfig, LlamaForCausalLM

from tests.megatron.examples import COMMON, VOCABULARY


def test_the_embedded_engine_samples_what_transformers_does(tmp_path):
    shape = COMMON | {"max_position_embeddings": MAX_LENGTH}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    setting = Setting(tmp_path, "cpu", "float32", threads=1, max_batch=3)
    names = ("transformers", "transformers-batching", "torch", "torch+lookup")
    sides = {name: start(setting, name) for name in names}
    for make in (equal_work, ragged_work, phrase_work):
        work = make(3, 8, VOCABULARY)
        seen = {name: side(work) for name, side in sides.items()}
        check_agreement(seen, work)
        for sampled in seen.values():
            assert sampled.tokens == seen["transformers"].tokens
            assert sum(map(len, sampled.tokens)) == work.num_tokens
    for name in names[1:]:
        sides[name].close()


def test_engines_that_sample_otherwise_are_not_compared():
    work = equal_work(2, 3, VOCABULARY)
    right = Sampled(((1, 2, 3), (4, 5, 6)), 1.0)
    check_agreement({"transformers": right, "torch": right}, work)
    with pytest.raises(RuntimeError, match="torch begins 50% of its completions otherwise"):
        check_agreement({"transformers": right, "torch": Sampled(((1, 2, 3), (4, 5, 7)), 1.0)}, work)
    with pytest.raises(RuntimeError, match="torch sampled other numbers of tokens"):
        check_agreement({"transformers": right, "torch": Sampled(((1, 2), (4, 5, 6)), 1.0)}, work)


def test_ragged_lengths_vary_within_their_limits():
    work = ragged_work(500, 32, VOCABULARY)
    assert min(work.lengths) >= 4
    assert max(work.lengths) == 5 * 32
    assert sorted(work.lengths)[250] == pytest.approx(32, rel=0.15)
    assert work == ragged_work(500, 32, VOCABULARY)


def test_the_repetitive_prompts_are_those_whose_phrase_is_continued():
    prompts = ((1, 2) * 4, (3, 4, 5) * 4, (6, 7) * 4)
    candidates = Work("phrases", prompts, (4, 4, 4))
    sampled = Sampled(((1, 9, 9, 9), (3, 4, 5, 3), (6, 7, 6, 9)), 1.0)
    work = repetitive_work(candidates, sampled, 2)
    assert work == Work("repetitive", (prompts[1], prompts[2]), (4, 4))
