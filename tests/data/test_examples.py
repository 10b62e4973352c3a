import numpy as np
import pytest

from nemorl.data.prompts import ChatPrompts, PlainPrompts
from nemorl.data.sft import ExampleError, sft_example
from nemorl.rollout.types import Message, Task
from tests.data.tokenizers import ENDOFTEXT, IM_END

TASK = Task(0, (Message("user", "1"),), answer="2")


def test_plain_examples_keep_the_boundary_between_prompt_and_answer(tokenizer):
    # "12" would be one token, but a policy that is asked "1" samples "2".
    example = sft_example(TASK, tokenizer, PlainPrompts(tokenizer), "completion", max_length=10)
    assert example.tokens.tolist() == [*tokenizer.encode("1"), *tokenizer.encode("2"), ENDOFTEXT]
    assert example.loss_mask.tolist() == [False, True, True]
    assert len(tokenizer.encode("12")) == 1


def test_chat_examples_learn_the_answer_and_the_templates_end(tokenizer):
    example = sft_example(TASK, tokenizer, ChatPrompts(tokenizer), "completion", max_length=99)
    learnt = tokenizer.decode(example.tokens[example.loss_mask])
    given = tokenizer.decode(example.tokens[~example.loss_mask])
    assert learnt == "2<|im_end|>"
    assert example.tokens[-1] == IM_END
    assert given == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    assert example.num_learnt == 2
    assert example.num_tokens == len(example.tokens)


def test_all_tokens_but_the_first_can_be_learnt(tokenizer):
    example = sft_example(TASK, tokenizer, ChatPrompts(tokenizer), "all", max_length=99)
    assert np.flatnonzero(~example.loss_mask).tolist() == [0]


def test_tasks_that_are_no_examples_are_named(tokenizer):
    plain = PlainPrompts(tokenizer)
    with pytest.raises(ExampleError, match=r"task 4 has no answer.*answer_key"):
        sft_example(Task(4, TASK.messages), tokenizer, plain, "all", 10)
    with pytest.raises(ExampleError, match="task 0 has 1 prompt and 2 answer tokens, more than 2"):
        sft_example(TASK, tokenizer, plain, "all", 2)
    with pytest.raises(ExampleError, match="task 5 has an empty prompt"):
        sft_example(Task(5, (Message("user", ""),), "2"), tokenizer, plain, "all", 10)
