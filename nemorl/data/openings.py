"""How a conversation opens: the dataset's prompt, the template around it, the system prompt before it."""

from collections.abc import Sequence

from nemorl.config.data import DataConfig
from nemorl.trajectories import Message

from .json_lines import DatasetError


def opening(prompt: str | Sequence[Message], data: DataConfig) -> tuple[Message, ...]:
    """The messages that open a conversation: system prompt, then the prompt put into the template.

    The template is applied to a text, or to the last user message of a list. Raises DatasetError.
    """
    messages = [Message("user", prompt)] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise DatasetError("the prompt has no user message")
    # Not str.format: prompts and templates may hold braces of their own.
    filled = data.prompt_template.replace("{prompt}", messages[users[-1]].content)
    messages[users[-1]] = Message("user", filled)
    if data.system_prompt is None:
        return tuple(messages)
    if messages[0].role == "system":
        raise DatasetError(
            "the prompt has a system message and `data.system_prompt` is set; keep one of them"
        )
    return (Message("system", data.system_prompt), *messages)
