"""`data`: where tasks come from and how they become prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import EXPERT, SIMPLE, Config, FieldLevel, Key, check, counted
from .library_datasets import AviaryDataset, LibraryDataset, VerifiersDataset


class StreamConfig(Config):
    """Rows are read when they are needed, in every process that samples, and are not kept."""

    field_level: ClassVar[FieldLevel] = "expert"
    size: int = Field(ge=1)
    """Rows of an epoch, which starts over after them; at most those that there are."""
    window: int = Field(1000, ge=1)
    """Rows that are read, shuffled and kept together; a process holds a few windows."""


class RowsDataset(Config):
    source_field: ClassVar[str]  # that names where the rows come from

    columns: dict[str, str] = Field(default_factory=dict)
    """Further names of columns, such as `{solution: ground_truth}`: for keys, and for rewards that require
    another name."""
    tools_key: str | None = "tools"
    """Column with the tools of a row, in OpenAI's form, which the chat template shows; it may be missing."""

    @property
    def source(self) -> str:
        return str(getattr(self, self.source_field))


class FileDataset(RowsDataset):
    source_field: ClassVar[str] = "path"

    path: Path
    """A file with one JSON object per line, a Parquet, Arrow or text file (`….parquet`, `….arrow`, `….txt`,
    whose lines are rows with the key `text`) or a folder of them; with `split` a Hugging Face dataset: a
    folder, or an id on the hub such as `openai/gsm8k`."""
    files: str | None = Field(None, min_length=1)
    """Files to read in the folder or the Hugging Face dataset, such as `formal/*.parquet`; null reads all of
    them, of a folder those of JSON lines, Parquet and Arrow."""
    split: str | None = Field(None, json_schema_extra=SIMPLE)
    """Split of a Hugging Face dataset, such as `train` or `train[:500]`; null if the path is of files."""
    subset: str | None = None
    """Configuration of a Hugging Face dataset that has several, such as `main`."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; its main branch when not given."""

    @check
    def _options_have_a_split(self) -> Problems:
        if self.split is None:
            reason = "only Hugging Face datasets have it; set split, such as `train`, or remove this"
            yield from self.without_effect(("subset", "revision"), reason)


class TaskRows(RowsDataset):
    prompt_key: str = Field("prompt", json_schema_extra=SIMPLE)
    """Key of the prompt: a text, or a list of messages."""
    answer_key: str | None = Field("answer", json_schema_extra=SIMPLE)
    """Key of the expected answer (for SFT: the target); null if there is none."""


class TasksDataset(TaskRows, FileDataset):
    """Tasks, one a row. All columns of a row are kept, for rewards."""

    name: Literal["tasks", "jsonl"]
    stream: StreamConfig | None = None
    """Read rows when they are needed; null reads all of them before the run."""


class GeneratorDataset(TaskRows):
    """Tasks that your function yields: `def rows(**arguments) -> Iterator[dict]`, the same at every call."""

    source_field: ClassVar[str] = "function"

    name: Literal["generator"]
    function: str = Field(pattern=r"^[\w.]+:\w+$")
    """Path of the function, as `package.module:name`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""
    size: int | None = Field(None, ge=1)
    """Rows of an epoch, after which the function is called again; it may yield more, or without end. null
    takes all that it yields, before the run."""
    window: int = Field(1000, ge=1)
    """With `size`: rows that are taken, shuffled and kept together."""

    @property
    def stream(self) -> StreamConfig | None:
        return None if self.size is None else StreamConfig(size=self.size, window=self.window)

    @check
    def _window_has_an_effect(self) -> Problems:
        if self.size is None:
            yield from self.without_effect(("window",), "all rows are taken before the run; set size too")


class ReasoningGymDataset(Config):
    name: Literal["reasoning_gym"]
    task: str
    """Name of a reasoning-gym dataset, such as `chain_sum`."""
    size: int = Field(1000, ge=1, json_schema_extra=SIMPLE)
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
    digits: int = Field(2, ge=1, le=6, json_schema_extra=SIMPLE)
    """Digits of each summand."""
    size: int = Field(2000, ge=1, json_schema_extra=SIMPLE)
    """Number of tasks drawn without replacement from all pairs."""
    seed: int = 0
    """Seed of the order of all pairs."""
    offset: int = Field(0, ge=0, json_schema_extra=EXPERT)
    """Tasks of that order to leave out at its start, so that training and validation do not share any."""
    wrong_answers: float = Field(0.0, ge=0, le=1)
    """Share of the tasks whose recorded answer is slightly wrong, for learning from a noisy teacher."""
    slips: tuple[int, ...] = Field((-10, -2, -1, 1, 2, 10), min_length=1, json_schema_extra=EXPERT)
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


class SeedsDataset(Config):
    """Tasks without a text, for environments that make one from a seed, such as games."""

    name: Literal["seeds"]
    size: int = Field(1000, ge=1, json_schema_extra=SIMPLE)
    """Number of tasks; task i has the seed `seed + i` in the column `seed`."""
    seed: int = 0
    """Seed of the first task; start validation where training ends."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """Further columns of each task, such as the one that names its environment."""


class ConversationsDataset(FileDataset):
    """Conversations, one a row: SFT trains on every turn of the assistant."""

    name: Literal["conversations"]
    messages_key: str = Field("messages", json_schema_extra=SIMPLE)
    """Key of the messages; the last one is the assistant's."""


