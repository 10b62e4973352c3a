"""One replica of two workers for all tests of this folder: workers take seconds to start."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.cluster.runtime import ClusterRuntime
from nemorl.config.generation import TrtllmGenerationConfig
from nemorl.config.run import ClusterConfig
from nemorl.models.registry import load_shape
from tests.generation.trtllm_engine.setup import Loop, Setup

STANDIN = Path(__file__).parent / "standin"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def standin() -> Iterator[None]:
    """tensorrt_llm is the stand-in, here and in processes that Ray starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STANDIN))
        patch.setenv("PYTHONPATH", f"{STANDIN}:{ROOT}")
        from tensorrt_llm.standin_handles import reduce_tensor
        from torch.multiprocessing import reductions

        patch.setattr(reductions, "reduce_tensor", reduce_tensor)
        with ClusterRuntime(ClusterConfig(object_store_megabytes=100), []):
            yield
    ours = ("tensorrt_llm", "nemorl.generation.trtllm_engine")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]


@pytest.fixture(scope="package")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="package")
def make(standin, loop, hf_models):
    """Starts replicas; they end with the folder."""
    from nemorl.generation.trtllm_engine import host as trtllm_host
    from nemorl.generation.types import EngineOptions

    trtllm_host._WATCH_SECONDS = 0.2
    hosts = []

    def start(**fields) -> Setup:
        folder = hf_models["llama"].folder
        config = TrtllmGenerationConfig(backend="trtllm", bucket_megabytes=1, **fields)

        async def begin() -> trtllm_host.TrtllmHost:
            host = trtllm_host.TrtllmHost(
                config,
                EngineOptions(folder, folder, 250, threads=1, commit_seconds=20.0),
            )
            hosts.append(host)
            await host.start()
            return host

        return Setup(loop, loop.run(begin()), load_shape(folder))

    yield start
    for host in hosts:
        loop.run(host.close())


@pytest.fixture(scope="package")
def replica(make) -> Setup:
    """Two workers."""
    return make(tensor_parallel_size=2)


@pytest.fixture(params=["handles", "workers"])
def delivery(request, replica) -> Setup:
    """The replica with each way of taking weights; updates wait for what is in flight."""
    replica.configure(weight_delivery=request.param, on_update="finish")
    return replica
