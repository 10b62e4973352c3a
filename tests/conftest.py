"""Which tests only `make test-ci` runs and not `make test`, and how they are divided among processes.

Both run two processes: most tests wait for processes to start more than they compute.
"""

import gc
from collections.abc import Generator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Another load of the machine must not fail an example.
settings.register_profile("nemorl", deadline=None)
settings.load_profile("nemorl")

# Folders whose files share what is dear to start: a pool of Megatron's processes, engines, a Slurm.
SHARING = ("tests/megatron/", "tests/generation/", "tests/serve/", "tests/slurm/")

# What `make test` leaves out, with the tests that are marked `ci`: the longest files of their folders. It
# keeps others of each folder that reach the same code. CONTRIBUTING.md has the minutes.
ONLY_IN_CI = {
    "tests/cluster/test_nodes.py",
    "tests/cluster/test_relay.py",
    "tests/cluster/test_runtime.py",
    "tests/environments/test_sandbox.py",
    "tests/generation/vllm_engine/test_adapters.py",
    "tests/generation/vllm_engine/test_layouts.py",
    "tests/generation/vllm_engine/test_two_ranks.py",
    "tests/megatron/test_checkpoint.py",
    "tests/megatron/test_decode.py",
    "tests/megatron/test_dist_checkpoint.py",
    "tests/megatron/test_experts.py",
    "tests/megatron/test_families.py",
    "tests/megatron/test_host_adam.py",
    "tests/megatron/test_layouts.py",
    "tests/megatron/test_lora.py",
    "tests/megatron/test_muon.py",
    "tests/megatron/test_offload.py",
    "tests/megatron/test_routing.py",
    "tests/megatron/test_scalar_head.py",
    "tests/megatron/test_transformer_engine.py",
    "tests/models/test_policy_layout.py",
    "tests/rollout/test_environment_actors.py",
    "tests/run/test_critic_runs.py",
    "tests/run/test_guards.py",
    "tests/run/test_megatron_generation.py",
    "tests/run/test_restarts.py",
    "tests/run/test_updates_while_sampling.py",
    "tests/run/test_supervise.py",
    "tests/run/test_vllm_runs.py",
    "tests/slurm/test_on_cluster.py",
    "tests/slurm/test_requeue.py",
    "tests/weights/test_matrix.py",
}


# Started first, so that the processes end at about the same time.
LONG = (
    "tests/benchmarks/test_chaos.py",
    "tests/run/",
    "tests/megatron/",
    "tests/generation/",
    "tests/slurm/",
    "tests/cluster/",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `ONLY_IN_CI`, and put the long folders first."""
    for item in items:
        if item.nodeid.partition("::")[0] in ONLY_IN_CI:
            item.add_marker("ci")
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules without the garbage collector, which later leaves out what they created."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class ByWhatIsShared(LoadScopeScheduling):
    """The tests of a file stay together, and so do those of a folder in `SHARING`."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARING if nodeid.startswith(folder)), nodeid.partition("::")[0])

    def _reschedule(self, node: WorkerController) -> None:
        """Assign until the worker has work or has to end.

        A worker runs a test once it knows of the next one, or of its end. One that takes the place of a
        worker that crashed may get a single test, for whose completion xdist 3.8 would wait for ever.
        """
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByWhatIsShared:
    """Take ours, whatever `--dist` says, and keep the order of the collection."""
    config.option.loadscopereorder = False
    return ByWhatIsShared(config, log)
