"""A process of its own that computes logprobs and says how much memory that took: see test_head.py.

    python -m tests.megatron.head_memory TOKENS VOCABULARY CHUNK MODE

prints the bytes that it had most in memory beyond what it held before. MODE is `logprobs`, `backward`, or
`entropy`, which has the entropy in the loss as well.
"""

import sys
from pathlib import Path

import torch

from nemorl.megatron.head import VocabularyShard, token_logprobs

HIDDEN = 64


def main(tokens: int, vocabulary: int, chunk: int, mode: str) -> int:
    """The peak in bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    learns = mode != "logprobs"
    hidden = torch.randn(tokens, HIDDEN, requires_grad=learns)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=learns)
    ids = torch.randint(0, vocabulary, (tokens, 1))
    options = {"temperature": 1.0, "chunk_tokens": chunk, "entropy": mode == "entropy"}
    if learns:  # where they are added up is there before; Megatron has its buffers
        hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    with torch.no_grad():  # code and buffers that libraries load with the first product
        token_logprobs(hidden[:8], weight[:8], ids[:8] % 8, VocabularyShard(0, 8, None), **options)
    before = memory("VmRSS")
    logprobs, entropies, _ = token_logprobs(
        hidden,
        weight,
        ids,
        VocabularyShard(0, vocabulary, None),
        **options,
    )
    if learns:
        (logprobs.sum() if entropies is None else logprobs.sum() + entropies.sum()).backward()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    """Resident bytes: now (VmRSS) or most so far (VmHWM; getrusage's maximum counts the parent's too)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:4]), sys.argv[4]))  # noqa: T201 - for the process that started it