class TextsDataset(FileDataset):
    """Plain texts, one a row, all of whose tokens are trained on; rows without a text are left out."""

    tools_key: ClassVar[None] = None  # type: ignore[misc]  # a text has no tools
    name: Literal["texts"]
    text_key: str = Field("text", json_schema_extra=SIMPLE)
    """Key of the text."""
    min_characters: int | None = Field(None, ge=1)
    """Join consecutive texts by line breaks until they have as many characters, without these line breaks;
    null takes each alone."""
    truncate: bool = False
    """Cut longer texts to `policy.max_sequence_length` tokens; false refuses them."""
    end_token: bool = True
    """Close each text with the tokenizer's end token."""


class PreferenceDataset(FileDataset):
    """Two answers to a prompt, of which one is better."""

    name: Literal["preference"]
    prompt_key: str | None = Field("prompt", json_schema_extra=SIMPLE)
    """Key of the prompt; null if both answers repeat it, as conversations with a common prefix."""
    chosen_key: str = Field("chosen", json_schema_extra=SIMPLE)
    """Key of the better answer: a text, or a list of messages."""
    rejected_key: str = Field("rejected", json_schema_extra=SIMPLE)
    """Key of the worse answer."""
    margin_key: str | None = None
    """Key of the difference in quality, a number; null if there is none."""


class FeedbackDataset(FileDataset):
    """Single answers, each good or not."""

    name: Literal["feedback"]
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    completion_key: str = "completion"
    """Key of the answer: a text, or a list of messages."""
    label_key: str = "label"
    """Key of the judgement: true or false."""


class StepsDataset(FileDataset):
    """Answers in steps, each right or wrong, or likely right."""

    name: Literal["steps"]
    prompt_key: str = "prompt"
    """Key of the prompt: a text, or a list of messages."""
    steps_key: str = "completions"
    """Key of the list of steps, texts."""
    labels_key: str = "labels"
    """Key of the list of their judgements: true, false, or from 0 to 1 how likely the step is right."""
    separator: str = "\n"
    """Put after each step; empty where steps are single tokens."""


_Made = ReasoningGymDataset | ArithmeticDataset | SeedsDataset | AviaryDataset | VerifiersDataset
_Tasks = TasksDataset | GeneratorDataset | _Made
_Examples = ConversationsDataset | TextsDataset | PreferenceDataset | FeedbackDataset | StepsDataset
DatasetConfig = Annotated[_Tasks | _Examples, Field(discriminator="name")]


class SourceConfig(Config):
    dataset: DatasetConfig
    """Where its tasks come from."""
    weight: float | None = Field(None, gt=0)
    """The share of training tasks is proportional to it; the number of tasks when not given."""
    max_tasks: int | None = Field(None, ge=1)
    """Use only as many tasks, the first of the dataset; null uses all of them."""
    max_epochs: int | None = Field(None, ge=1)
    """Passes over the source, after the stages of a curriculum, until it is left out; null has no limit."""


