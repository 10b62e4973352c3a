"""GRPO by TRL on the CPU, for the benchmarks that compare with it. TRL is in the extra `bench`."""

import os
from collections.abc import Callable, Iterator, Sequence
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
    lengths: Sequence[int] | None = None,
    together: int | None = None,
    callback: Any,
    **options: Any,
) -> None:
    """Train a float32 model on all cores, on `rows` in their order; `options` are GRPOConfig's own.

    With `use_vllm`, by vLLM in the same process, which chooses the cores of its threads itself.

    A step has `answers`, `samples` to each prompt, and a backward pass `together` of them, by default all.
    `lengths` are tokens of each answer of the run, its end token included; by default the model ends them.
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
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=policy,
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(list(rows)),
        args=config,
        callbacks=[callback],
    )
    if lengths is not None and config.use_vllm:
        engine = trainer.vllm_generation.llm
        engine.generate = vllm_in_lengths(engine, iter(lengths))
    elif lengths is not None:
        policy.generate = in_lengths(policy, iter(lengths))
    trainer.train()


def vllm_in_lengths(engine: Any, lengths: Iterator[int]) -> Callable[..., Any]:
    """`generate` of vLLM's `LLM`, whose completions end exactly after the next `lengths`."""
    generate = engine.generate

    def in_lengths(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for one in each:
            one.max_tokens, one.ignore_eos = next(lengths), True
        return generate(prompts, sampling_params=each, **options)

    return in_lengths


def in_lengths(policy: Any, lengths: Iterator[int]) -> Callable[..., Any]:
    """The model's `generate`, whose rows end exactly after the next `lengths`."""
    import torch
    from transformers import LogitsProcessorList

    generate = policy.generate

    def in_lengths(input_ids: Any, *, generation_config: Any, **options: Any) -> Any:
        rows, prompt = input_ids.shape
        last = torch.tensor([next(lengths) for _ in range(rows)])
        end = int(torch.as_tensor(generation_config.eos_token_id).flatten()[0])

        def ends_rows(tokens: Any, logits: Any) -> Any:
            ends = last == tokens.shape[1] - prompt + 1
            logits[ends] = -torch.inf
            logits[:, end] = torch.where(ends, 0.0, -torch.inf)
            return logits

        processors = LogitsProcessorList([ends_rows])
        return generate(
            input_ids, generation_config=generation_config, logits_processor=processors, **options
        )

    return in_lengths
