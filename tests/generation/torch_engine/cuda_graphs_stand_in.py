"""A stand-in on a CPU for `torch.cuda.CUDAGraph`, `torch.cuda.graph` and streams, from their documentation.

A capture records the operators with their tensors; a replay executes them again on the same memory. As on a
GPU, a host that reads a value within a capture is an error, a capture leaves no results, and a replay reads
what lies at the addresses of the capture, whatever has taken their place elsewhere.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators for which a GPU's host waits, or by which it makes a tensor of values that it has.
HOST = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "lift_fresh")


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def memory_of(value):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self.made, self.written = [], []  # tensors of the capture's own memory; others with what they held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in HOST:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        if func._schema.is_mutable:
            self.written.append((args[0], args[0].clone()))
        out = func(*args, **(kwargs or {}))
        if not memory_of(out) & memory_of([*args, *(kwargs or {}).values()]):
            self.made += tensors_in(out)
        self.operations.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """`torch.cuda.CUDAGraph`."""

    made = ()  # those of a test

    def __init__(self):
        self.operations = []
        self.replays = 0
        Graph.made = (*Graph.made, self)

    def pool(self):
        return "pool"

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_in(out), tensors_in(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


@contextmanager
def graph(captured, pool=None, capture_error_mode="global"):
    """`torch.cuda.graph`; with "global" a call of any other thread would end the capture."""
    assert pool in (None, "pool")
    assert capture_error_mode == "thread_local"
    recorder = Recorder()
    with recorder:
        yield
    for tensor, before in reversed(recorder.written):
        tensor.copy_(before)
    for tensor in recorder.made:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    captured.operations = recorder.operations


class Stream:
    """`torch.cuda.Stream`; work of a CPU is in order."""

    def wait_stream(self, stream):
        assert isinstance(stream, Stream)


@contextmanager
def stream(other):
    assert isinstance(other, Stream)
    yield


def install(monkeypatch):
    """Let engines capture graphs in this test, with weights in torch's own layout, as on a GPU."""
    stand_ins = {
        "CUDAGraph": Graph,
        "graph": graph,
        "Stream": Stream,
        "stream": stream,
        "current_stream": Stream,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    engine = "nemorl.generation.torch_engine.engine"
    monkeypatch.setattr(f"{engine}.captures_graphs", lambda device: True)
    monkeypatch.setattr(f"{engine}.has_packed_linear", lambda device, dtype: False)
    monkeypatch.setattr(Graph, "made", ())
