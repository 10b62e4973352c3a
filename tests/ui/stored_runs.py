"""Run folders with stored trajectories, as a run writes them, for tests of the web app."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nemorl.algorithms.metrics import rows_of
from nemorl.data.trained import save_arrays
from nemorl.observe.index import IndexWriter
from nemorl.observe.metrics import Sample
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.rollout.stored import RolloutFiles, SampledBy, StoredGroup, spread, validation_series
from nemorl.trajectories import StopReason, Trajectory, Turn

END = 256  # id of the token that ends a turn
WEIGHTS = {"exact": 2.0, "format": 0.5}


def save_byte_tokenizer(folder: Path) -> Tokenizer:
    """A token for each byte, and <end>."""
    bytes_in_order = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte)
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(bytes_in_order)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


def _byte(symbol: str) -> int:
    """The byte that a symbol of byte-level vocabularies is: those that print are themselves."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in printed]
    return ord(symbol) if ord(symbol) in printed else others[ord(symbol) - 256]


def ids(text: str) -> list[int]:
    return list(text.encode())


def sampled(
    prompt: str, answers: Sequence[str], rewards: dict[str, float], group: int, task: int, version: int = 0
) -> Trajectory:
    """A prompt, and turns of the policy with a `?` between them; the n-th token has logprob -n / 100."""
    tokens, mask, turns = ids(prompt), [False] * len(prompt.encode()), []
    for number, answer in enumerate(answers):
        if number:
            tokens, mask = [*tokens, *ids("?")], [*mask, False]
        start = len(tokens)
        tokens += [*ids(answer), END]
        mask += [True] * (len(tokens) - start)
        turns.append(
            Turn(
                *(start, len(tokens), StopReason.STOP, {"exact": 1.0} if number else {}, float(number)),
                seconds=0.5 * number,
            )
        )
    of_policy = np.array(mask)
    total = sum(WEIGHTS[name] * value for name, value in rewards.items())
    return Trajectory(
        tokens=np.array(tokens, np.int32),
        loss_mask=of_policy,
        logprobs=np.where(of_policy, -np.arange(len(tokens)) / 100, 0).astype(np.float32),
        versions=np.where(of_policy, version, -1).astype(np.int32),
        turns=tuple(turns),
        rewards=rewards,
        reward=total,
        stop=StopReason.STOP,
        group=group,
        task=task,
        seconds_generation=1.5,
    )


def group_of(step: int, number: int, task: int, members: Sequence[Trajectory]) -> StoredGroup:
    summaries = tuple(summarize([each], row) for row, each in enumerate(members))
    summary = GroupSummary(number, task, None, summaries)
    mean = sum(each.reward for each in members) / len(members)
    return StoredGroup(
        step, summary, tuple(members), tuple(spread(each, each.reward - mean) for each in members)
    )


def write_config(run: Path, model: Path, **changes: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    config = {
        "run_dir": str(run),
        "seed": 1,
        "policy": {"model_path": str(model), "tokenizer": {"path": None}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes), encoding="utf-8")


def make_run(run: Path, steps: int = 3, *, better: float = 0.0, answer: str = "{n}") -> Path:
    """Two groups of two in each step, a trained file of the first, and validations of four tasks.

    The first group of each step is stored. `better` is added to the rewards of validations. Sample 0 answers
    `answer` with its step as `n`.
    """
    model = run.parent / "model"
    save_byte_tokenizer(model)
    write_config(run, model)
    checksum = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
    folder = run / "trajectories"
    files = RolloutFiles(folder)
    files.begin(SampledBy(str(model), checksum, 0.5, WEIGHTS, {"name": "sums"}))
    index, lines, number = IndexWriter(folder), [], 0
    for step in range(1, steps + 1):
        groups = []
        for task in (7, step):
            right = {"exact": 1.0, "format": 1.0}
            wrong = {"exact": 0.0, "format": 1.0}
            members = [
                sampled("2+2=", [answer.format(n=step)], right, number, task, step - 1),
                sampled("2+2=", ["no", "né 💡"], wrong, number, task, step - 1),
            ]
            groups.append(group_of(step, number, task, members))
            number += 1
        files.write(step, groups[:1])
        write_trained_file(folder, step, groups[0])
        rows = list(
            rows_of(step, [each.summary for each in groups], "training", stored=[groups[0].summary.group])
        )
        index.append(replace(row, advantage=row.reward - 1.5) for row in rows)
        lines.append({"step": step, "version": step, "reward/mean": 1.5 + step, "time/step": 2.0})
    of_tasks = [
        group_of(
            steps,
            task,
            task,
            [sampled("1+1=", ["2"], {"exact": task / 4 + better * (task != 2)}, task, task)],
        )
        for task in range(4)
    ]
    series = RolloutFiles(folder, validation_series("easy"))
    series.write(steps, of_tasks[:2])
    index.append(rows_of(steps, [each.summary for each in of_tasks], "validation", "easy", {}, [0, 1]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return run


def write_trained_file(folder: Path, step: int, group: StoredGroup) -> None:
    """Trainer's logprobs that are the engine's and 0.25 more, values, and no weight for the first token."""
    lengths, parts = [], []
    for row, each in enumerate(group.sequences):
        lengths.append((f"{group.summary.group}/{row}", each.num_tokens))
        trains = each.loss_mask.copy()
        trains[np.flatnonzero(trains)[0]] = False
        parts.append({"mask": trains, "logprobs": each.logprobs + 0.25, "values": each.logprobs * 2})
        parts[-1]["advantages"] = group.advantages[row] * 3
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    path = folder / f"step_{step:06d}-trained-0.safetensors"
    save_arrays(path, arrays, {"sequences": json.dumps(lengths)})


def write_samples(run: Path, samples: Sequence[Sample], *more: str) -> None:
    lines = [json.dumps(asdict(each)) for each in samples]
    (run / "samples.jsonl").write_text("".join(f"{line}\n" for line in [*lines, *more]), encoding="utf-8")
