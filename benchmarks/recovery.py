"""How long does a run pause when it loses its driver, its only engine or the server of its rewards?

    python benchmarks/recovery.py [--rounds 2]

The run of `benchmarks/chaos.py` with one engine, under `nemorl train --supervise`; a reward is scored by a
server in a process of its own. Each gets SIGKILL and SIGSTOP, each after the recovery from the fault before.
A killed server is started again after 5 s, and a stopped one continues after 12 s; its return is counted from
then on. The driver has returned with the first step that it completes.
"""

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
from chaos import MEMORY, ChaosRun, adopt_orphans, create_models, experiment
from common import OUT, publish, table_of
from faults import TARGETS, Fault, Target, events_of, newest_process, recovery_times, strike
from reward_server import RewardServer

from nemorl.commands.terminal import ExitCode
from nemorl.observe.metrics import read_metrics
from nemorl.observe.run_folder import RunPaths

WAIT_SECONDS = 300.0  # for each recovery
STEPS_BETWEEN = 3
STALL_SECONDS = 10.0  # after which a stopped driver is killed
DOWN_SECONDS = {signal.SIGKILL: 5.0, signal.SIGSTOP: 12.0}  # of the reward server

ENGINE, SERVER = TARGETS[0], TARGETS[-1]
DRIVER = Target("driver", "", 1, "The run", "{name} was killed by ", "")


def wait_for(reached: Callable[[], bool], event: str) -> float:
    """The time of day at which something is so. Raises TimeoutError."""
    end = time.monotonic() + WAIT_SECONDS
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"no {event} within {WAIT_SECONDS:g} s")
        time.sleep(0.02)
    return time.time()


def lines_of(log: Path, *words: str) -> int:
    return sum(all(word in line for word in words) for line in log.read_text(encoding="utf-8").splitlines())


def strike_server(server: RewardServer, run: ChaosRun, number: signal.Signals) -> Fault:
    """Detection is the first unanswered call, return the first answer after the server is back."""
    log = run.run / "logs" / "rollout-0.log"
    lost, back = ("digits", "does not answer"), ("digits", "answers again")
    before = lines_of(log, *lost), lines_of(log, *back)
    struck = time.time()
    fault = Fault(0.0, SERVER, 0, number, at=struck)
    server.process.send_signal(number)
    fault.detected = wait_for(lambda: lines_of(log, *lost) > before[0], "failed call of the reward server")
    time.sleep(max(0.0, struck + DOWN_SECONDS[number] - time.time()))
    if number == signal.SIGSTOP:
        server.process.send_signal(signal.SIGCONT)
    else:
        server.process.wait()
        server.start()
    up = time.time()
    answered = wait_for(lambda: lines_of(log, *back) > before[1], "answer of the reward server")
    fault.back = struck + max(0.0, answered - up)
    return fault


def strike_driver(run: ChaosRun, number: signal.Signals) -> Fault:
    """Detection is the supervisor's message, return the first step of the next driver."""
    driver = next(
        child for child in psutil.Process(run.driver.pid).children() if "nemorl.cli" in child.cmdline()
    )
    lost = DRIVER.lost.format(name=DRIVER.name)
    before = lines_of(run.output, lost)
    fault = Fault(0.0, DRIVER, 0, number, at=time.time())
    driver.send_signal(number)
    fault.detected = wait_for(lambda: lines_of(run.output, lost) > before, "message of the supervisor")
    run.history.read()
    known, newest = len(run.history.lines), max(run.history.lines)

    def has_stepped() -> bool:
        run.history.read()
        return max(run.history.lines) > newest

    fault.back = wait_for(has_stepped, "step of the new driver")
    fault.discarded = known - sum(line.version <= newest for line in read_metrics(RunPaths(run.run).metrics))
    return fault


def strike_engine(run: ChaosRun, number: signal.Signals) -> Fault:
    logs = run.run / "logs"
    fault = Fault(0.0, ENGINE, 0, number)
    strike(fault, newest_process(fault, run.run))

    def event(back: bool) -> float | None:
        assert fault.at is not None
        events = events_of(logs, ENGINE, 0)
        return next((one.at for one in events if one.back == back and one.at > fault.at), None)

    wait_for(lambda: event(back=True) is not None, "return of the engine")
    fault.detected, fault.back = event(back=False), event(back=True)
    return fault


@contextmanager
def supervised_run(folder: Path, server: RewardServer) -> Iterator[ChaosRun]:
    memory = Path(tempfile.mkdtemp(prefix="nemorl-recovery-", dir=MEMORY))
    config = experiment(folder, memory, server)
    config["generation"]["replicas"] = config["cluster"]["rollout_workers"] = 1
    config["cluster"]["deadlines"]["stall"] = STALL_SECONDS
    config["rewards"] = [server.reward]
    del config["env"]
    run = ChaosRun(folder, config)
    run.start("--supervise")
    try:
        run.require(STEPS_BETWEEN)
        yield run
        run.driver.terminate()
        run.end(ExitCode.STOPPED)
    finally:
        if run.driver.poll() is None:
            run.driver.terminate()
        run.driver.wait()
        shutil.rmtree(memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="of all faults (default 2)")
    options = parser.parse_args()
    folder = OUT / "recovery"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    create_models(folder)
    adopt_orphans()
    server, faults = RewardServer(), list[Fault]()
    try:
        with supervised_run(folder, server) as run:
            for _ in range(options.rounds):
                for number in (signal.SIGKILL, signal.SIGSTOP):
                    for strike in (strike_engine, partial(strike_server, server), strike_driver):
                        run.require(run.history.read() + STEPS_BETWEEN)
                        faults.append(strike(run, number))
    finally:
        server.close()
    rows = recovery_times(faults, (ENGINE, SERVER, DRIVER))
    publish("recovery", {"recovery": rows}, table_of("seconds", rows))


if __name__ == "__main__":
    main()
