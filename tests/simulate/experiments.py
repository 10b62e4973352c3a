"""A small experiment for simulations; its model and tasks are never read."""

from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from tests.config.experiments import GRPO, write


def experiment(
    folder: Path,
    *,
    prompts: int = 4,
    samples: int = 4,
    replicas: int = 1,
    staleness: int = 0,
    max_new_tokens: int = 64,
    max_batch_size: int = 64,
    overrides: tuple[str, ...] = (),
) -> Experiment:
    return load_experiment(
        write(folder, GRPO),
        (
            f"algorithm.num_prompts_per_step={prompts}",
            f"algorithm.num_generations_per_prompt={samples}",
            f"algorithm.max_staleness={staleness}",
            f"generation.replicas={replicas}",
            f"generation.max_new_tokens={max_new_tokens}",
            f"generation.max_batch_size={max_batch_size}",
            f"policy.max_sequence_length={4 * max_new_tokens}",
            f"policy.micro_batch_tokens={4 * max_new_tokens}",
            *overrides,
        ),
    )
