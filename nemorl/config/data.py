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
    """Sums written `12+34=` with a zero-padded answer such as `046`: learnt by a tiny model in minutes.

    Preferences come with it: of each task the recorded answer and another, which is slightly off.
    """

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
    slips: tuple[int, ...] = Field((-10, -2, -1, 1, 2, 10), min_length=1)
    """By how much wrong answers are off, drawn with equal chances: a unit or two, or the carry."""


class ConversationsDataset(Config):
    """Whole conversations, one JSON object a line: SFT learns every turn of the assistant."""

    name: Literal["conversations"]
    path: Path
    """The file."""
    messages_key: str = "messages"
    """Key of the messages; the last one is the assistant's."""


class PreferenceDataset(Config):
    """Two answers to a prompt, of which one is better; one JSON object a line."""

    name: Literal["preference"]
    path: Path
    """The file."""
    prompt_key: str | None = "prompt"
    """Key of the prompt; null where both answers repeat it, as conversations with a common beginning."""
    chosen_key: str = "chosen"
    """Key of the better answer: a text, or a list of messages."""
    rejected_key: str = "rejected"
    """Key of the worse answer."""
    margin_key: str | None = None
    """Key of a number that says by how much it is worse; null where nothing says."""


class FeedbackDataset(Config):
    """Single answers, each good or not; one JSON object a line."""

    name: Literal["feedback"]
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    completion_key: str = "completion"
    """Key of the answer: a text, or a list of messages."""
    label_key: str = "label"
    """Key of the judgement: true or false."""


class StepsDataset(Config):
    """Answers in steps, each right or wrong, or likely right; one JSON object a line."""

    name: Literal["steps"]
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    steps_key: str = "completions"
    """Key of the list of steps, texts."""
    labels_key: str = "labels"
    """Key of the list of their judgements: true, false, or from 0 to 1 how likely the step is right."""
    separator: str = "\n"
    """Put after each step; empty where steps are single tokens."""


DatasetConfig = Annotated[
    JsonlDataset
    | ReasoningGymDataset
    | ArithmeticDataset
    | ConversationsDataset
    | PreferenceDataset
    | FeedbackDataset
    | StepsDataset,
    Field(discriminator="name"),
]


class DataConfig(Config):
    train: DatasetConfig
    """Tasks that are trained on."""
    validation: DatasetConfig | None = None
    """Tasks that are only measured."""
    validation_sets: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], DatasetConfig] = Field(
        default_factory=dict
    )
    """Further sets that are only measured, by names of one's own: figures `validation/NAME/…`."""
    shuffle: bool = True
    """Draw the training tasks in an order made from the seed, another in each epoch."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    prompt_template: str = "{prompt}"
    """The user's message; `{prompt}` stands for the task's own text."""
    chat: bool = True
    """Apply the tokenizer's chat template; false takes the prompt as plain text (base models)."""
