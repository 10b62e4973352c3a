"""A server of a reward in a process of its own, the share of digits in an answer: `reward_server.py PORT`."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nemorl.cluster.activity import process_state

START_SECONDS = 60.0
LOOK_SECONDS = 0.2  # between two looks at a supervised server
STOPPED_SECONDS = 8.0  # after which it is killed


def digits(completions: Sequence[str]) -> list[float]:
    """The share of digits, which an untrained model learns to raise in few steps."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


class Rewards(BaseHTTPRequestHandler):
    """The protocol of a reward server, for `digits`."""

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
        self._closed = threading.Event()
        self._supervisor: threading.Thread | None = None
        self.start()

    @property
    def reward(self) -> dict[str, Any]:
        """The section of an experiment."""
        section = {"kind": "model", "name": "digits", "model": "digits", "deadline": 5.0, "max_retries": 0}
        return {**section, "url": f"http://127.0.0.1:{self.port}/v1"}

    def start(self) -> None:
        """Start the process; returns when it listens. Raises TimeoutError."""
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port)])
        end = time.monotonic() + START_SECONDS
        while not self._listens():
            if time.monotonic() > end:
                raise TimeoutError(f"the reward server does not listen after {START_SECONDS:g} s")
            time.sleep(0.02)

    def supervise(self) -> None:
        """From now on start a server that is gone again, and kill one that is stopped for long."""
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _supervise(self) -> None:
        stopped = 0.0
        while not self._closed.wait(LOOK_SECONDS):
            stopped = stopped + LOOK_SECONDS if process_state(self.process.pid).is_stopped else 0.0
            if stopped > STOPPED_SECONDS:
                self.process.kill()
            if self.process.poll() is not None:
                self.start()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        self._closed.set()
        if self._supervisor is not None:
            self._supervisor.join()
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Rewards).serve_forever()
