"""Work of several models: at the same time on different devices, in sequence on shared ones."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemorl.session.session import Session


def session(**devices: str) -> Session:
    models: Any = {name: SimpleNamespace(devices=shared) for name, shared in devices.items()}
    return Session(models=models)


def test_work_on_shared_devices_keeps_its_order_and_results_keep_theirs() -> None:
    log: list[str] = []

    async def main() -> list[str]:
        reference_is_done = asyncio.Event()

        async def policy() -> str:
            await reference_is_done.wait()  # on other devices
            log.append("policy")
            return "logprobs"

        async def critic() -> str:
            log.append("critic")
            return "values"

        async def reference() -> str:
            log.append("reference")
            reference_is_done.set()
            return "reference logprobs"

        work = [("policy", policy), ("critic", critic), ("reference", reference)]
        return await session(policy="a", critic="a", reference="b").run_models(work)

    assert asyncio.run(main()) == ["logprobs", "values", "reference logprobs"]
    assert log == ["reference", "policy", "critic"]


def test_a_failure_ends_the_rest_before_it_is_raised() -> None:
    ended: list[str] = []

    async def main() -> None:
        async def fail() -> None:
            raise ValueError("gone")

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("critic")

        async def never() -> None:
            ended.append("policy again")

        work = [("critic", wait), ("policy", fail), ("policy", never)]
        await session(policy="a", critic="b").run_models(work)

    with pytest.raises(ValueError, match="gone"):
        asyncio.run(main())
    assert ended == ["critic"]
