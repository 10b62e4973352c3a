"""The recipes in configs/recipes, by what their names say, and their plans on the hardware they are for."""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.load import load_experiment
from nemorl.config.policy import LayoutConfig
from nemorl.errors import Problem
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.plan.hardware import HARDWARE, Hardware
from nemorl.plan.machine import Gpu, Machine, memory_problems
from nemorl.plan.memory import ProcessMemory, estimate_memory

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
# Of a device's memory; what CUDA, NCCL and the allocator take is not planned, and the plan may be off.
PLANNED_SHARE = 0.9
NAME = re.compile(
    r"(?P<algorithm>[a-z_]+)-(?P<model>[a-z0-9.-]+)-(?P<nodes>\d+)n(?P<gpus>\d+)g-(?P<layout>[a-z0-9]+)"
    r"(-async(?P<staleness>\d+))?(?P<lora>-lora)?(-(?P<task>tools|code|terminal|text))?"
    rf"(-(?P<hardware>{'|'.join(HARDWARE)}))?"
)
_AXES = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "ep": "expert_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


@dataclass(frozen=True)
class Recipe:
    file: Path

    @property
    def name(self) -> str:
        return self.file.stem

    @cached_property
    def named(self) -> dict[str, str | None]:
        """The parts of its name."""
        match = NAME.fullmatch(self.name)
        assert match is not None, f"{self.name}: expected <algorithm>-<model>-<nodes>n<gpus>g-<layout>[-…]"
        return match.groupdict()

    @cached_property
    def experiment(self) -> Experiment:
        return load_experiment(self.file)

    @cached_property
    def shape(self) -> ModelShape:
        policy = self.experiment.policy
        return load_shape(policy.model_path, policy.head)

    @property
    def hardware(self) -> Hardware:
        """An H100 unless the name ends in another device."""
        return HARDWARE[self.named["hardware"] or "h100"]

    @property
    def machine(self) -> Machine:
        """Its nodes, of whose devices the plan may fill `PLANNED_SHARE`."""
        cluster, memory = self.experiment.cluster, int(PLANNED_SHARE * self.hardware.memory_bytes)
        gpus = (Gpu(self.hardware.name, memory),) * cluster.gpus_per_node
        host = 2 * 10**12
        return Machine(10**5, host, host, gpus, nodes=cluster.num_nodes, same_packages=False)

    @cached_property
    def processes(self) -> tuple[ProcessMemory, ...]:
        others = models_of(self.experiment)[1:]
        shapes = [(one, load_shape(one.config.model_path, one.config.head)) for one in others]
        return estimate_memory(self.experiment, self.shape, True, shapes)

    @property
    def devices(self) -> int:
        """That its processes need."""
        experiment = self.experiment
        own = sum(m.config.layout.world_size for m in models_of(experiment) if not m.on_policy_devices)
        generation = experiment.generation
        if experiment.algorithm.generates and not generation.shares_devices:
            own += generation.replicas * generation.ranks_per_replica
        return own

    def memory_problems(self) -> list[Problem]:
        return list(memory_problems(self.experiment, self.processes, self.machine))


@cache
def recipe(file: Path) -> Recipe:
    return Recipe(file)


def layout_in_name(layout: LayoutConfig) -> str:
    """Its axes of more than one process, such as `tp2pp4dp8`; `dp1` for a single one."""
    sizes = {short: getattr(layout, field) for short, field in _AXES.items()}
    return "".join(f"{short}{size}" for short, size in sizes.items() if size > 1) or "dp1"
