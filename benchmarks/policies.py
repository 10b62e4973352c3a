"""Policies of one process, and experiments to plan them with, for the benchmarks."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.policy import PolicyConfig
from nemorl.megatron.device import DeviceKind
from nemorl.megatron.worker import PolicyWorker


def start_policy(
    config: PolicyConfig,
    device: DeviceKind,
    *,
    rank: int = 0,
    rendezvous: str = "",
    threads: int | None = None,
    load: bool = True,
) -> PolicyWorker:
    """A rank of a policy without a reference, with the weights of its folder if `load`.

    The only rank of its policy needs no rendezvous.
    """
    return PolicyWorker(
        config,
        rank=rank,
        world_size=config.layout.world_size,
        rendezvous=rendezvous or f"file://{tempfile.mkdtemp()}/rendezvous",
        device=device,
        threads=threads,
        temperature=1.0,
        keep_reference=False,
        deadline_seconds=600,
        load=load,
    )


def grpo_experiment(
    folder: Path, policy: Mapping[str, Any], *, algorithm: Mapping[str, Any], **sections: Mapping[str, Any]
) -> Experiment:
    """GRPO of a policy on sums; its file is written to `folder`."""
    tasks: dict[str, Any] = {"name": "arithmetic", "digits": 2}
    rest: dict[str, Any] = dict(sections)
    text = yaml.safe_dump(
        {
            "run_dir": "runs/planned",
            "policy": dict(policy),
            "data": {
                "train": {**tasks, "size": 9000},
                "validation": {**tasks, "size": 100, "offset": 9000},
                "chat": False,
            },
            "rewards": [{"function": "exact_match"}],
            "algorithm": {"name": "grpo", **algorithm},
            **rest,
        }
    )
    file = folder / "experiment.yaml"
    file.write_text(text, encoding="utf-8")
    return load_experiment(file)
