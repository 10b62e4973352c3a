"""`data`: where tasks come from and how they become prompts."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Config


class JsonlDataset(Config):
    """One JSON object a line; the whole line is kept as the task's columns, for rewards."""

    name: Literal["jsonl"]
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    answer_key: str | None = "answer"
    """Key of the expected answer (for SFT: what is learnt); null when there is none."""


class ReasoningGymDataset(Config):
    name: Literal["reasoning_gym"]
    task: str
    """Name of a reasoning-gym dataset, such as `chain_sum`."""
    size: int = Field(1000, ge=1)
    """Number of tasks made."""
    seed: int = 0
    """Seed of the tasks; take another for validation."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that dataset, as its own documentation names them."""


class ArithmeticDataset(Config):
    """Sums written `12+34=` with a zero-padded answer such as `046`: learnt by a tiny model in minutes."""

    name: Literal["arithmetic"]
    digits: int = Field(2, ge=1, le=6)
    """Digits of each summand."""
    size: int = Field(2000, ge=1)
    """Number of tasks drawn without replacement from all pairs."""
    seed: int = 0
    """Seed of the order of all pairs."""
    offset: int = Field(0, ge=0)
    """Tasks of that order to leave out at its start, so that training and validation do not share any."""
    wrong_answers: float = Field(0.0, ge=0, le=1)
    """Share of the tasks whose recorded answer is slightly wrong: a sloppy teacher, to learn beyond."""


DatasetConfig = Annotated[JsonlDataset | ReasoningGymDataset | ArithmeticDataset, Field(discriminator="name")]


class DataConfig(Config):
    train: DatasetConfig
    """Tasks that are trained on."""
    validation: DatasetConfig | None = None
    """Tasks that are only measured."""
    shuffle: bool = True
    """Draw the training tasks in an order made from the seed, another in each epoch."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    prompt_template: str = "{prompt}"
    """The user's message; `{prompt}` stands for the task's own text."""
    chat: bool = True
    """Apply the tokenizer's chat template; false takes the prompt as plain text (base models)."""
