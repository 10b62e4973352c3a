"""`nemorl slurm node` with stand-ins for Ray and the run: `python -m tests.slurm.stub CONFIG WORDS...`.

Ray is a process that listens where the head's Ray would, or sleeps; files in the folder that STAND_IN names
steer both:

    train       what the run does: `ends CODE`, once there is a file `go` with `ends CODE later`; or `runs`,
                until SIGTERM, and then ends with 75; or `saves`, whatever it is told
    began       the run writes its command line here
    <node>.ray  Ray's process writes its number here
    hold        as long as it is there, Ray does not know all nodes

WHY is what Slurm says of the cause of SIGTERM; without it Slurm is asked.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ.get("STAND_IN", "."))
LONGEST_SECONDS = 200.0


def main() -> int:
    """The launcher, or what it starts."""
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
    from nemorl.slurm import control, head, ray_node
    from nemorl.slurm import rendezvous as meeting

    this = [sys.executable, "-m", "tests.slurm.stub"]
    head.train_command = lambda config, own: [*this, "--train", str(config), *own]
    head.members_command = lambda nodes: [*this, "--members"]
    meeting.Meeting.everybody.__defaults__ = (float(os.environ.get("MEETING_SECONDS", "30")),)
    control.ControlServer.silent.__defaults__ = (1.0,)
    head.HURRIED_SECONDS = float(os.environ.get("HURRIED_SECONDS", head.HURRIED_SECONDS))
    if "WHY" in os.environ:
        head.why_terminated = lambda *of: os.environ["WHY"]
    ray_node.start_command = lambda card, plan, folder, store: [
        *this,
        "--ray",
        card.node,
        *([plan.gcs] if card.node == next(iter(plan.ports)) else []),
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
        time.sleep(LONGEST_SECONDS)
    return 1


def _members() -> int:
    while (FOLDER / "hold").exists():
        time.sleep(0.05)
    return 0


def _train(words: Sequence[str]) -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(75)

    signal.signal(signal.SIGTERM, stop)
    (FOLDER / "began").write_text(" ".join(words))
    does = (FOLDER / "train").read_text().split()
    if does[0] == "ends":
        while does[2:] and not (FOLDER / "go").exists():
            time.sleep(0.05)
        return int(does[1])
    if does[0] == "saves":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(LONGEST_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(main())
