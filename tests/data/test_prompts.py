import pytest

from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import ChatPrompts, Prompts, TemplateError, load_tokenizer, prompts_of
from nemorl.trajectories import Message
from tests.data.tokenizers import CHATML, ENDOFTEXT, IM_END, save_tokenizer

OPENING = (Message("system", "Sums."), Message("user", "1+2?"))
ANSWER = (Message("tool", "12"), Message("user", "go on"))


def prompts_with(folder, template) -> ChatPrompts:
    return ChatPrompts(load_tokenizer(PolicyConfig(model_path=save_tokenizer(folder, template))))


def test_turns_joined_are_the_whole_conversation_rendered_at_once(tokenizer):
    prompts = ChatPrompts(tokenizer)
    turn = Message("assistant", "it is 3")
    sampled = [*tokenizer.encode(turn.content), IM_END]
    tokens = prompts.open(OPENING) + sampled
    tokens += prompts.after_turn(OPENING, turn, ANSWER, last_token=IM_END)
    whole = tokenizer.render([*OPENING, turn, *ANSWER], add_generation_prompt=True)
    assert tokens == tokenizer.encode(whole)


def test_the_opening_is_what_transformers_makes_of_it(tokenizer):
    messages = [{"role": m.role, "content": m.content} for m in OPENING]
    expected = tokenizer._backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ChatPrompts(tokenizer).open(OPENING) == expected


@pytest.mark.parametrize(
    ("last_token", "starts"),
    [
        (IM_END, "\n<|im_start|>"),  # the template's own end was sampled
        (ENDOFTEXT, "\n<|im_start|>"),  # another end was: one end is enough
        (40, "<|im_end|>\n<|im_start|>"),  # none was, as after a stop string
        (None, "<|im_end|>\n<|im_start|>"),  # nothing was
    ],
)
def test_the_end_of_a_turn_is_there_once(tokenizer, last_token, starts):
    tokens = ChatPrompts(tokenizer).after_turn(OPENING, Message("assistant", "x"), ANSWER, last_token)
    assert tokenizer.decode(tokens).startswith(starts)


def test_a_template_that_trims_turns_is_taken(tmp_path):
    prompts = prompts_with(tmp_path, CHATML.replace("m['content']", "m['content'] | trim"))
    tokens = prompts.after_turn(OPENING, Message("assistant", "  x \n"), ANSWER, IM_END)
    assert prompts._tokenizer.decode(tokens).startswith("\n<|im_start|>tool\n12<|im_end|>")


DROPS_REASONING = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
)


def test_a_template_that_drops_earlier_reasoning_is_named(tmp_path):
    prompts = prompts_with(tmp_path, DROPS_REASONING)
    turn = Message("assistant", "<think>hm</think>3")
    with pytest.raises(TemplateError, match=rf"template of {tmp_path} rewrites earlier turns.*chat_template"):
        prompts.after_turn(OPENING, turn, ANSWER, IM_END)
    # A turn without reasoning survives the same template.
    assert prompts.after_turn(OPENING, Message("assistant", "3"), ANSWER, IM_END)


def test_a_template_that_changes_the_opening_later_is_named(tmp_path):
    prompts = prompts_with(tmp_path, "{{ messages | length }}" + CHATML)
    with pytest.raises(TemplateError, match="rewrites earlier turns"):
        prompts.after_turn(OPENING, Message("assistant", "3"), ANSWER, IM_END)


def test_a_template_that_writes_a_turn_twice_is_named(tmp_path):
    prompts = prompts_with(tmp_path, CHATML.replace("m['content'] }}", "m['content'] }}{{ m['content'] }}"))
    with pytest.raises(TemplateError, match="exactly once"):
        prompts.after_turn(OPENING, Message("assistant", "3"), ANSWER, IM_END)


def test_plain_prompts_are_the_texts_alone(tokenizer):
    prompts = prompts_of(tokenizer, chat=False)
    assert type(prompts) is Prompts
    assert prompts.open(OPENING) == tokenizer.encode("Sums.1+2?")
    assert prompts.after_turn(OPENING, Message("assistant", "x"), ANSWER, None) == tokenizer.encode("12go on")
    assert prompts.end_token_id == ENDOFTEXT
    assert prompts_of(tokenizer, chat=True).end_token_id == IM_END
