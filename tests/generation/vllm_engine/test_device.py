"""What a worker does with its GPU and its models; vLLM and the GPU are stand-ins."""

import json
import os
import subprocess
import sys

import pytest

STANDIN = """
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
linear.PackedLayers = linear.embeddings_of = linear.int8_kernels_for_float32 = linear.load_unpacked = None

from nemorl.generation.vllm_engine import worker as extension
"""
REFIT = """
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

DRAFT_MODEL = """
processed = []
extension._process = lambda model, config, device: processed.append(model)
extension.load_shape = lambda folder, with_mtp=False: f"{folder}, {with_mtp}"
extension.hf_tensors = lambda shape: f"tensors of {shape}"
extension.mtp_tensors = lambda shape: f"layers of {shape}"
extension.is_head = lambda folder: False
extension.embeddings_of = lambda model: f"embeddings of {model}"

def learn(model, tensors, process, elsewhere=""):
    process()
    return f"{model}: {tensors}; {elsewhere}"

extension.learn = learn
for name, runner in (("policy", "generate"), ("draft", "draft")):
    config = types.SimpleNamespace(model="folder", runner_type=runner)
    extension._process_and_learn(name, config, None)
print(json.dumps([processed, extension._learned]))
"""


@pytest.mark.parametrize("trained", [False, True])
def test_weights_are_written_to_a_draft_model_only_if_it_is_trained(trained: bool) -> None:
    command = [sys.executable, "-c", STANDIN + DRAFT_MODEL]
    environment = dict(os.environ) | ({"NEMORL_VLLM_TRAINED_DRAFTS": "1"} if trained else {})
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    layouts = {"": "policy: tensors of folder, False; "}
    if trained:
        layouts["drafts."] = "draft: layers of folder, True; embeddings of draft"
    assert json.loads(done.stdout) == [["policy", "draft"], layouts]


def test_a_refit_uses_the_gpu_of_its_worker_and_not_the_first() -> None:
    """The current GPU belongs to a thread: of a new one it is the first, whatever the worker's is."""
    done = subprocess.run([sys.executable, "-c", STANDIN + REFIT], capture_output=True, text=True, check=True)
    begin, device, receive = [
        ["MainThread", "begin"], ["weight receiver", "cuda:3"], ["weight receiver", "receive"]
    ]  # fmt: skip
    on_gpu, on_cpu = [begin, device, receive], [begin, receive]
    assert json.loads(done.stdout) == [*on_gpu, *on_cpu]