class MixtureDataset(Config):
    """Several sources, each with its share of every step."""

    name: Literal["mixture"]
    sources: dict[Key, SourceConfig] = Field(min_length=1)
    """The sources, by names of your choice: metrics `source/NAME/…`."""
    temperature: float = Field(1.0, gt=0)
    """Shares are proportional to `weight ** (1 / temperature)`: more than 1 makes them more equal."""

    @check
    def _weights_are_of_one_kind(self) -> Problems:
        without = [name for name, source in self.sources.items() if source.weight is None]
        if without and len(without) < len(self.sources):
            fix = "other sources have a weight, which is no number of tasks; set it for all, or for none"
            yield Problem(f"sources.{without[0]}.weight", None, fix)

    @check
    def _one_source_has_no_end(self) -> Problems:
        if all(source.max_epochs is not None for source in self.sources.values()):
            name, source = next(iter(self.sources.items()))
            fix = "all sources end, and the run could be left without tasks; set it to null for one of them"
            yield Problem(f"sources.{name}.max_epochs", source.max_epochs, fix)


class CurriculumStageConfig(Config):
    steps: int = Field(ge=1)
    """Steps of the stage, counted in groups: groups that are refused or given up count, too."""
    min: float | None = None
    """Smallest value of the key that its tasks have; null has no limit."""
    max: float | None = None
    """Largest value of the key that its tasks have; null has no limit."""

    def admits(self, level: float) -> bool:
        return (self.min is None or level >= self.min) and (self.max is None or level <= self.max)


class CurriculumConfig(Config):
    key: str
    """Column with the difficulty of a task, a number."""
    stages: tuple[CurriculumStageConfig, ...] = Field(min_length=1)
    """Stages from the first step on; after the last one all tasks are trained on."""


class PassRateConfig(Config):
    min: float = Field(0.0, ge=0, le=1)
    """Skip a task if fewer of the samples of its last group passed."""
    max: float = Field(1.0, ge=0, le=1)
    """Skip a task if more of the samples of its last group passed."""
    max_skips: int = Field(4, ge=1)
    """Sample a task again, and so measure it, after it was skipped as many times in a row."""

    @check
    def _window_is_not_empty(self) -> Problems:
        if self.min > self.max:
            yield Problem("min", self.min, f"it exceeds max, {self.max:g}; lower it, or raise max")
        elif (self.min, self.max) == (0.0, 1.0):
            fix = "no pass rate is above 1 or below 0, so nothing is skipped; lower it, or raise min"
            yield Problem("max", self.max, f"{fix}, or remove the section")


class ReplayConfig(Config):
    share: float = Field(0.25, gt=0, lt=1)
    """Share of groups that sample a hard task again, in addition to the epochs."""
    max_pass_rate: float = Field(0.5, ge=0, lt=1)
    """A task is hard if at most this share of the samples of its last group passed."""
    exponent: float = Field(1.0, ge=0)
    """Hard tasks are drawn with a probability proportional to `(1 - pass rate) ** exponent`."""


class TaskSamplingConfig(Config):
    """Without any of these, each epoch visits every task once."""

    curriculum: CurriculumConfig | None = None
    """Begin with some tasks, by a column with their difficulty."""
    pass_rate: PassRateConfig | None = None
    """Skip tasks that are too easy or too hard for the policy at present."""
    replay: ReplayConfig | None = None
    """Sample hard tasks more often."""
    pass_reward: float = 1.0
    """A sample passes when its reward is at least this."""

    @property
    def by_pass_rate(self) -> bool:
        return self.pass_rate is not None or self.replay is not None


