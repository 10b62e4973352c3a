"""Scripts of tools/ and benchmarks/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: str, name: str | None = None) -> ModuleType:
    """Run the file at `path`, below the repository, as a module; `name` where its own is that of another."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the annotations' names
    spec.loader.exec_module(module)
    return module
