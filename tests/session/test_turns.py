"""Policy and engines on the same GPUs: who has them when. All processes are stand-ins."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from nemorl.cluster.group import WorkerGroup
from nemorl.cluster.placement import assigned_bundles, worker_requests
from nemorl.config.experiment import Experiment
from nemorl.generation.types import EngineHealth
from nemorl.serve.app import Listening
from nemorl.session import session
from nemorl.session import session as session_module
from nemorl.session.session import Session, Starter
from nemorl.weights.exchange import RefitStats
from tests.cluster.places import on_one_node
from tests.plan.models import write_model


@dataclass
class Group:
    """Records every call; of a policy it names a GPU for each of four ranks."""

    name: str
    told: list[str]

    @property
    def gpus(self) -> list[tuple[str, ...]]:
        return [("4",), ("5",), ("6",), ("7",)]

    async def call(self, method: str, *args: Any, **_: Any) -> list[Any]:
        self.told.append(f"{self.name}: {method}")
        return []

    async def shutdown(self, *, after: BaseException | None) -> None:
        pass


@dataclass(eq=False)
class Engine:
    """The only one of its group."""

    told: list[str]
    rank: int = 0

    async def call(self, method: str, *args: Any, **_: Any) -> EngineHealth | None:
        if method == "health":
            return EngineHealth(0, running=0, waiting=0, paused=False, seconds_since_step=0.0)
        self.told.append(f"engine: {method} {args[0]}")
        return None


@dataclass
class Engines(Group):
    workers: tuple[Engine, ...] = ()

    async def ask(self, method: str, **_: Any) -> dict[int, EngineHealth | None]:
        return {engine.rank: await engine.call(method) for engine in self.workers}


@dataclass
class Exchange:
    told: list[str]

    async def refit(self, version: int) -> RefitStats:
        self.told.append(f"refit {version}")
        return RefitStats(version, 1.0, 0.5, 10**9, 10**9, 4, extra_bytes=0, kept_bytes=0)


@dataclass
class Started:
    """In the place of `WorkerGroup.start`."""

    told: list[str]
    kwargs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def start(
        self,
        name: str,
        target: str,
        kwargs: list[dict[str, Any]],
        of_place: Callable[[int], dict[str, Any]] = lambda rank: {},
        **options: Any,
    ) -> WorkerGroup:
        self.told.append(f"{name}: starts")
        self.kwargs[name] = [{**of_rank, **of_place(rank)} for rank, of_rank in enumerate(kwargs)]
        group = (
            Engines(name, self.told, (Engine(self.told),)) if name == "generation" else Group(name, self.told)
        )
        return cast(WorkerGroup, group)


def experiment(folder: Path) -> Experiment:
    return Experiment.model_validate(
        {
            "run_dir": folder / "run",
            "policy": {
                "model_path": write_model(folder / "model"),
                "layout": {"tensor_parallel_size": 4},
                "offload": {"weights": True, "optimizer": True},
            },
            "generation": {
                "backend": "vllm", "colocated": True, "replicas": 2, "tensor_parallel_size": 2,
            },
            "data": {"train": {"name": "arithmetic"}, "validation": {"name": "arithmetic"}},
            "algorithm": {"name": "sft", "num_steps": 1, "batch_size": 1, "validation": {"period": 1}},
            "rewards": [
                {
                    "kind": "local_model", "model_path": folder / "model", "devices": "policy",
                    "offload": {"weights": True},
                }
            ],
            "cluster": {"gpus_per_node": 4},
        }
    )  # fmt: skip


@asynccontextmanager
async def answering(*_: Any) -> AsyncIterator[Listening]:
    """No client asks over HTTP here."""
    yield Listening("http://127.0.0.1:1/v1", "key", generated=True)


def test_policy_and_engines_have_the_devices_by_turns(tmp_path: Path, monkeypatch: Any) -> None:
    """And a reward model, while engines sample."""
    told: list[str] = []
    started, scorers = Started(told), []
    monkeypatch.setattr(session, "WorkerGroup", started)
    monkeypatch.setattr(session_module, "answering", answering)
    monkeypatch.setattr(session_module, "reward_routes", lambda *_, **__: None)
    monkeypatch.setattr(session_module, "reporting_failures", scorers.append)
    asked = experiment(tmp_path)
    requests = worker_requests(asked)
    bundles = assigned_bundles(requests, dict.fromkeys(range(20), "node"))
    placement = on_one_node(bundles, requests)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            opening = Starter(asked, placement, stack)
            session: Session = opening.session
            await opening.models(training=True)
            await opening.engines_on_policy_devices()
            gpus = [rank["gpus"] for rank in started.kwargs["generation"]]
            assert gpus == [("4", "5", "6", "7"), ("6", "7", "4", "5")]  # their own come first
            # Engines measure what is free when they start.
            starts = ["policy: starts", "policy: offload", "generation: starts", "engine: sleep 1"]
            assert _since(told) == starts
            await opening.reward_models()
            (scorer,) = scorers
            assert _since(told) == ["reward_0: starts"]
            session.exchange = cast(Any, Exchange(told))
            for version, leaves in ((1, ["reward_0: offload"]), (2, ["policy: offload"])):
                async with session.generating():
                    told.append("sampling")
                    async with scorer.devices.borrow_during_generation(scorer.model):
                        told.append("scoring")
                samples = ["sampling", "reward_0: onload", "scoring"]
                assert _since(told) == [*leaves, "engine: wake ()", *samples, "engine: sleep 1"]
                await session.update_weights(version)
                # The engine's weights have room next to the policy, its cache has not.
                refit = ["policy: onload", "engine: wake ('weights',)", f"refit {version}"]
                assert _since(told) == ["reward_0: offload", *refit]

    asyncio.run(asyncio.wait_for(main(), 60))


def _since(told: list[str]) -> list[str]:
    """What was reported since the last time."""
    new = told.copy()
    told.clear()
    return new
