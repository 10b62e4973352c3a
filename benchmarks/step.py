"""How long does a GRPO step on SmolLM2 take, stage by stage and compared with TRL's?

    python benchmarks/step.py [--prompt-tokens 64 256 1024] [--steps 2] [--rounds 2] [--sides trl trl_vllm]

Both trainers get the same model in float32, the same prompts of each length, groups of `--samples` answers of
the same ragged lengths up to `--new-tokens`, the same reward function, temperature 1 and all cores. No token
ends an answer before its length: the model gets an end token that it does not sample. Rounds take turns, each
in processes of its own; the first step of a round warms up and is not counted.
TRL, in the extra `bench`, accumulates gradients over as many answers as fit into `--trl-tokens`. It
samples by transformers' `generate`, or by vLLM in its process (`vllm_mode="colocate"`).
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from common import OUT, Timing, publish, ragged_length, table_of
from trl_side import train_with_trl

from nemorl.observe.metrics import read_metrics
from nemorl.trajectories import Episode, Model, Task

STAGES = ("generation", "environment", "logprobs", "training", "refit", "step")
TEMPLATE_TOKENS = 40  # that the chat template of SmolLM2 adds, at most
UNUSED = "<empty_output>"  # of SmolLM2's vocabulary
Steps = list[dict[str, float]]
TRL_WAYS: dict[str, Callable[["Work"], dict[str, Any]]] = {  # options of TRL by the way it samples
    "trl": lambda work: {},
    "trl_vllm": lambda work: {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": work.longest,
    },
}


@dataclass(frozen=True)
class Work:
    """One setting of both trainers."""

    model: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    steps: int  # counted ones of a round
    trl_tokens: int  # of a backward pass of TRL

    @property
    def answers(self) -> int:
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        return self.prompt_tokens + TEMPLATE_TOKENS + self.new_tokens


def brevity(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between most answers, in TRL's convention, which both trainers call."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [-len(set(text.split())) / 100 for text in texts]


class OneAnswer:
    """An agent that answers each sample of a task once, in the tokens that `OneAnswerFactory` gives."""

    def __init__(self, factory: "OneAnswerFactory") -> None:
        self._factory = factory

    async def run(self, task: Task, model: Model) -> Episode:
        """Call the model once."""
        await model.chat(task.messages, max_tokens=self._factory.next_length(task))
        return Episode()

    async def close(self) -> None:
        """Nothing is held."""


class OneAnswerFactory:
    """Gives the lengths of a task to its samples in sequence; one process samples all of them."""

    reward_weights: Mapping[str, float] = {}

    def __init__(self) -> None:
        self._given: Counter[int] = Counter()

    def create(self) -> OneAnswer:
        """For one sample."""
        return OneAnswer(self)

    def next_length(self, task: Task) -> int:
        """Tokens of the next sample."""
        lengths: list[int] = task.columns["lengths"]
        self._given[task.index] += 1
        return lengths[(self._given[task.index] - 1) % len(lengths)]

    async def close(self) -> None:
        """Nothing is held."""


def with_unused_end(model: Path, folder: Path) -> Path:
    """The model with an end token that it does not sample, in `folder`."""
    from transformers import AutoTokenizer

    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # The token with which the template ends a turn ends answers, too.
    tokenizer.chat_template = tokenizer.chat_template.replace(tokenizer.eos_token, UNUSED)
    tokenizer.eos_token = tokenizer.pad_token = UNUSED
    tokenizer.save_pretrained(folder)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), encoding="utf-8")
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return folder


def questions(work: Work) -> Iterator[tuple[str, list[int]]]:
    """Different questions of `prompt_tokens` each, with the tokens of their answers.

    A question is sums that are solved, and one that is not. The median length is half of the limit.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    draw, lengths = random.Random(1), random.Random(2)
    for _ in range(work.prompts * (work.steps + 1)):
        text = ""
        while len(tokenizer.encode(text)) < work.prompt_tokens:
            left, right = draw.randrange(100), draw.randrange(100)
            text += f"{left} + {right} = {left + right}. "
        tokens = tokenizer.encode(text + f"{draw.randrange(100)} + {draw.randrange(100)} =")
        of_answers = [
            ragged_length(lengths, work.new_tokens / 2, work.new_tokens) for _ in range(work.samples)
        ]
        yield tokenizer.decode(tokens[-work.prompt_tokens :]), of_answers


def experiment(work: Work, run_dir: Path, tasks: Path) -> dict[str, Any]:
    """Our side: two data-parallel policy processes where there are two cores."""
    return {
        "run_dir": str(run_dir),
        "policy": {
            "model_path": work.model,
            "precision": "float32",
            "max_sequence_length": work.longest,
            "micro_batch_tokens": max(2048, work.longest),
            "layout": {"data_parallel_size": min(2, len(os.sched_getaffinity(0)))},
            "optimizer": {"name": "adam", "lr": 1e-6},
        },
        "generation": {"max_new_tokens": work.new_tokens, "max_batch_size": work.answers},
        "data": {"train": {"name": "tasks", "path": str(tasks), "answer_key": None}, "shuffle": False},
        "env": {"name": "custom", "factory": "step:OneAnswerFactory"},
        "rewards": [{"function": "step:brevity", "signature": "trl"}],
        "algorithm": {
            "name": "grpo",
            "num_steps": work.steps + 1,
            "num_prompts_per_step": work.prompts,
            "num_generations_per_prompt": work.samples,
        },
        "checkpointing": {"enabled": False},
        "logger": {"console": "plain"},
    }


