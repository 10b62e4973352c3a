"""A worker process: an actor, the worker with the extension mixed in, and the engine in it."""

import importlib

import ray
import torch

from tensorrt_llm._ray_utils import control_action_decorator
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType


class RayGPUWorker:
    def __init__(self, device_id, rank, llm_args):
        self.device_id, self.global_rank, self.llm_args = device_id, rank, llm_args
        self.engine = PyExecutor(llm_args, rank)

    @control_action_decorator
    def sleep(self, sleep_tags):
        self._tags(sleep_tags)
        self.engine.memory.difference_update(sleep_tags)

    @control_action_decorator
    def wakeup(self, wakeup_tags):
        self._tags(wakeup_tags)
        self.engine.memory.update(wakeup_tags)

    def _tags(self, tags):
        if self.llm_args.sleep_config is None:
            raise ValueError("Sleep feature is not enabled, please set sleep_config.")
        for tag in tags:
            ExecutorMemoryType(tag)

    def shutdown(self):
        self.engine.shutdown()

    def standin_parameters(self):
        """For tests: the weights in use."""
        return {
            name: value.clone() for name, value in self.engine.model_engine.model.network.named_parameters()
        }


@ray.remote(num_cpus=0, concurrency_groups={"requests": 3})
class RayWorkerWrapper:
    """Methods of the worker run one at a time; requests have a way of their own, as they do there."""

    def __init__(self, rank, llm_args):
        torch.set_num_threads(1)
        extended = self._inject_worker_extension(RayGPUWorker, llm_args.ray_worker_extension_cls)
        self.worker = extended(device_id=rank, rank=rank, llm_args=llm_args)

    def call_worker_method(self, method_name, *args, **kwargs):
        if not callable(getattr(self.worker, method_name, None)):
            raise AttributeError(f"The RayGPUWorker has no method called '{method_name}'.")
        return getattr(self.worker, method_name)(*args, **kwargs)

    @ray.method(concurrency_group="requests")
    def enqueue_request(self, client_id, prompt, params):
        self.worker.engine.enqueue(client_id, prompt, params)

    @ray.method(concurrency_group="requests")
    def abort_request(self, request_id):
        self.worker.engine.cancel(request_id)

    @ray.method(concurrency_group="requests")
    def fetch_responses(self):
        return self.worker.engine.take_responses(seconds=0.5)

    @staticmethod
    def _inject_worker_extension(worker_class, name):
        if not name:
            return worker_class
        module, attribute = name.rsplit(".", 1)
        try:
            extension = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"Failed to load worker extension '{name}'") from error
        for own in dir(extension):
            if not own.startswith("__") and hasattr(worker_class, own):
                raise ValueError(
                    f"Worker class {worker_class.__name__} already defines '{own}', "
                    f"which conflicts with extension {extension.__name__}."
                )
        joined = f"{worker_class.__name__}With{extension.__name__}"
        return type(joined, (worker_class, extension), {"__module__": worker_class.__module__})
