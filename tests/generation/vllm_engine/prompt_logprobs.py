"""A program: vLLM's own logprobs of prompts, from a folder as it is, without an engine of nemorl.

    python -m tests.generation.vllm_engine.prompt_logprobs FOLDER PROMPTS

PROMPTS is JSON, a list of token ids for each prompt; the line LOGPROBS has those of all tokens but the first.
"""

import json
import sys
from typing import Any


def main(folder: str, prompts: list[list[int]]) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    from nemorl.generation.vllm_engine.cpu_linear import int8_kernels_for_float32

    int8_kernels_for_float32()
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 4}
    engine = LLM(folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**24, **options)
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    found = [
        [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    sys.stdout.write(f"\nLOGPROBS {json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