def run_nemorl(work: Work, number: int) -> Steps:
    """Metrics of every counted step of one round."""
    run_dir = OUT / f"nemorl-{number}"
    shutil.rmtree(run_dir, ignore_errors=True)
    tasks, config = OUT / f"step-{number}.jsonl", OUT / f"nemorl-{number}.yaml"
    rows = [json.dumps({"prompt": question, "lengths": lengths}) for question, lengths in questions(work)]
    tasks.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    config.write_text(yaml.safe_dump(experiment(work, run_dir, tasks)), encoding="utf-8")
    command = [sys.executable, "-m", "nemorl.cli", "train", str(config)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}  # for the reward
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    return [dict(line.values) for line in read_metrics(run_dir / "metrics.jsonl")[1:]]


def run_trl(work: Work, number: int, way: str) -> Steps:
    """Seconds and generated tokens of every counted step of one round of TRL."""
    out = OUT / f"{way}-{number}.json"
    options = ["--trl-round", way, str(out), json.dumps(asdict(work))]
    subprocess.run([sys.executable, __file__, *options], check=True, stdout=sys.stderr)
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def trl_round(work: Work, way: str) -> Steps:
    """One round of TRL, in this process."""
    from transformers import TrainerCallback

    measured: Steps = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            measured.append({"time/step": time.perf_counter() - self.began})

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                measured[-1]["tokens/generated"] = logs["completions/mean_length"] * work.answers

    fit = max(1, work.trl_tokens // work.longest)
    together = max(n for n in range(1, work.answers + 1) if work.answers % n == 0 and n <= fit)
    asked, lengths = zip(*questions(work), strict=True)
    train_with_trl(
        Path(work.model),
        [{"prompt": [{"role": "user", "content": question}]} for question in asked],
        brevity,
        samples=work.samples,
        lengths=[one for of_question in lengths for one in of_question],
        answers=work.answers,
        together=together,
        new_tokens=work.new_tokens,
        callback=Clock(),
        output_dir=str(OUT / "trl"),
        max_steps=work.steps + 1,
        learning_rate=1e-6,
        **TRL_WAYS[way](work),
    )
    return measured[1:]


def median(steps: Steps, key: str) -> float:
    """Median over the steps."""
    return statistics.median(step[key] for step in steps)


def summary(work: Work, ours: list[Steps], trl: Mapping[str, list[Steps]]) -> dict[str, Any]:
    """Medians over all counted steps; the ratio is that of each round's own seconds."""
    steps = [step for steps in ours for step in steps]
    metrics: dict[str, Any] = {
        **asdict(work),
        "nemorl": {
            "seconds": {stage: median(steps, f"time/{stage}") for stage in STAGES},
            "step_seconds_by_round": [[step["time/step"] for step in round_] for round_ in ours],
            "generated_tokens": median(steps, "tokens/generated"),
            "generated_tokens_per_second": median(steps, "throughput/generated_tokens_per_second"),
            "shared_tokens": median(steps, "packing/shared"),
        },
    }
    for name, theirs in trl.items():
        whole = [step for steps in theirs for step in steps]
        mine, other = (
            Timing(side, tuple(sum(s["time/step"] for s in round_) for round_ in rounds))
            for side, rounds in (("nemorl", ours), (name, theirs))
        )
        metrics[name] = {
            "seconds": {"step": median(whole, "time/step")},
            "step_seconds_by_round": [[step["time/step"] for step in round_] for round_ in theirs],
            "generated_tokens": median(whole, "tokens/generated"),
        }
        metrics[f"{name}_step_over_nemorl_step"] = other.ratio_to(mine)
    return metrics


def shown(metrics: dict[str, Any]) -> dict[str, object]:
    """A row of the table."""
    seconds = metrics["nemorl"]["seconds"]
    row = {"prompt tokens": metrics["prompt_tokens"], **{f"{stage} s": seconds[stage] for stage in STAGES}}
    for name in TRL_WAYS:
        if name in metrics:
            ratio = metrics[f"{name}_step_over_nemorl_step"]
            row |= {f"{name} step s": metrics[name]["seconds"]["step"], f"{name} / nemorl": ratio}
    return row


def main() -> None:
    """Measure in turns and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--prompts", type=int, default=2, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--trl-tokens", type=int, default=2048, help="of a backward pass of TRL")
    ways = parser.add_argument("--sides", nargs="*", choices=list(TRL_WAYS), default=["trl"])
    ways.help = "other sides: TRL by the way it samples; none without a value"
    parser.add_argument("--trl-round", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.trl_round:
        way, out, work = arguments.trl_round
        Path(out).write_text(json.dumps(trl_round(Work(**json.loads(work)), way)), encoding="utf-8")
        return
    model = with_unused_end(arguments.model.resolve(), OUT / "step-model")
    found = []
    for prompt_tokens in arguments.prompt_tokens:
        work = Work(
            str(model.resolve()),
            arguments.prompts,
            arguments.samples,
            prompt_tokens,
            arguments.new_tokens,
            arguments.steps,
            arguments.trl_tokens,
        )
        ours: list[Steps] = []
        theirs: dict[str, list[Steps]] = {way: [] for way in arguments.sides}
        for number in range(arguments.rounds):
            ours.append(run_nemorl(work, number))
            for way, rounds in theirs.items():
                rounds.append(run_trl(work, number, way))
        found.append(summary(work, ours, theirs))
        title = f"one GRPO step on SmolLM2, {work.prompts} x {work.samples} answers"
        publish("step", {"settings": found}, table_of(title, [shown(one) for one in found]))


if __name__ == "__main__":
    main()
