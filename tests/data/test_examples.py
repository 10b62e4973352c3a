"""Sequences to learn from: joined as a rollout would join them, with the right tokens learned."""

import numpy as np
import pytest

from nemorl.config.data import DataConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import DatasetError, Dialogue, Steps
from nemorl.data.examples import Encoder, ExampleError, calibration_prompts, mismatched
from nemorl.data.tokenizer import ChatPrompts, Prompts
from nemorl.trajectories import Message
from tests.data.tokenizers import ENDOFTEXT, IM_END

ASKED = (Message("user", "1"),)
ANSWERED = (Message("assistant", "2"),)
SEVERAL = (
    Message("assistant", "2"),
    Message("user", "1"),
    Message("tool", "ab"),
    Message("assistant", "12"),
)


def test_plain_examples_keep_the_boundary_between_prompt_and_answer(tokenizer):
    # "12" would be one token, but a policy that is asked "1" samples "2".
    example = Encoder(tokenizer, Prompts(tokenizer), 10).dialogue(ASKED, ANSWERED)
    assert example.tokens.tolist() == [*tokenizer.encode("1"), *tokenizer.encode("2"), ENDOFTEXT]
    assert example.loss_mask.tolist() == [False, True, True]
    assert len(tokenizer.encode("12")) == 1


def test_chat_examples_learn_the_answer_and_the_templates_end(tokenizer):
    example = Encoder(tokenizer, ChatPrompts(tokenizer), 99).dialogue(ASKED, ANSWERED)
    trained = tokenizer.decode(example.tokens[example.loss_mask])
    given = tokenizer.decode(example.tokens[~example.loss_mask])
    assert trained == "2<|im_end|>"
    assert example.tokens[-1] == IM_END
    assert given == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    assert example.num_trained == 2
    assert example.num_prompt_tokens == example.num_tokens - 2


def test_every_turn_of_the_assistant_is_learned_and_the_whole_is_what_the_template_writes(tokenizer):
    example = Encoder(tokenizer, ChatPrompts(tokenizer), 99).dialogue(ASKED, SEVERAL)
    whole = tokenizer.decode(example.tokens)
    # The template writes a line break after each turn; nothing follows the last one here.
    assert whole + "\n" == tokenizer.render([*ASKED, *SEVERAL], add_generation_prompt=False)
    edges = np.flatnonzero(np.diff(example.loss_mask.astype(int))) + 1
    pieces = [tokenizer.decode(piece) for piece in np.split(example.tokens, edges)]
    assert pieces == [
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\n1<|im_end|>\n<|im_start|>tool\nab<|im_end|>\n<|im_start|>assistant\n",
        "12<|im_end|>",
    ]


def test_all_tokens_but_the_first_can_be_learned(tokenizer):
    example = Encoder(tokenizer, ChatPrompts(tokenizer), 99).dialogue(ASKED, ANSWERED, "all")
    assert np.flatnonzero(~example.loss_mask).tolist() == [0]


def test_steps_are_labeled_at_their_ends(tokenizer):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 99)
    example = encoder.answer_in_steps(Steps(ASKED, ("12", "ab a"), (1.0, 0.0)))
    assert tokenizer.decode(example.tokens) == "112ab a"
    assert example.labels.tolist() == [0, 1, 0, -1]  # "1", "12", "ab", " a"
    assert example.loss_mask.tolist() == [False, True, False, True]
    unsure = encoder.answer_in_steps(Steps(ASKED, ("12", "ab a"), (0.25, 0.5)))
    assert unsure.labels.tolist() == [0, -0.5, 0, 0]
    assert unsure.loss_mask.tolist() == example.loss_mask.tolist()
    with pytest.raises(ExampleError, match="2 steps and 1 labels"):
        encoder.answer_in_steps(Steps(ASKED, ("1", "2"), (1.0,)))


