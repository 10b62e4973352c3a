"""Signals to processes of a run in this process, each just before a certain call of its driver."""

import inspect
import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

logger = logging.getLogger("nemorl.faults")  # into the log of the driver, with the time


def processes(run: Path, name: str) -> list[int]:
    """Those that have written a log, in order."""
    return [int(pid) for pid in re.findall(r"process (\d+)", (run / "logs" / f"{name}.log").read_text())]


class Faults:
    def __init__(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self.patch = run, patch
        self.sent: list[str] = []  # methods before which a signal was sent

    def at(
        self,
        owner: type,
        method: str,
        call: int,
        number: signal.Signals = signal.SIGKILL,
        *,
        process: str = "policy-1",
        group: str = "",
    ) -> None:
        """Send a signal to a process, by its log, before a call of a method; of `group` alone, if given."""
        self.before(owner, method, call, lambda: os.kill(processes(self.run, process)[-1], number), group)

    def before(
        self, owner: type, method: str, call: int, strike: Callable[[], None], group: str = ""
    ) -> None:
        original: Callable[..., Any] = getattr(owner, method)
        calls = 0

        def count(one: Any) -> None:
            nonlocal calls
            if group and one.group.name != group:
                return
            calls += 1
            if calls == call:
                logger.warning("a fault before call %d of %s.%s", call, owner.__name__, method)
                strike()
                self.sent.append(method)

        def disturbed(one: Any, *args: Any, **kwargs: Any) -> Any:
            count(one)
            return original(one, *args, **kwargs)

        async def disturbed_later(one: Any, *args: Any, **kwargs: Any) -> Any:
            count(one)
            return await original(one, *args, **kwargs)

        is_async = inspect.iscoroutinefunction(original)
        self.patch.setattr(owner, method, disturbed_later if is_async else disturbed)
