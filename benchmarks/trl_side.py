"""GRPO by TRL on the CPU, for the benchmarks that compare with it. TRL is in the extra `bench`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def train_with_trl(
    model: Path,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., list[float]],
    *,
    samples: int,
    answers: int,
    new_tokens: int,
    together: int | None = None,
    callback: Any,
    **options: Any,
) -> None:
    """Train a float32 model on all cores, on `rows` in their order; `options` are GRPOConfig's own.

    A step has `answers`, `samples` to each prompt, and a backward pass `together` of them, by default all.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = GRPOConfig(
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=together or answers,
        gradient_accumulation_steps=answers // (together or answers),
        num_generations=samples,
        max_completion_length=new_tokens,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **options,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(list(rows)),
        args=config,
        callbacks=[callback],
    ).train()
