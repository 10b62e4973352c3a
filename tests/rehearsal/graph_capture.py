"""A decoding step that is captured on the pretended accelerator, for a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemorl.generation.torch_engine import engine as module
from nemorl.rehearsal.accelerator import DEVICE
from nemorl.rehearsal.execution import Execution
from tests.generation.examples import GREEDY, SHAPE, Prompts, request


class _Graph:
    """`torch.cuda.CUDAGraph`; tensors have no values here, so there is nothing to replay."""

    replays = 0

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        _Graph.replays += 1


def captured_waits() -> tuple[int, int, int]:
    """Captures of an engine that samples three turns, waits of the host in them, and replays."""
    captures: list[str] = []
    waits: list[str] = []
    capturing: list[bool] = [False]

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        captures.append("")
        capturing[0] = True
        yield
        capturing[0] = False

    def synchronized(operator: str) -> None:
        if capturing[0]:
            waits.append(operator)

    with Execution() as execution, execution.phase("decode"):
        execution._synchronized = synchronized  # type: ignore[method-assign]
        library: Any = torch
        library.cuda.CUDAGraph, library.cuda.graph = _Graph, graph
        module.captures_graphs = lambda device: True  # type: ignore[assignment]
        engine = module.TorchEngine(
            SHAPE,
            module.TorchGenerationConfig(),
            device=torch.device(DEVICE, 0),
            dtype=torch.bfloat16,
            max_sequence_length=64,
        )
        engine.commit(0)
        for i, prompt in enumerate(Prompts().several(3, 5, 20)):
            engine.add(request(prompt, f"{i}", GREEDY, max_new_tokens=8))
        for _ in range(6):
            engine.step()
    return len(captures), len(waits), _Graph.replays
