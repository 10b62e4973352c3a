"""Time of a program in a sandbox, for each way to isolate that this machine has.

    python benchmarks/sandbox.py [--runs 100] [--concurrent 2]

`plain` starts the interpreter without a sandbox. The processor time of all processes of a run depends less on
other work of the machine than the rate does.
"""

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from common import publish, table_of
from rich.console import Console

from nemorl.config.sandbox import LocalSandboxConfig
from nemorl.environments.isolation import ISOLATIONS
from nemorl.environments.sandbox import LocalSandbox, LocalSession, isolation_problem

PROGRAM = "print(input())"
Run = Callable[[], Awaitable[str]]


async def measure(run: Run, runs: int, concurrent: int) -> dict[str, float]:
    """Median time and mean processor time of single runs, and the rate of `concurrent` at a time."""
    await run()
    seconds, used = [], processor_seconds()
    for _ in range(runs):
        start = time.perf_counter()
        assert await run() == "7\n"
        seconds.append(time.perf_counter() - start)
    used = (processor_seconds() - used) / runs
    left = iter(range(runs))

    async def repeat() -> None:
        for _ in left:
            await run()

    start = time.perf_counter()
    await asyncio.gather(*(repeat() for _ in range(concurrent)))
    rate = runs / (time.perf_counter() - start)
    return {
        "milliseconds": round(1000 * statistics.median(seconds), 2),
        "processor_milliseconds": round(1000 * used, 2),
        "runs_per_second": round(rate, 1),
    }


def processor_seconds() -> float:
    """Of this process and of all processes below it that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--concurrent", type=int, default=os.cpu_count())
    arguments = parser.parse_args()

    def start_plain() -> str:
        command = [os.path.realpath(sys.executable), "-s", "-B", "-c", PROGRAM]
        return subprocess.run(command, input="7", capture_output=True, text=True, check=True).stdout

    rows = {}
    rows["plain"] = await measure(
        lambda: asyncio.to_thread(start_plain), arguments.runs, arguments.concurrent
    )
    for name in ISOLATIONS:
        config = LocalSandboxConfig(name=name, max_concurrent=arguments.concurrent)
        if problem := isolation_problem(name, config):
            Console(stderr=True).print(f"{name}: {problem}")
            continue
        sandbox = LocalSandbox(config, ISOLATIONS[name]())
        session = sandbox.session()

        async def run(sandbox: LocalSandbox = sandbox) -> str:
            return (await sandbox.run(PROGRAM, "7")).stdout

        async def run_snippet(session: LocalSession = session) -> str:
            return (await session.run("print(7)")).stdout

        rows[name] = await measure(run, arguments.runs, arguments.concurrent)
        rows[f"{name}, snippet of a session"] = await measure(run_snippet, arguments.runs, 1)
        await sandbox.close()
    shown = [{"isolation": name, **row} for name, row in rows.items()]
    table = table_of(f"A program that prints, {arguments.concurrent} at a time", shown)
    publish("sandbox", {"concurrent": arguments.concurrent, "rows": shown}, table)


if __name__ == "__main__":
    asyncio.run(main())
