"""How long does the web app take with a long run: charts, the table of trajectories, one of 32k tokens?

    python benchmarks/ui.py [--trajectories 1000000] [--steps 10000] [--tokens 32000] [--runs 1000]

Writes a run folder (about 140 MB of index and metrics for the defaults) and many short ones, starts
`nemorl ui` on them, and measures requests from outside, each with a filter or an order that it has not had,
and with Chromium the time from a click to what is painted. Without playwright or Chromium only the requests
are measured.
"""

import argparse
import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import yaml
from common import publish, table_of
from rich.console import Console

from nemorl.data.trained import save_arrays
from nemorl.observe.index import COLUMNS, IndexWriter, TrajectoryIndex, TrajectoryRow
from nemorl.observe.live import Live, LiveEnd
from nemorl.observe.metrics import StepMetrics
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.rollout.stored import RolloutFiles, SampledBy, StoredGroup
from nemorl.trajectories import StopReason, Trajectory, Turn

RUN, SHORT = "run", "short"
NUM_METRICS, GROUP_SIZE = 60, 8


def make_run(root: Path, trajectories: int, steps: int, tokens: int) -> None:
    """The folder of a run: index, metrics, and one group of the last step with tokens."""
    run = root / RUN
    run.mkdir()
    checksum = save_tokenizer(root / "model")
    config = {"run_dir": RUN, "policy": {"model_path": str(root / "model"), "tokenizer": {"path": None}}}
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    write_index(run / "trajectories", trajectories, steps)
    write_metrics(run / "metrics.jsonl", steps)
    write_long_group(run / "trajectories", steps, tokens, SampledBy("model", checksum, 1.0, {"exact": 1.0}))


