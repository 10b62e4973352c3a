"""The reference's logprobs of whole answers: computed once, with the weights that a run starts from.

Losses of pairs and of single answers ask for the sum over an answer's tokens, so that is all that is kept: a
number for each sequence, by its content, in a file of the run folder. The reference's weights then need no
memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nemorl.data.examples import STAND_IN, Example
from nemorl.observe.files import write_whole
from nemorl.observe.observer import Observer
from nemorl.session.session import Session
from nemorl.session.shard import SequencePlace

FILE = "reference_logprobs.json"
_AT_A_TIME = 512  # sequences of one call, so that progress shows


class ReferenceSums:
    """Sums by the content of sequences; nothing is known of others."""

    def __init__(self, sums: dict[str, float] | None = None) -> None:
        self._sums = sums or {}

    def of(self, example: Example) -> float | None:
        """The sum of the reference's logprobs of the learnt tokens; 0 of an example without any."""
        return self.known(example) if self._sums else None

    def known(self, example: Example) -> float:
        """The same of one that was asked for beforehand."""
        return self._sums[_key(example)] if example.num_learnt else 0.0


async def reference_sums(
    examples: Callable[[], Iterable[Example]],
    run_dir: Path,
    model: Path,
    session: Session,
    observer: Observer,
    multiple: int,
) -> ReferenceSums:
    """Read what the run folder holds, and compute the rest with the weights that the policy has now.

    Call it before the policy learns or restores anything. `examples` is called twice and gives the same;
    they need not all be in memory. `multiple` is that of `OfflineLoop`.
    """
    wanted = {_key(example) for example in examples() if example.num_learnt}
    file, of_model = run_dir / FILE, _fingerprint(model)
    known = _read(file, of_model)
    missing = wanted - known.keys()
    if missing:
        with observer.stage("reference", total=len(missing), unit="sequences", outside_step=True) as stage:
            for part in _parts(_found(missing, examples())):
                sums = await _computed([example for _, example in part], session, multiple)
                known |= dict(zip((key for key, _ in part), sums, strict=True))
                stage.advance(len(part))
        write_whole(file, json.dumps({"model": of_model, "sums": known}))
    return ReferenceSums({key: known[key] for key in wanted})


async def _computed(examples: Sequence[Example], session: Session, multiple: int) -> list[float]:
    padded = [*examples, *[STAND_IN] * (-len(examples) % multiple)]
    store = session.store(padded)
    places = [SequencePlace(store, row, example.num_tokens) for row, example in enumerate(padded)]
    await session.learner.load(places, kind="examples")
    return (await session.learner.sequence_logprobs(reference=False))[: len(examples)]


def _found(keys: set[str], examples: Iterable[Example]) -> Iterator[tuple[str, Example]]:
    """Each once, with its key."""
    left = set(keys)
    for example in examples:
        key = _key(example)
        if key in left:
            left.remove(key)
            yield key, example


def _parts(items: Iterator[tuple[str, Example]]) -> Iterator[list[tuple[str, Example]]]:
    while part := list(islice(items, _AT_A_TIME)):
        yield part


def _key(example: Example) -> str:
    content = hashlib.blake2b(digest_size=16)
    content.update(example.tokens.tobytes())
    content.update(example.loss_mask.tobytes())
    return content.hexdigest()


def _fingerprint(model: Path) -> dict[str, list[int]]:
    """Size and time of the model's weights: a folder that was written anew is another reference."""
    stats = {file.name: file.stat() for file in sorted(model.glob("*.safetensors"))}
    return {str(model / name): [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _read(file: Path, of_model: dict[str, Any]) -> dict[str, float]:
    """What was computed before, with the same model; a file that cannot be read is computed anew."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content["sums"]) if content["model"] == of_model else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
