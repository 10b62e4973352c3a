"""What functions of other projects' signatures are given, and what they answer (`signatures.py`)."""

from typing import Any

from nemorl.config.environment import Signature

from .scored import Answers, Columns, text_of


def given_columns(signature: Signature, answers: Answers) -> Columns:
    """What a function of this signature may be given, a list each with one entry an answer.

    verl's ground truth is the column `reward_model`'s, where the data are verl's, else the task's answer;
    its `extra_info` is the column of that name, else all columns.
    """
    columns, task = answers.columns, answers.task
    if signature == "trl":
        return columns
    prompts = [text_of(c.opening) for c in answers.conversations]
    said = [text_of(c.exchange) for c in answers.conversations]
    if signature == "openrlhf":
        queries = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
        return {**columns, "queries": queries, "prompts": prompts, "labels": columns["answer"]}
    of_verl = task.columns.get("reward_model")
    truth = of_verl.get("ground_truth", task.answer) if isinstance(of_verl, dict) else task.answer
    extra = task.columns.get("extra_info", task.columns)
    count = len(answers)
    return {**columns, "solution_str": said, "ground_truth": [truth] * count, "extra_info": [extra] * count}


def answered(signature: Signature, value: Any) -> Any:
    """What a function said as plain numbers: a list of them for a group, or one for an answer."""
    if isinstance(value, dict):
        value = value.get({"verl": "score", "openrlhf": "rewards"}.get(signature, ""), value)
    return value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
