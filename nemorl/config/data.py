"""`data`: where tasks come from and how they become prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import Config, Key, check, counted


class JsonlDataset(Config):
    """One JSON object per line, which is kept as the task's columns, for rewards."""

    name: Literal["jsonl"]
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    answer_key: str | None = "answer"
    """Key of the expected answer (for SFT: the target); null if there is none."""


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
    """Sums written `12+34=` with a zero-padded answer such as `046`: a tiny model learns them in minutes.

    For preferences each task also has a second answer, which is slightly wrong.
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
    """Share of the tasks whose recorded answer is slightly wrong, for learning from a noisy teacher."""
    slips: tuple[int, ...] = Field((-10, -2, -1, 1, 2, 10), min_length=1)
    """Errors of wrong answers, drawn with equal probability: a unit or two, or the carry."""

    @check
    def _sums_exist(self) -> Problems:
        pairs = 10 ** (2 * self.digits)
        if (end := self.offset + self.size) > pairs:
            problem = f"exceeds the {pairs} pairs of {counted(self.digits, 'digit')}"
            if self.size > pairs:
                yield Problem("size", self.size, f"it {problem}; lower it, or raise digits")
            else:
                problem = f"size + offset = {end} {problem}"
                yield Problem("offset", self.offset, f"{problem}; lower one of the two, or raise digits")
        modulus = 2 * 10**self.digits
        for index, slip in enumerate(self.slips):
            if slip % modulus == 0:
                fix = f"an answer with this error is right, since answers are modulo {modulus}; use another"
                yield Problem(f"slips.{index}", slip, fix)


class ConversationsDataset(Config):
    """Conversations, one JSON object per line: SFT trains on every turn of the assistant."""

    name: Literal["conversations"]
    path: Path
    """The file."""
    messages_key: str = "messages"
    """Key of the messages; the last one is the assistant's."""


class PreferenceDataset(Config):
    """Two answers to a prompt, of which one is better; one JSON object per line."""

    name: Literal["preference"]
    path: Path
    """The file."""
    prompt_key: str | None = "prompt"
    """Key of the prompt; null if both answers repeat it, as conversations with a common prefix."""
    chosen_key: str = "chosen"
    """Key of the better answer: a text, or a list of messages."""
    rejected_key: str = "rejected"
    """Key of the worse answer."""
    margin_key: str | None = None
    """Key of the difference in quality, a number; null if there is none."""


class FeedbackDataset(Config):
    """Single answers, each good or not; one JSON object per line."""

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
    """Answers in steps, each right or wrong, or likely right; one JSON object per line."""

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


_Tasks = JsonlDataset | ReasoningGymDataset | ArithmeticDataset
_Examples = ConversationsDataset | PreferenceDataset | FeedbackDataset | StepsDataset
DatasetConfig = Annotated[_Tasks | _Examples, Field(discriminator="name")]


class DataConfig(Config):
    train: DatasetConfig
    """Tasks that are trained on."""
    validation: DatasetConfig | None = None
    """Tasks that are only measured."""
    validation_sets: dict[Key, DatasetConfig] = Field(default_factory=dict)
    """Further sets that are only measured, by names of your choice: metrics `validation/NAME/…`."""
    shuffle: bool = True
    """Draw the training tasks in an order that depends on the seed and the epoch."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    prompt_template: str = "{prompt}"
    """The user's message; `{prompt}` is replaced by the task's text."""
    chat: bool = True
    """Apply the tokenizer's chat template; false takes the prompt as plain text (base models)."""

    @property
    def held_out(self) -> Iterator[tuple[str, DatasetConfig]]:
        """Each dataset that is only measured, with the path of its section."""
        if self.validation is not None:
            yield "data.validation", self.validation
        for name, dataset in self.validation_sets.items():
            yield f"data.validation_sets.{name}", dataset

    @check
    def _prompts_are_complete(self) -> Problems:
        if "{prompt}" not in self.prompt_template:
            fix = "the task's text is missing in it; write `{prompt}` where it belongs"
            yield Problem("prompt_template", self.prompt_template, fix)
        if not self.chat:
            reason = "data.chat is false, so prompts are plain text; remove this, or set data.chat to true"
            yield from self.without_effect(("system_prompt",), reason)

    @check
    def _validation_shares_no_task(self) -> Problems:
        """Tasks of training say nothing about what was learned."""
        train_file = getattr(self.train, "path", None)
        for path, dataset in self.held_out:
            field = path.removeprefix("data.")
            if train_file is not None and train_file == getattr(dataset, "path", None):
                yield Problem(f"{field}.path", str(train_file), "training reads the same file; use another")
            match self.train, dataset:
                # A seed determines an order of all pairs; parts of two orders share tasks.
                case ArithmeticDataset() as train, ArithmeticDataset() if train.digits == dataset.digits:
                    end = train.offset + train.size
                    if train.seed != dataset.seed:
                        fix = f"another order of the pairs shares tasks with training; use seed {train.seed}"
                        yield Problem(f"{field}.seed", dataset.seed, f"{fix} and an offset")
                    elif dataset.offset < end and train.offset < dataset.offset + dataset.size:
                        fix = f"training uses tasks {train.offset} to {end - 1} of the same order"
                        yield Problem(f"{field}.offset", dataset.offset, f"{fix}; start at {end}")
                # Reasoning-gym makes task i from the seed `seed + i`: near seeds give nearly the same tasks.
                case ReasoningGymDataset() as train, ReasoningGymDataset():
                    same = train.task == dataset.task and train.options == dataset.options
                    end = train.seed + train.size
                    if same and dataset.seed < end and train.seed < dataset.seed + dataset.size:
                        fix = f"training uses the tasks of seeds {train.seed} to {end - 1}"
                        yield Problem(f"{field}.seed", dataset.seed, f"{fix}; set it to {end} or more")
