"""Tests that require vLLM: skipped if it is missing, failed if NEMORL_REQUIRE names it."""

import importlib.util
import os
import sys

import pytest


def require_vllm() -> None:
    """Skip with the reason, or fail where NEMORL_REQUIRE names vllm, as .ci/run does."""
    if importlib.util.find_spec("vllm") is not None:
        return
    reason = "vLLM is not installed" + ("" if sys.platform == "linux" else "; it runs on Linux only")
    if "vllm" in os.environ.get("NEMORL_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and NEMORL_REQUIRE requires it")
    pytest.skip(reason)
