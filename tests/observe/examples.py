"""What the tests of the run folder write into it."""

from nemorl.observe.metrics import Sample

CONFIG = "algorithm:\n  name: grpo\n  num_steps: 3\npolicy:\n  model_path: models/tiny\n"


def make_sample(step: int, **changes: object) -> Sample:
    """A conversation of a step."""
    fields: dict[str, object] = {
        "step": step,
        "phase": "training",
        "task": 7,
        "prompt": "What is 12+34?",
        "completion": "046",
        "reward": 1.0,
        "rewards": {"math": 1.0},
        "stop": "stop",
        "prompt_tokens": 6,
        "sampled_tokens": 4,
        "answer": "46",
    }
    return Sample(**(fields | changes))  # type: ignore[arg-type]
