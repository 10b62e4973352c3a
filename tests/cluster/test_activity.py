"""What a process reports: operations in flight between two real ranks, and its state in Linux."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nemorl.cluster.activity import process_state

LATE_RANK = """
import json, sys, threading, time
from dataclasses import asdict
import torch
import torch.distributed as dist
from nemorl.cluster.activity import collectives

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
pair = dist.new_group([0, 1], group_desc="pair")
dist.all_reduce(torch.ones(1), group=pair)

def look():
    # Until it is the second one: the first may be listed for a moment after its end.
    while not (found := [one for one in collectives() if one.number == 2]):
        time.sleep(0.01)
    print(json.dumps([asdict(one) for one in found]), flush=True)

if rank == 0:
    looking = threading.Thread(target=look)
    looking.start()
else:
    sys.stdin.readline()  # until rank 0 has looked
dist.all_reduce(torch.ones(1), group=pair)
if rank == 0:
    looking.join()
dist.destroy_process_group()  # else the threads of gloo can outlive the interpreter, which aborts the process
"""


def test_the_operation_in_which_a_rank_waits_for_another(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LATE_RANK, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    assert ranks[0].stdout is not None
    found = ranks[0].stdout.readline()
    for process in reversed(ranks):  # rank 0 waits for rank 1
        process.communicate("\n", timeout=60)
    assert [process.returncode for process in ranks] == [0, 0]
    assert '"operation": "all_reduce", "group": "pair", "number": 2, "ranks": [0, 1]' in found


def test_the_state_of_a_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        while not str(process_state(process.pid)).startswith("waiting (state S"):  # its program is being read
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        while not process_state(process.pid).is_stopped:
            time.sleep(0.01)
        assert str(process_state(process.pid)).startswith("stopped (state T")
    finally:
        process.kill()
        process.wait()
    assert str(process_state(process.pid)) == "gone"
