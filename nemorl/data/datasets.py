"""From a `data` section to tasks: every dataset is a sequence of `Task`."""

from collections.abc import Sequence

from nemorl.config.data import (
    ArithmeticDataset,
    ConversationsDataset,
    DataConfig,
    DatasetConfig,
    FeedbackDataset,
    JsonlDataset,
    PreferenceDataset,
    ReasoningGymDataset,
    StepsDataset,
)
from nemorl.trajectories import Message, Task

from .arithmetic import ArithmeticTasks
from .json_lines import DatasetError, Row, column, read_rows, text_or_messages
from .judged import Dialogue, load_conversations, tasks_of
from .lazy import LazyTasks
from .openings import opening


def load_tasks(dataset: DatasetConfig, data: DataConfig) -> Sequence[Task]:
    """The tasks of `data.train` or `data.validation`, with the prompt template and system prompt applied.

    Of answers that are compared the chosen one is the task's; of a conversation its last. Raises
    DatasetError.
    """
    match dataset:
        case JsonlDataset():
            return read_rows(dataset.path, lambda index, row: _jsonl_task(index, row, dataset, data))
        case ReasoningGymDataset():
            return ReasoningGymTasks(dataset, data)
        case ArithmeticDataset():
            return ArithmeticTasks(dataset, data)
        case ConversationsDataset() | PreferenceDataset() | FeedbackDataset() | StepsDataset():
            return tasks_of(dataset, data)


def load_dialogues(dataset: DatasetConfig, data: DataConfig) -> list[Dialogue]:
    """What SFT learns: conversations, or tasks with their answers. Raises DatasetError."""
    if isinstance(dataset, ConversationsDataset):
        return load_conversations(dataset, data)
    return [_answered(task) for task in load_tasks(dataset, data)]


def _answered(task: Task) -> Dialogue:
    if task.answer is None:
        raise DatasetError(
            f"task {task.index} has no answer to learn: name its key in `data.train.answer_key`"
        )
    return Dialogue(task.messages, (Message("assistant", task.answer),))


class ReasoningGymTasks(LazyTasks):
    """Tasks of a reasoning-gym dataset; the columns carry what its own scorer needs."""

    def __init__(self, config: ReasoningGymDataset, data: DataConfig) -> None:
        super().__init__(config.size, data)
        import reasoning_gym  # a second of imports that other datasets need not pay

        self._config = config
        try:
            self._dataset = reasoning_gym.create_dataset(
                config.task, size=config.size, seed=config.seed, **config.options
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise DatasetError(
                f"reasoning_gym dataset `{config.task}` with options {config.options}: {error}"
            ) from error

    def _make(self, index: int) -> Task:
        item = self._dataset[index]
        columns = {
            "question": item["question"],
            "metadata": item["metadata"],
            "reasoning_gym_task": self._config.task,
            "reasoning_gym_options": self._config.options,
        }
        return Task(index, opening(item["question"], self._data), item["answer"], columns)


def _jsonl_task(index: int, row: Row, config: JsonlDataset, data: DataConfig) -> Task:
    prompt = text_or_messages(column(row, config.prompt_key, "data.*.prompt_key"), config.prompt_key)
    answer = None
    if config.answer_key is not None:
        answer = column(row, config.answer_key, "data.*.answer_key")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DatasetError(
                f"key `{config.answer_key}`: a text or a number is wanted, not {type(answer).__name__}"
            )
    return Task(index, opening(prompt, data), None if answer is None else str(answer), row)
