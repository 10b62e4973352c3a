"""A refit's thread uses its worker's GPU; vLLM and the GPU are stand-ins."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, threading, types
import torch

for name in ("vllm", "vllm.model_executor"):
    sys.modules[name] = types.ModuleType(name)
for package, name in (("vllm", "config"), ("vllm.model_executor", "model_loader")):
    module = sys.modules[f"{package}.{name}"] = types.ModuleType(f"{package}.{name}")
    setattr(sys.modules[package], name, module)
sys.modules["vllm.config"].set_current_vllm_config = None
base = sys.modules["vllm.model_executor.model_loader"].base_loader = types.ModuleType("base_loader")
base.process_weights_after_loading = None
linear = sys.modules["nemorl.generation.vllm_engine.cpu_linear"] = types.ModuleType("cpu_linear")
linear.PackedLayers = linear.int8_kernels_for_float32 = linear.load_unpacked = None

from nemorl.generation.vllm_engine.worker import VllmWorkerExtension
from nemorl.weights.messages import ReceiveReport, RefitSession

events = []

def record(what):
    events.append((threading.current_thread().name, what))

torch.accelerator.set_device_index = lambda device: record(str(device))

class Receiver:
    def begin(self, session):
        record("begin")
        def receive():
            record("receive")
            return ReceiveReport({}, 0)
        return receive

for device in ("cuda:3", "cpu"):
    worker = types.SimpleNamespace(nemorl=Receiver(), device=torch.device(device), rank=0)
    session = json.dumps({"version": 1, "transport": "nccl", "place": "", "deadline_seconds": 1})
    VllmWorkerExtension.nemorl_receive(worker, session, "nowhere")
    worker.nemorl_receiving.join()
print(json.dumps(events))
"""


def test_a_refit_uses_the_gpu_of_its_worker_and_not_the_first() -> None:
    """The current GPU belongs to a thread: of a new one it is the first, whatever the worker's is."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    begin, device, receive = [
        ["MainThread", "begin"], ["weight receiver", "cuda:3"], ["weight receiver", "receive"]
    ]  # fmt: skip
    on_gpu, on_cpu = [begin, device, receive], [begin, receive]
    assert json.loads(done.stdout) == [*on_gpu, *on_cpu]
