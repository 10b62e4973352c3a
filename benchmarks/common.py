"""Shared by the benchmarks: the machine, alternatives timed in turns, JSON output and tables.

How a benchmark is written:

- One file answers one question, which is the first line of its docstring; it runs as
  `python benchmarks/<name>.py` and imports this module as `common`.
- What is compared runs in turns (`time_in_turns`), since a machine slows down and speeds up within minutes.
  Compare by the ratio of the same round (`Timing.ratio_to`), and show the spread with the median.
- Both sides do the same work with the same threads. The first run warms up and is not counted. Work that
  keeps state or memory runs in a process of its own for each round; its seconds are made a `Timing` by hand.
- Metrics have their unit in their key: `seconds`, `bytes`, `tokens_per_second`. Numbers are rounded in the
  table only, not in the JSON.
- `publish` writes `runs/bench/<name>.json` and prints the table. Results that are worth keeping are copied to
  `docs/results/`, with the machine that the file names.
"""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemorl.observe.run_folder import git_commit, installed_versions

OUT = Path("runs/bench")


def ragged_length(draw: random.Random, median: float, longest: int) -> int:
    """Tokens of a completion as rollouts have them: log-normal (sigma 0.8), at least 4."""
    return round(min(longest, max(4, median * draw.lognormvariate(0, 0.8))))


@dataclass(frozen=True)
class Machine:
    """The machine that produced the metrics."""

    cpu: str
    cores: int  # physical ones of the machine
    threads: int  # hardware threads that this process may use
    memory_gigabytes: float
    system: str
    python: str
    versions: dict[str, str]
    commit: str | None


@dataclass(frozen=True)
class Timing:
    """Seconds of one alternative, one value per round."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    def ratio_to(self, other: "Timing") -> float:
        """How many times as long as the other this one takes: median over rounds of the round's own ratio."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))

    def __str__(self) -> str:
        return f"{self.median:.4g} s ({min(self.seconds):.4g} to {max(self.seconds):.4g})"


def describe_machine() -> Machine:
    """This machine, its Python, and the packages that matter."""
    model, cores = _processor(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=model,
        cores=cores,
        threads=len(os.sched_getaffinity(0)),
        memory_gigabytes=round(memory / 1e9, 1),
        system=platform.platform(),
        python=platform.python_version(),
        versions=installed_versions(),
        commit=git_commit(Path(__file__)),
    )


def time_in_turns(
    alternatives: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 1
) -> dict[str, Timing]:
    """Time every alternative once a round, each round beginning with the next one, after uncounted rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    names = list(alternatives)
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            alternatives[name]()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(name, tuple(values)) for name, values in seconds.items()}


def table_of(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """A table with the keys of the first row as its columns; numbers with four significant digits."""
    columns = list(rows[0])
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_shown(row[column]) for column in columns))
    return table


def publish(name: str, metrics: Mapping[str, Any], table: Table, out: Path = OUT) -> Path:
    """Write metrics and machine as JSON, print table and machine; the path of the file."""
    machine = describe_machine()
    path = out / f"{name}.json"
    out.mkdir(parents=True, exist_ok=True)
    whole = {"benchmark": name, "machine": asdict(machine), **metrics}
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    console = Console()
    console.print(table)
    console.print(f"{machine.cpu}, {machine.cores} cores, {machine.threads} threads; metrics in {path}")
    return path


def _processor(cpuinfo: str) -> tuple[str, int]:
    """Model and physical cores, from the text of /proc/cpuinfo (x86; elsewhere the architecture)."""
    entries = [
        dict(line.split(":", 1) for line in block.replace("\t", "").splitlines() if ":" in line)
        for block in cpuinfo.strip().split("\n\n")
    ]
    model = entries[0].get("model name", platform.machine()).strip()
    places = {
        (e.get("physical id"), e.get("core id", e.get("processor"))) for e in entries if "processor" in e
    }
    return model, len(places)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
