"""The probable cause of a stall, from what the processes report."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from nemorl.cluster.activity import (
    Activity,
    Call,
    Collective,
    ProcessReport,
    ProcessState,
    ServiceCalls,
    read_trace,
)
from nemorl.session.stalls import StallReport, newest_report

REDUCE = Collective("all_reduce", "tp", 12, (0, 1), 30.0)
WAITING = Activity((Call("train", 31.0, "distributed.py:7 in wait"),), "load", 31.0, (REDUCE,))
BUSY = Activity((Call("train", 31.0, "rewards.py:3 in slow"),))
SLEEPS = ProcessState("S")


def policy(rank: int, activity: Activity | None, state: ProcessState = SLEEPS) -> ProcessReport:
    """A policy rank as process 10 + rank."""
    return ProcessReport("policy", rank, f"logs/policy-{rank}.log", 10 + rank, "here", activity, state)


def report(*processes: ProcessReport) -> StallReport:
    """A report of a stage that waits for these processes."""
    return StallReport("training", "2030-01-01T00:00:00+00:00", 30.0, "late", True, processes)


def test_a_stopped_process_is_named_before_those_that_wait_for_it() -> None:
    stopped = policy(1, None, ProcessState("T", "do_signal_stop"))
    cause = report(policy(0, WAITING), stopped).cause()
    assert cause.startswith("policy rank 1 (process 11) is stopped (state T, in do_signal_stop)")
    assert "`kill -CONT 11`" in cause


def test_a_process_that_is_gone_comes_before_one_that_is_stopped() -> None:
    stopped = policy(1, None, ProcessState("T"))
    assert "rank 0 (process 10) is gone" in report(stopped, policy(0, None, ProcessState(""))).cause()


def test_a_rank_that_is_not_in_the_collective_is_named_with_what_it_does() -> None:
    cause = report(policy(0, WAITING), policy(1, BUSY)).cause()
    assert cause.startswith("policy rank 0 (process 10) waits in all_reduce 12 of ranks 0, 1 for 30.0 s")
    assert "for rank 1, which is in train for 31.0 s, at rewards.py:3 in slow" in cause


def test_ranks_of_other_groups_are_other_ranks() -> None:
    critic = replace(policy(1, BUSY), group="critic")
    assert "waits in" not in report(policy(0, replace(WAITING, collectives=())), critic).cause()


def test_all_ranks_in_one_collective_point_at_the_longest_call() -> None:
    assert "is in train for 31.0 s" in report(policy(0, WAITING), policy(1, WAITING)).cause()


def test_an_engine_that_makes_no_step() -> None:
    queues = {"running": 3, "waiting": 1, "seconds_since_step": 90.0}
    engine = replace(policy(0, Activity(queues=queues)), group="generation")
    assert report(engine).cause() == (
        "the engine of generation rank 0 (process 10) has made no step for 90 s"
    )


def test_a_service_that_does_not_answer_is_named_with_the_calls_that_wait() -> None:
    slow, fast = (
        ServiceCalls(f"reward `{name}` at http://here:1/v1", 8, s) for name, s in (("a", 90.0), ("b", 2.0))
    )
    worker = replace(policy(0, Activity((Call("run_group", 95.0),), services=(fast, slow))), group="rollout")
    named = "reward `a` at http://here:1/v1 has not answered for 90 s; 8 calls wait"
    assert report(policy(1, BUSY), worker).cause() == f"{named} in rollout rank 0 (process 10)"
    assert any(named in line for line in report(worker).lines())
    # It is asked all the time; only then it is what a run waits for.
    busy = replace(worker, activity=Activity(services=(fast,)))
    assert "is in train" in report(busy, policy(1, BUSY)).cause()


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    asked = Activity(services=(ServiceCalls("environment `math`", 1, 2.0),))
    written = report(policy(0, WAITING), policy(1, None, ProcessState("T")), policy(2, asked))
    for name in ("stall-2.json", "stall-10.json"):
        (tmp_path / name).write_text(json.dumps(asdict(written)), encoding="utf-8")
    newest = newest_report(tmp_path)
    assert newest == tmp_path / "stall-10.json"
    assert StallReport.read(newest) == written


def test_operations_in_flight_of_a_trace() -> None:
    """As gloo's are in torch 2.13: those that have ended are retired and still called scheduled."""
    entry = {
        "process_group": ["3", "TENSOR_MODEL_PARALLEL_GROUP"], "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 5, "p2p_seq_id": 0, "is_p2p": False, "state": "scheduled",
        "retired": False, "time_created_ns": time.time_ns() - 2_000_000_000,
    }  # fmt: skip
    trace = {"entries": [{**entry, "collective_seq_id": 4, "retired": True}, entry]}
    (found,) = read_trace(trace, {"3": (2, 3)})
    assert replace(found, seconds=None) == Collective("all_reduce", "TENSOR_MODEL_PARALLEL_GROUP", 5, (2, 3))
    assert 2 <= (found.seconds or 0) < 60