class DataConfig(Config):
    train: Annotated[_Tasks | _Examples | MixtureDataset, Field(discriminator="name")]
    """Tasks that are trained on."""
    sampling: TaskSamplingConfig = TaskSamplingConfig()
    """Which of these tasks are sampled, and when."""
    validation: DatasetConfig | None = Field(None, json_schema_extra=SIMPLE)
    """Tasks that are only measured."""
    validation_sets: dict[Key, DatasetConfig] = Field(default_factory=dict)
    """Further sets that are only measured, by names of your choice: metrics `validation/NAME/…`."""
    shuffle: bool = True
    """Draw the training tasks in an order that depends on the seed and the epoch."""
    system_prompt: str | None = Field(None, json_schema_extra=SIMPLE)
    """Put before each prompt as a system message."""
    prompt_template: str = "{prompt}"
    """The user's message; `{prompt}` is replaced by the task's text."""
    chat: bool = Field(True, json_schema_extra=SIMPLE)
    """Apply the tokenizer's chat template; false takes the prompt as plain text (base models)."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Do not sample tasks with longer prompts; their groups train nothing, and are counted as errors. null:
    only `policy.max_sequence_length` limits prompts."""

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """What is trained on, by the names of a mixture; the name of a single dataset is empty."""
        if isinstance(self.train, MixtureDataset):
            return self.train.sources
        return {"": SourceConfig(dataset=self.train)}

    @property
    def metrics(self) -> Iterator[str]:
        """Names of the metrics of sources and of sampling by pass rates."""
        if isinstance(self.train, MixtureDataset):
            for name in self.train.sources:
                yield from (f"source/{name}/{kind}" for kind in ("share", "reward", "pass_rate"))
        if self.sampling.by_pass_rate:
            yield from ("sampling/skipped", "sampling/replayed")

    @property
    def trained_on(self) -> Iterator[tuple[str, DatasetConfig]]:
        """Each dataset that is trained on, with the path of its section."""
        for name, source in self.sources.items():
            yield f"data.train.sources.{name}.dataset" if name else "data.train", source.dataset

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
    def _samplings_fit(self) -> Problems:
        sampling = self.sampling
        if not sampling.by_pass_rate and not isinstance(self.train, MixtureDataset):
            reason = "nothing uses pass rates; set pass_rate or replay, train on a mixture, or remove this"
            yield from sampling.without_effect(("pass_reward",), reason, "sampling.")
        for path, dataset in self.trained_on:
            if sampling.curriculum is not None and getattr(dataset, "stream", None) is not None:
                fix = f"{path} is read as it is needed, so its tasks cannot be sorted; remove the curriculum"
                yield Problem("sampling.curriculum.key", sampling.curriculum.key, f"{fix}, or read all rows")

    @check
    def _validation_shares_no_task(self) -> Problems:
        """Tasks of training say nothing about what was learned."""
        for path, dataset in self.held_out:
            field = path.removeprefix("data.")
            if getattr(dataset, "stream", None) is not None and not isinstance(dataset, GeneratorDataset):
                fix = (
                    "every validation reads the same tasks, which are kept; remove it, or name a smaller file"
                )
                yield Problem(f"{field}.stream", "set", fix)
            for _, train in self.trained_on:
                yield from self._shared(train, dataset, field)

    @staticmethod
    def _shared(train: DatasetConfig, dataset: DatasetConfig, field: str) -> Problems:
        match train, dataset:
            case FileDataset(), FileDataset():
                places = {
                    (one.path, one.files, one.split, one.subset, one.revision) for one in (train, dataset)
                }
                if len(places) == 1:
                    fix = "training reads the same file; use another"
                    yield Problem(f"{field}.path", str(dataset.path), fix)
            # A seed determines an order of all pairs; parts of two orders share tasks.
            case ArithmeticDataset(), ArithmeticDataset() if train.digits == dataset.digits:
                end = train.offset + train.size
                if train.seed != dataset.seed:
                    fix = f"another order of the pairs shares tasks with training; use seed {train.seed}"
                    yield Problem(f"{field}.seed", dataset.seed, f"{fix} and an offset")
                elif dataset.offset < end and train.offset < dataset.offset + dataset.size:
                    fix = f"training uses tasks {train.offset} to {end - 1} of the same order"
                    yield Problem(f"{field}.offset", dataset.offset, f"{fix}; start at {end}")
            # Reasoning-gym makes task i from the seed `seed + i`: near seeds give nearly the same tasks.
            case ReasoningGymDataset(), ReasoningGymDataset():
                if train.task == dataset.task and train.options == dataset.options:
                    yield from _shared_seeds(train, dataset, field)
            case SeedsDataset(), SeedsDataset():
                yield from _shared_seeds(train, dataset, field)
            case LibraryDataset(), LibraryDataset() if train.shares_tasks(dataset):
                fix = "training uses tasks of the same task set; set size and offset of both"
                yield Problem(f"{field}.offset", dataset.offset, fix)


def _shared_seeds(
    train: ReasoningGymDataset | SeedsDataset, dataset: ReasoningGymDataset | SeedsDataset, field: str
) -> Problems:
    end = train.seed + train.size
    if dataset.seed < end and train.seed < dataset.seed + dataset.size:
        fix = f"training uses the tasks of seeds {train.seed} to {end - 1}"
        yield Problem(f"{field}.seed", dataset.seed, f"{fix}; set it to {end} or more")
