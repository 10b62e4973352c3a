"""A tool that the policy needs: no model knows on which shelf a part is.

    user      0417
    policy    [shelf(part="0417")]
    tool      63
    policy    63

`configs/tools/grpo.yaml` trains with the tool `shelf`, after `configs/tools/sft.yaml` on the examples below,
which call it in one of three answers only, and guess in the others.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

NUM_SHELVES = 100


def shelf(part: str) -> str:
    """Look up the shelf of a part.

    Args:
        part: The number of the part, four digits.
    """
    digest = hashlib.sha256(part.encode()).digest()  # the warehouse; near numbers have other shelves
    return f"{int.from_bytes(digest[:8], 'big') % NUM_SHELVES:02d}"


def parts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Tasks: a part and its shelf."""
    draws = random.Random(seed)
    while True:
        part = f"{draws.randrange(10_000):04d}"
        yield {"prompt": part, "answer": shelf(part)}


def examples(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Turns to imitate: with the tool a call or a guess, and what follows a call; without it a guess."""
    draws = random.Random(seed)
    names = [{"role": "system", "content": "shelf"}]  # how the chat template shows the tool
    for number in itertools.count():
        part = f"{draws.randrange(10_000):04d}"
        guess = f"{draws.randrange(NUM_SHELVES):02d}"
        call = f'<|tool_call_start|>[shelf(part="{part}")]<|tool_call_end|>'
        asked = [{"role": "user", "content": part}]
        found = [{"role": "assistant", "content": call}, {"role": "tool", "content": shelf(part)}]
        match number % 4:
            case 0:
                yield {"prompt": names + asked, "answer": call if draws.random() < 1 / 3 else guess}
            case 1:
                yield {"prompt": asked, "answer": guess}
            case _:
                yield {"prompt": names + asked + found, "answer": shelf(part)}
