"""A policy rank whose sender takes an optimizer step before it sends, or meanwhile.

Meanwhile, it sends weights of before and after the step: the bytes are useless, and the seconds a bound on
what the overlap of a refit with the end of training can save.
"""

import threading
import time
from pathlib import Path
from typing import Literal

import torch
from policies import start_policy

from nemorl.config.policy import PolicyConfig
from nemorl.weights.messages import Part, RefitSession, SenderLayout, SendReport

Way = Literal["refit alone", "after the step", "during the step"]
WAYS: tuple[Way, ...] = ("refit alone", "after the step", "during the step")
RANKS = 2


class SteppingSender:
    """Data-parallel rank of a policy in float32 on one thread, in place of its `WeightSender`."""

    def __init__(self, model: Path, rank: int, rendezvous: str) -> None:
        settings = {
            "model_path": model,
            "precision": "float32",
            "max_sequence_length": 256,
            "layout": {"data_parallel_size": RANKS},
            "optimizer": {"name": "adam", "lr": 1e-6},
        }
        config = PolicyConfig.model_validate(settings)
        self._worker = start_policy(config, "cpu", rank=rank, rendezvous=rendezvous, threads=1)
        self.way: Way = "refit alone"
        self.step_seconds = 0.0

    def describe(self) -> SenderLayout:
        """As the exchange asks."""
        return self._worker.sender.describe()

    def prepare(self, part: Part) -> None:
        """As the exchange asks."""
        self._worker.sender.prepare(part)

    def send(self, session: RefitSession) -> SendReport:
        """As the exchange asks."""
        stepping, self.step_seconds = threading.Thread(target=self._step), 0.0
        if self.way != "refit alone":
            stepping.start()
            if self.way == "after the step":
                stepping.join()
        report = self._worker.sender.send(session)
        if self.way == "during the step":
            stepping.join()
        return report

    def _step(self) -> None:
        torch.set_num_threads(1)
        for chunk in self._worker._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.fill_(1e-4)
        began = time.perf_counter()
        self._worker.optimizer.step({})
        self.step_seconds = time.perf_counter() - began
