import json
import subprocess
import sys

import pytest

from nemorl.config.policy import PolicyConfig, TokenizerConfig
from nemorl.data.tokenizer import TokenizerError, load_tokenizer
from nemorl.trajectories import Message
from tests.data.tokenizers import ENDOFTEXT, IM_END, save_tokenizer


def test_a_turn_ends_with_the_models_the_tokenizers_or_the_templates_end_token(tokenizer, tmp_path):
    assert tokenizer.end_token_ids == {ENDOFTEXT, IM_END}
    folder = save_tokenizer(tmp_path, chat_template=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_tokenizer(PolicyConfig(model_path=folder)).end_token_ids == {ENDOFTEXT, 7, 9}


def test_text_and_tokens_are_the_same_thing(tokenizer):
    text = " a  12, ábc\n<|im_end|>x"
    tokens = tokenizer.encode(text)
    assert IM_END in tokens
    assert tokenizer.decode(tokens) == text


def test_a_chat_template_can_be_replaced(tmp_path, model_folder):
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    config = PolicyConfig(model_path=model_folder, tokenizer=TokenizerConfig(chat_template=template))
    short = load_tokenizer(config)
    assert short.render([Message("user", "hi")], add_generation_prompt=True) == "[hi]"
    assert short.template_end_token_id is None  # "]" is text, not an end


def test_a_chat_template_gets_arguments(tmp_path, model_folder):
    template = tmp_path / "thinks.jinja"
    template.write_text("{% if thinking is defined %}<{{ thinking }}>{% endif %}{{ messages[0].content }}")
    for given, expected in (({}, "hi"), ({"thinking": "low"}, "<low>hi")):
        section = TokenizerConfig(chat_template=template, template_arguments=given)
        tokenizer = load_tokenizer(PolicyConfig(model_path=model_folder, tokenizer=section))
        assert tokenizer.render([Message("user", "hi")], add_generation_prompt=True) == expected


def test_what_is_missing_is_named(tmp_path, model_folder):
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        load_tokenizer(PolicyConfig(model_path=tmp_path))
    gone = TokenizerConfig(chat_template=tmp_path / "gone.jinja")
    with pytest.raises(TokenizerError, match=r"chat template.*gone\.jinja"):
        load_tokenizer(PolicyConfig(model_path=model_folder, tokenizer=gone))
    bare = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path, chat_template=None)))
    with pytest.raises(TokenizerError, match=r"no chat template.*data\.chat: false"):
        bare.render([Message("user", "hi")], add_generation_prompt=True)


def test_a_template_that_refuses_a_role_says_so(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path, template)))
    with pytest.raises(TokenizerError, match="refuses a conversation of user, tool: no tools here"):
        tokenizer.render([Message("user", "a"), Message("tool", "b")], add_generation_prompt=False)


def test_loading_imports_no_torch(model_folder):
    code = (
        "import sys; from pathlib import Path; from nemorl.config.policy import PolicyConfig;"
        "from nemorl.data.tokenizer import load_tokenizer; from nemorl.trajectories import Message;"
        f"t = load_tokenizer(PolicyConfig(model_path=Path({str(model_folder)!r})));"
        "t.render([Message('user', 'x')], True); t.encode('x'); import nemorl.rollout.worker;"
        "import nemorl.rollout.collector; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
