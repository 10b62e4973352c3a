"""Metrics of a run that differ when it is repeated."""

import re
from collections.abc import Mapping

_CLOCKS = re.compile(r"^(time|throughput|tflops|mfu|idle|critical)/|seconds|waiting|per_second")


def without_clocks(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are no clock, and not divided by one."""
    return {name: value for name, value in values.items() if not _CLOCKS.search(name)}
