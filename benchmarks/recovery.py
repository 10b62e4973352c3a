"""How long does a run pause when it loses its driver, its only engine, the server of its rewards or a node?

    python benchmarks/recovery.py [--rounds 2]

The run of `benchmarks/chaos.py` with one engine, under `nemorl train --supervise`; a reward is scored by a
server in a process of its own. Each gets SIGKILL and SIGSTOP, each after the recovery from the fault before.
A killed server is started again after 5 s, and a stopped one continues after 12 s; its return is counted from
then on. The driver has returned with the first step that it completes.

Then the same run with vLLM, whose engine core gets the signals, and one over two nodes, which share this
machine, with a policy rank on each: one of them is lost, and the rank starts again on the other.
"""

import argparse
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from chaos import MEMORY, ChaosRun, adopt_orphans, create_models, experiment
from common import OUT, publish, table_of
from faults import (
    SIGNALS,
    TARGETS,
    Event,
    Fault,
    Target,
    events_of,
    newest_process,
    read_times,
    recovery_times,
    strike,
)
from ray.cluster_utils import Cluster
from reward_server import RewardServer

from nemorl.commands.terminal import ExitCode
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import read_metrics
from nemorl.observe.run_folder import RunPaths

WAIT_SECONDS = 300.0  # for each recovery
STEPS_BETWEEN = 20  # by then there is a checkpoint in memory
STALL_SECONDS = 10.0  # after which a stopped driver is killed
DOWN_SECONDS = {signal.SIGKILL: 5.0, signal.SIGSTOP: 12.0}  # of the reward server

ENGINE, POLICY, SERVER = TARGETS[0], TARGETS[2], TARGETS[-1]
CORE, NODE = replace(ENGINE, kind="core of vLLM's engine"), replace(POLICY, kind="node of a policy rank")
NODE_OPTIONS = {"include_dashboard": False, "object_store_memory": 100 * 2**20, "num_cpus": 8}
NUMBERS = itertools.count()
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
    fault = Fault(0.0, ENGINE, 0, number)
    strike(fault, newest_process(fault, run.run))
    return returned(fault, run)


def strike_core(run: ChaosRun, number: signal.Signals) -> Fault:
    fault = Fault(0.0, CORE, 0, number)
    host = psutil.Process(newest_process(fault, run.run))
    (core,) = (child for child in host.children() if "resource_tracker" not in " ".join(child.cmdline()))
    strike(fault, core.pid)
    return returned(fault, run)


def strike_node(cluster: Cluster, run: ChaosRun, number: signal.Signals) -> Fault:
    """Take a node that has a rank, after another has joined."""
    (lost,) = cluster.worker_nodes
    join(cluster)
    fault = Fault(0.0, NODE, 0, number, at=time.time())
    cluster.remove_node(lost, allow_graceful=False)
    return returned(fault, run)


def join(cluster: Cluster) -> None:
    """Add a node; by its name the run knows it from others on this machine."""
    cluster.add_node(**NODE_OPTIONS, node_name=f"node-{next(NUMBERS)}")


def returned(fault: Fault, run: ChaosRun) -> Fault:
    """The fault with what the log says of it, as soon as the member is back."""

    def event(back: bool) -> Event | None:
        assert fault.at is not None
        events = events_of(run.run / "logs", fault.target, fault.rank)
        return next((one for one in events if one.back == back and one.at > fault.at), None)

    wait_for(lambda: event(back=True) is not None, f"return after the loss of the {fault.target.kind}")
    read_times([fault], run.run / "logs")
    return fault


Strike = Callable[[ChaosRun, signal.Signals], Fault]


def faults_of(
    config: dict[str, Any],
    folder: Path,
    strikes: Sequence[Strike],
    numbers: Sequence[signal.Signals],
    *words: str,
) -> list[Fault]:
    """Faults of one run, each after the recovery from the one before."""
    memory = Path(tempfile.mkdtemp(prefix="nemorl-recovery-", dir=MEMORY))
    config["checkpointing"]["memory_dir"] = str(memory)
    folder.mkdir()
    run, faults = ChaosRun(folder, {**config, "run_dir": str(folder / "run")}), list[Fault]()
    run.start(*words)
    try:
        for number, strike_one in itertools.product(numbers, strikes):
            run.require(run.history.read() + STEPS_BETWEEN)
            faults.append(strike_one(run, number))
        run.driver.terminate()
        run.end(ExitCode.STOPPED)
    finally:
        if run.driver.poll() is None:
            run.driver.terminate()
        run.driver.wait()
        shutil.rmtree(memory)
    return faults


def small(folder: Path, server: RewardServer) -> dict[str, Any]:
    """An experiment with one engine and one rollout worker, without actors and a reward model."""
    config = experiment(folder, folder, server)
    config["generation"]["replicas"] = config["cluster"]["rollout_workers"] = 1
    config["rewards"] = [server.reward]
    del config["env"]
    return config


def of_processes(folder: Path, server: RewardServer, rounds: int) -> list[Fault]:
    config = small(folder, server)
    config["cluster"]["deadlines"]["stall"] = STALL_SECONDS
    strikes = (strike_engine, partial(strike_server, server), strike_driver)
    return faults_of(config, folder / "processes", strikes, SIGNALS * rounds, "--supervise")


def of_vllm(folder: Path, server: RewardServer, rounds: int) -> list[Fault]:
    config = small(folder, server)
    model = folder / "model_of_vllm"
    create_tiny_model(model, hidden=64, ffn=64, layers=2, heads=2, kv_heads=2)  # which vLLM runs on a CPU
    config["policy"]["model_path"] = str(model)
    config["generation"] = {"backend": "vllm", "threads": 1, "max_new_tokens": 6}
    config["cluster"]["deadlines"]["engine_step"] = STALL_SECONDS
    config["algorithm"]["max_logprob_gap"] = 10.0  # the learning rate moves this model far
    return faults_of(config, folder / "vllm", [strike_core], SIGNALS * rounds)


def of_nodes(folder: Path, server: RewardServer, rounds: int) -> list[Fault]:
    config = small(folder, server)
    config["rewards"] = [{"function": "exact_match"}]  # the server listens on this machine only
    config["policy"]["layout"] = {"data_parallel_size": 2}
    config["cluster"] |= {"num_nodes": 2, "placement": "SPREAD"}
    head = {**NODE_OPTIONS, "node_name": f"node-{next(NUMBERS)}"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        join(cluster)
        strikes = [partial(strike_node, cluster)]
        return faults_of(config, folder / "nodes", strikes, [signal.SIGKILL] * rounds)
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


PARTS = {"processes": of_processes, "vllm": of_vllm, "nodes": of_nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="of all faults (default 2)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    options = parser.parse_args()
    folder = OUT / "recovery"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    create_models(folder)
    adopt_orphans()
    server = RewardServer()
    try:
        faults = [fault for part in options.parts for fault in PARTS[part](folder, server, options.rounds)]
    finally:
        server.close()
    rows = [row for row in recovery_times(faults, (ENGINE, SERVER, DRIVER, CORE, NODE)) if row["faults"]]
    publish("recovery", {"recovery": rows}, table_of("seconds", rows))


if __name__ == "__main__":
    main()
