"""What only some tests require: they are skipped where it is missing, and fail if NEMORL_REQUIRE names it."""

import importlib
import importlib.util
import os
import shutil
import sys
from typing import Any, NoReturn

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing(name: str, reason: str) -> NoReturn:
    """Skip with the reason, or fail where NEMORL_REQUIRE has the name, as in .ci/run."""
    if name in os.environ.get("NEMORL_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and NEMORL_REQUIRE requires it")
    pytest.skip(reason, allow_module_level=True)


def require_module(name: str) -> Any:
    """The imported module, which NEMORL_REQUIRE has by its top-level package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing(name.partition(".")[0], f"{name} cannot be imported ({error})")


def require_chromium() -> str:
    """Path of the browser."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        missing("chromium", f"none of {', '.join(BROWSERS)} is installed")
    return found


def require_vllm() -> None:
    """vLLM is not imported here, since that takes long."""
    if importlib.util.find_spec("vllm") is None:
        elsewhere = "" if sys.platform == "linux" else "; it runs on Linux only"
        missing("vllm", f"vLLM is not installed{elsewhere}")
