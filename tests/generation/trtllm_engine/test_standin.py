"""The stand-in is as strict as what it is for, where a mistake of ours would show."""

import pytest


def inject(name):
    from tensorrt_llm.executor.ray_gpu_worker import RayGPUWorker, RayWorkerWrapper

    wrapper = RayWorkerWrapper.__ray_metadata__.modified_class
    return wrapper._inject_worker_extension(RayGPUWorker, name)


class Clashing:
    def sleep(self):
        """A name that workers have."""


def test_our_extension_is_mixed_in_and_clashes_with_nothing(standin):
    extended = inject("nemorl.generation.trtllm_engine.host.NemorlExtension")
    assert extended.__name__ == "RayGPUWorkerWithNemorlExtension"
    assert callable(extended.nemorl_hold)


def test_a_clashing_extension_is_refused(standin):
    with pytest.raises(ValueError, match="already defines 'sleep'"):
        inject(f"{__name__}.Clashing")


def test_arguments_that_do_not_exist_are_refused(standin):
    from tensorrt_llm import AsyncLLM

    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        AsyncLLM(model="x", gpu_memory_utilization=0.9)
