"""A generator of tasks, which experiments of tests name."""

from collections.abc import Iterator


def sums() -> Iterator[dict[str, str]]:
    for number in range(100):
        left, right = divmod(number, 10)
        yield {"prompt": f"{left}+{right}=", "answer": f"{left + right:02d}"}
