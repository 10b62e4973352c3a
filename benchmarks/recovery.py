"""How long does a run pause when it loses its driver, its only engine or the server of its rewards?

    python benchmarks/recovery.py [--rounds 2]

The run of `benchmarks/chaos.py` with one engine, under `nemorl train --supervise`; a reward is scored by a
server in a process of its own. Each gets SIGKILL and SIGSTOP, each after the recovery from the fault before.
A killed server is started again after 5 s, and a stopped one continues after 12 s; its return is counted from
then on. The driver has returned with the first step that it completes.
"""

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from chaos import MEMORY, ChaosRun, adopt_orphans, create_models, digits, experiment
from common import OUT, publish, table_of
from faults import TARGETS, Fault, Target, events_of, recovery_times, strike

from nemorl.commands.terminal import ExitCode
from nemorl.observe.metrics import read_metrics
from nemorl.observe.run_folder import RunPaths

WAIT_SECONDS = 300.0  # for each recovery
STEPS_BETWEEN = 3
STALL_SECONDS = 10.0  # after which a stopped driver is killed
REWARD_DEADLINE = 5.0
DOWN_SECONDS = {signal.SIGKILL: 5.0, signal.SIGSTOP: 12.0}  # of the reward server

ENGINE = TARGETS[0]
SERVER = Target("reward server", "", 1, "reward `digits`", "{name} at ", "")
DRIVER = Target("driver", "", 1, "The run", "{name} was killed by ", "")


class Rewards(BaseHTTPRequestHandler):
    """The protocol of a reward server, for `chaos.digits`."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = digits([one["completion"][-1]["content"] for one in request["conversations"]])
        data = [{"index": index, "reward": score} for index, score in enumerate(scores)]
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with suppress(BrokenPipeError):  # this process was stopped, and the call has been given up
            self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


class RewardServer:
    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", str(self.port)])
        wait_for(self._listens, "the reward server")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


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
    log = run.run / "logs" / "driver.log"
    fault = Fault(0.0, ENGINE, 0, number)
    strike(fault, run.run)

    def event(back: bool) -> float | None:
        assert fault.at is not None
        events = events_of(log, ENGINE, 0)
        return next((one.at for one in events if one.back == back and one.at > fault.at), None)

    wait_for(lambda: event(back=True) is not None, "return of the engine")
    fault.detected, fault.back = event(back=False), event(back=True)
    return fault


@contextmanager
def supervised_run(folder: Path, server: RewardServer) -> Iterator[ChaosRun]:
    memory = Path(tempfile.mkdtemp(prefix="nemorl-recovery-", dir=MEMORY))
    config = experiment(folder, memory)
    config["generation"]["replicas"] = config["cluster"]["rollout_workers"] = 1
    config["cluster"]["deadlines"]["stall"] = STALL_SECONDS
    reward = {"kind": "model", "name": "digits", "model": "digits", "deadline": REWARD_DEADLINE}
    config["rewards"] = [{**reward, "url": f"http://127.0.0.1:{server.port}/v1", "max_retries": 0}]
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
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        ThreadingHTTPServer(("127.0.0.1", options.serve), Rewards).serve_forever()
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