def test_an_answer_in_steps_is_marked_as_in_training(tokenizer):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 99)
    trained = encoder.answer_in_steps(Steps(ASKED, ("12\n", "ab a\n"), (1.0, 0.0)))
    scored, ends = encoder.exchange_in_steps(ASKED, (Message("assistant", "12\nab a"),), "\n")
    assert scored.tokens.tolist() == trained.tokens.tolist()
    assert scored.loss_mask.tolist() == trained.loss_mask.tolist()
    assert [(end.turn, end.end) for end in ends] == [(0, 3), (0, 7)]
    # Without a separator each token is a step: "12", "ab", " a".
    scored, ends = encoder.exchange_in_steps(ASKED, (Message("assistant", "12ab a"),), "")
    assert tokenizer.decode(scored.tokens) == "112ab a"
    assert scored.loss_mask.tolist() == [False, True, True, True]
    assert [end.end for end in ends] == [2, 4, 6]


def test_mismatched_prompts_and_completions(tokenizer):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 9)
    texts = [("a", "1"), ("b b", "2 2"), ("c", "3")]
    examples = encoder.dialogues(
        [Dialogue((Message("user", a),), (Message("assistant", b),)) for a, b in texts], "completion"
    )
    end = tokenizer.decode([ENDOFTEXT])
    others = mismatched(examples, 9)
    assert [tokenizer.decode(e.tokens) for e in others] == ["a2 2" + end, "b b3" + end, "c1" + end]
    assert [e.num_prompt_tokens for e in others] == [e.num_prompt_tokens for e in examples]
    assert [e.num_trained for e in others] == [4, 2, 2]
    assert [e.num_tokens for e in mismatched(examples, 4)] == [4, 4, 3]


def test_what_is_no_example_is_named(tokenizer):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 2)
    good = Dialogue((Message("user", "1"),), (Message("assistant", ""),))
    with pytest.raises(ExampleError, match="example 1: there are 1 prompt and 2 answer tokens, more than 2"):
        encoder.dialogues([good, Dialogue(ASKED, ANSWERED)], "all")
    with pytest.raises(ExampleError, match="example 0: the prompt is empty"):
        encoder.dialogues([Dialogue((Message("user", ""),), ANSWERED)], "completion")
    with pytest.raises(ExampleError, match=r"begin and end with an assistant's message, not \['user'\]"):
        encoder.dialogues([Dialogue(ASKED, ASKED)], "all")


def test_a_text_without_a_prompt_is_trained_from_its_second_token(tokenizer):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 100)
    text = Dialogue((Message("user", ""),), (Message("assistant", "ab 1"),))
    (example,) = encoder.dialogues([text], "all")
    assert tokenizer.decode(example.tokens[:-1]) == "ab 1"
    assert example.loss_mask.tolist() == [False, *[True] * (example.num_tokens - 1)]


def test_inputs_are_measured_on_the_first_prompts_of_each_source(model_folder, tokenizer, tmp_path):
    for name in ("a", "b"):
        rows = "".join(f'{{"prompt": "{name}{n} and so on"}}\n' for n in range(9))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    quantization = {"format": "fp8", "calibration": {"prompts": 5}}
    policy = PolicyConfig(model_path=model_folder, max_sequence_length=4, quantization=quantization)
    sources = {
        name: {"dataset": {"name": "tasks", "path": tmp_path / f"{name}.jsonl", "answer_key": None}}
        for name in ("a", "b")
    }
    data = DataConfig(train={"name": "mixture", "sources": sources}, chat=False)
    found = calibration_prompts(data, policy)
    texts = [f"{name}{n} and so on" for name in ("a", "b") for n in range(3)]
    assert [e.tokens.tolist() for e in found] == [tokenizer.encode(text)[:4] for text in texts]
    assert all(not e.loss_mask[0] and e.loss_mask[1:].all() for e in found)
    with pytest.raises(DatasetError, match="no task of data"):
        calibration_prompts(DataConfig(train={"name": "seeds"}), policy)
