"""A small real tokenizer: byte-level BPE with a few merges and a ChatML template."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENDOFTEXT, IM_START, IM_END = range(3)
# "12" is one token when encoded, but a policy may sample "1" and "2".
MERGES = [("1", "2"), ("a", "b"), ("ab", "ab"), ("Ġ", "a")]


def save_tokenizer(folder: Path, chat_template: str | None = CHATML, special: Sequence[str] = ()) -> Path:
    """Write the tokenizer into `folder`, with a model config whose end token is `<|endoftext|>`.

    `special` are further tokens, after all others.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ENDOFTEXT}))
    return folder