def save_tokenizer(folder: Path) -> str:
    """A byte-level tokenizer trained on the documentation; its checksum."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    tokenizer.train([str(path) for path in docs], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def write_index(folder: Path, trajectories: int, steps: int) -> None:
    """Rows of `trajectories` spread over the steps, in groups."""
    rng = np.random.default_rng(0)
    base = TrajectoryRow(
        step=1, phase="training", group=0, sample=0, task=0, turns=1, tokens=1, sampled=1, reward=0.0,
        stop="stop", min_version=0, max_version=0, seconds_generation=0.0, seconds_environment=0.0,
        trains=True, rewards={"exact": 0.0, "format": 0.0},
    )  # fmt: skip
    other = {**vars(base), "stop": "length"}
    IndexWriter(folder).append([base, TrajectoryRow(**other)])
    columns, rows = TrajectoryIndex(folder).read()
    records = np.repeat(np.asarray(rows[:1]), trajectories)
    numbers = np.arange(trajectories)
    records["step"] = 1 + numbers * steps // trajectories
    records["group"], records["sample"] = numbers // GROUP_SIZE, numbers % GROUP_SIZE
    records["task"] = records["group"] % 7919
    records["tokens"] = rng.lognormal(6, 1, trajectories)
    records["sampled"] = records["tokens"] // 2
    records["stop"] = rng.random(trajectories) < 0.1
    for name in ("reward", "reward.exact", "reward.format", "advantage", "logprob_gap"):
        records[name] = rng.normal(size=trajectories)
    records["stored"][-GROUP_SIZE:] = True
    (folder / columns.file).write_bytes(records.tobytes())
    assert (folder / COLUMNS).is_file()


def write_metrics(path: Path, steps: int) -> None:
    rng = np.random.default_rng(0)
    names = ["reward/mean", "loss/policy", "time/step", "time/generation", "time/training"]
    names += [f"other/metric_{number}" for number in range(NUM_METRICS - len(names))]
    with path.open("w", encoding="utf-8") as file:
        for step, values in enumerate(rng.random((steps, NUM_METRICS)), start=1):
            metrics = StepMetrics(step, step, dict(zip(names, values.tolist(), strict=True)))
            file.write(json.dumps(metrics.to_json()) + "\n")


def write_short_runs(folder: Path, count: int) -> None:
    """Complete runs of a few steps, for the list."""
    end = {"outcome": "complete", "error": "", "time": "2026-01-01T00:10:00+00:00"}
    facts = {"algorithm": "grpo", "model": "model", "policy device": "cpu", "steps": "3"}
    start = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": "nemorl train a.yaml",
        "run": facts,
        "end": end,
    }
    live = Live(1, "host", 0.0, 3, 3, 0.0, end=LiveEnd("complete"))
    for number in range(count):
        run = folder / f"{number:04}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
        (run / "header.json").write_text(json.dumps([start]), encoding="utf-8")
        (run / "live.json").write_text(json.dumps(asdict(live)), encoding="utf-8")
        write_metrics(run / "metrics.jsonl", 3)


def write_long_group(folder: Path, step: int, num_tokens: int, origin: SampledBy) -> None:
    _, rows = TrajectoryIndex(folder).read()
    number, task = int(rows["group"][-1]), int(rows["task"][-1])
    rng = np.random.default_rng(1)
    members = []
    for _ in range(GROUP_SIZE):
        sampled = np.arange(num_tokens) >= 100
        members.append(
            Trajectory(
                tokens=rng.integers(0, 8000, num_tokens, dtype=np.int32),
                loss_mask=sampled,
                logprobs=np.where(sampled, -rng.exponential(0.5, num_tokens), 0).astype(np.float32),
                versions=np.where(sampled, step - 1, -1).astype(np.int32),
                turns=(Turn(100, num_tokens, StopReason.STOP),),
                rewards={"exact": 1.0},
                reward=1.0,
                stop=StopReason.STOP,
                group=number,
                task=task,
            )
        )
    summaries = tuple(summarize([each], row) for row, each in enumerate(members))
    advantages = tuple(np.where(each.loss_mask, 0.5, 0).astype(np.float32) for each in members)
    files = RolloutFiles(folder)
    files.begin(origin)
    group = StoredGroup(step, GroupSummary(number, task, None, summaries), tuple(members), advantages)
    files.write(step, [group])
    arrays = {
        "mask": np.concatenate([each.loss_mask for each in members]),
        "logprobs": np.concatenate([each.logprobs + np.float32(0.01) for each in members]),
        "advantages": np.concatenate(advantages),
    }
    lengths = [(f"{number}/{row}", num_tokens) for row in range(GROUP_SIZE)]
    path = folder / f"step_{step:06d}-trained-0.safetensors"
    save_arrays(path, arrays, {"sequences": json.dumps(lengths)})


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    process: psutil.Process

    def get(self, path: str, **params: object) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.url}{path}?{urlencode(params)}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def post(self, path: str, body: object) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    @property
    def megabytes(self) -> float:
        """Memory of its own, without pages of files."""
        memory = self.process.memory_info()
        return float((memory.rss - memory.shared) / 1e6)


@contextmanager
def serving(root: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "nemorl.cli", "ui", str(root), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"(http://127\.0\.0\.1:\d+)\S*#(\S+)", process.stdout.readline())
        assert address is not None
        yield Server(address[1], address[2], psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(30)


def seconds_of(work: Callable[[int], object], rounds: int) -> list[float]:
    """Seconds of each round; work gets its number, so that no round asks what an earlier one did."""
    seconds = []
    for number in range(rounds):
        start = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_watch(server: Server, rounds: int) -> dict[str, list[float]]:
    """The first state of a run reads all of its metrics; the first list reads every run."""

    def state(_: int) -> None:
        server.get("/api/watch/state", run=RUN)

    def chart(number: int) -> None:
        names = json.dumps(["reward/mean", "loss/policy", f"other/metric_{number}"])
        server.get("/api/watch/series", run=RUN, names=names, pixels=800, smoothing=0.9)

    def runs(_: int) -> None:
        server.get("/api/runs/list")

    return {
        "first state of a run": seconds_of(state, 1),
        "state of a run": seconds_of(state, rounds),
        "chart of three metrics": seconds_of(chart, rounds),
        "first list of runs": seconds_of(runs, 1),
        "list of runs": seconds_of(runs, rounds),
    }


def measure_compose(server: Server, rounds: int) -> dict[str, list[float]]:
    """A keystroke in the quickstart: its text is checked, and made a form and a picture."""
    recipe = json.loads(server.get("/api/compose/recipe", name="quickstart/grpo", file="grpo.yaml"))

    def check(number: int) -> None:
        text = recipe["text"] + f"seed: {number}\n"
        server.post("/api/compose/check", {"text": text, "file": "grpo.yaml"})

    return {
        "first check": seconds_of(check, 1),  # starts the process of the checks
        "check after a keystroke": seconds_of(check, rounds),
    }


def measure_requests(server: Server, trajectories: int, steps: int, rounds: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(2)
    last = (trajectories - 1) // GROUP_SIZE

    def page(**params: object) -> bytes:
        return server.get("/api/read/page", run=RUN, count=100, **params)

    def filtered(number: int) -> None:
        text = f"reward < 0.{number + 1} and stop == 'length' and rewards.format > 0"
        server.get("/api/read/table", run=RUN, filter=text)
        page(filter=text)

    columns = ["reward", "tokens", "logprob_gap", "task", "advantage", "rewards.exact", "stop", "group"]
    return {
        "first table": seconds_of(lambda _: server.get("/api/read/table", run=RUN), 1),
        "filter": seconds_of(filtered, rounds),
        "sort": seconds_of(lambda n: page(sort=f"-{columns[n % len(columns)]}"), min(rounds, len(columns))),
        "any page": seconds_of(lambda _: page(offset=rng.integers(0, trajectories)), rounds),
        "histogram": seconds_of(
            lambda n: server.get(
                "/api/read/histogram", run=RUN, column=columns[n % len(columns)], filter="step > 1"
            ),
            min(rounds, 6),
        ),
        "trajectory": seconds_of(
            lambda n: server.get(
                "/api/read/trajectory", run=RUN, step=steps, group=last, sample=n % GROUP_SIZE
            ),
            rounds,
        ),
    }


def measure_page(
    server: Server, metrics: Path, trajectories: int, steps: int, tokens: int
) -> dict[str, list[float]]:
    """From a click, or from a new address, to what is painted. Empty without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        Console(stderr=True).print("no playwright or Chromium: pages are not measured")
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})

        def painted() -> None:
            page.evaluate("() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))")

        def opened(_: int) -> None:
            page.goto("about:blank")
            page.goto(f"{server.url}/read?run={RUN}#{server.token}")
            page.locator(".grid-row:not(.head)").nth(5).get_by_text(str(steps)).wait_for()
            painted()

        def charted(_: int) -> None:
            page.goto("about:blank")
            page.goto(f"{server.url}/watch?run={RUN}#{server.token}")
            page.locator("[data-plot=Reward] canvas").wait_for()
            painted()

        def appended(number: int) -> None:
            step = steps + number + 1
            line = StepMetrics(step, step, {"reward/mean": 0.5, "time/step": 1.0}).to_json()
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            page.locator(".facts").get_by_text(f"{step:,}").wait_for()
            painted()

        def scrolled(number: int) -> None:
            page.evaluate(
                "(share) => { const b = document.querySelector('.grid-bar');"
                " b.scrollTop = share * b.scrollHeight; }",
                (number + 1) / 8,
            )
            page.wait_for_function(
                "(share) => { const row = document.querySelector('.grid-row:not(.head)');"
                f" return Math.abs(row.ariaRowIndex / {trajectories} - share) < 0.01"
                " && !row.innerText.includes('…'); }",
                arg=(number + 1) / 8,
                polling="raf",
            )
            painted()

        def filtered(number: int) -> None:
            page.get_by_label("Filter").fill(f"reward < 0.{number + 1}5")
            page.keyboard.press("Enter")
            page.wait_for_function(
                "(text) => location.search.includes(text) && document.querySelector('[role=status]')"
                ".innerText.includes(' of ')",
                arg=f"0.{number + 1}5",
                polling="raf",
            )
            painted()

        def read(number: int) -> None:
            page.locator(".grid-row:not(.head)").nth(number).click()
            page.get_by_role("heading", name=f"/{GROUP_SIZE - 1 - number}").wait_for()
            page.wait_for_function(
                f"() => document.querySelectorAll('.t').length === {tokens}", polling="raf"
            )
            painted()

        def show_stored() -> None:
            page.goto(f"{server.url}/read?run={RUN}&filter=stored#{server.token}")
            page.get_by_text(f"{GROUP_SIZE} of ").first.wait_for()

        seconds = {
            "page: first chart": seconds_of(charted, 3),
            "page: a step that was written": seconds_of(appended, 5),
            "page: first table": seconds_of(opened, 3),
            "page: scroll to any row": seconds_of(scrolled, 6),
            "page: filter": seconds_of(filtered, 3),
        }
        show_stored()
        seconds["page: trajectory"] = seconds_of(read, 1)
        page.goto("about:blank")
        show_stored()
        seconds["page: trajectory"] += seconds_of(read, 1)
        browser.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="an empty or new folder for the run, which is kept")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        if not (root / RUN).exists():
            make_run(root, arguments.trajectories, arguments.steps, arguments.tokens)
        sizes = (arguments.trajectories, arguments.steps)
        if not (root / SHORT).exists():
            write_short_runs(root / SHORT, arguments.runs)
        with serving(root) as server:
            seconds = measure_watch(server, arguments.rounds)
            seconds |= measure_requests(server, *sizes, arguments.rounds)
            seconds |= measure_compose(server, arguments.rounds)
            seconds |= measure_page(server, RunPaths(root / RUN).metrics, *sizes, arguments.tokens)
            megabytes = server.megabytes
    rows: list[dict[str, Any]] = [
        {"what": name, "median_seconds": statistics.median(values), "max_seconds": max(values)}
        for name, values in seconds.items()
    ]
    rows.append({"what": "memory of the server, MB", "median_seconds": "", "max_seconds": megabytes})
    title = f"Web app with {sizes[0]:,} trajectories of {sizes[1]:,} steps"
    of_run = {"trajectories": sizes[0], "steps": sizes[1], "tokens": arguments.tokens, "runs": arguments.runs}
    publish("ui", of_run | {"seconds": seconds, "server_megabytes": megabytes}, table_of(title, rows))


if __name__ == "__main__":
    main()
