"""`nemorl slurm node` with stubs for Ray and the run: `python -m tests.slurm.stub CONFIG OVERRIDES...`.

Ray is a process that listens where the head's Ray would, or sleeps. Files in the folder STUB control both:

    train       what the run does: `ends CODE`, with `ends CODE later` only when there is a file `go`; `runs`
                until SIGTERM, and then ends with 75; or `saves`, and ignores SIGTERM
    began       the run writes its command line here
    <node>.ray  Ray's process writes its id here
    hold        while it exists, Ray does not know all nodes

WHY replaces what Slurm reports as the cause of SIGTERM.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ.get("STUB", "."))
MAX_SECONDS = 200.0


def main() -> int:
    """Run the launcher, or what it starts."""
    match sys.argv[1]:
        case "--ray":
            return _ray(sys.argv[2], sys.argv[3:])
        case "--train":
            return _train(sys.argv[2:])
        case "--members":
            return _members()
    return _launch(sys.argv[1:])


def _launch(words: Sequence[str]) -> int:
    from nemorl.cli import main as nemorl
    from nemorl.slurm import control, launcher, ray_node, start

    this = [sys.executable, "-m", "tests.slurm.stub"]
    launcher.train_command = lambda config, overrides: [*this, "--train", str(config), *overrides]
    ray_node.members_command = lambda nodes: [*this, "--members"]
    for function, variable in (
        (start.Rendezvous.wait_for_nodes, "RENDEZVOUS_SECONDS"),
        (control.ControlServer.find_lost, "PONG_SECONDS"),
    ):
        if variable in os.environ:
            function.__defaults__ = (float(os.environ[variable]),)
    launcher.RAY_GRACE_SECONDS = float(os.environ.get("RAY_GRACE_SECONDS", 1.0))
    launcher.URGENT_STOP_SECONDS = float(os.environ.get("URGENT_STOP_SECONDS", launcher.URGENT_STOP_SECONDS))
    if "WHY" in os.environ:
        launcher.why_terminated = lambda *of: os.environ["WHY"]
    ray_node.start_command = lambda info, plan, folder, store: [
        *this,
        "--ray",
        info.node,
        *([plan.gcs] if info.node == next(iter(plan.ports)) else []),
    ]
    return nemorl(["slurm", "node", *words])


def _ray(node: str, listens: Sequence[str]) -> int:
    (FOLDER / f"{node}.ray").write_text(str(os.getpid()))
    with socket.socket() as listener:
        for address in listens:
            host, _, port = address.rpartition(":")
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen()
        time.sleep(MAX_SECONDS)
    return 1


def _members() -> int:
    while (FOLDER / "hold").exists():
        time.sleep(0.05)
    return 0


def _train(words: Sequence[str]) -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(75)

    behavior = (FOLDER / "train").read_text().split()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behavior[0] == "saves" else stop)
    (FOLDER / "began").write_text(" ".join(words))  # the tests send signals from here on
    if behavior[0] == "ends":
        while behavior[2:] and not (FOLDER / "go").exists():
            time.sleep(0.05)
        return int(behavior[1])
    time.sleep(MAX_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(main())
