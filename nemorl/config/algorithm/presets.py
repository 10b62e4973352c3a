"""Online algorithms as presets of parts: each a short module in `nemorl.algorithms.presets`.

A preset is laid under the `algorithm` section of an experiment, as an inherited file would be: what the
experiment says wins. The modules hold settings and words only, so that a config is read without torch.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_PACKAGE = "nemorl.algorithms.presets"


@dataclass(frozen=True)
class Preset:
    """One algorithm: its name in experiments, where it comes from, and how it sets the parts."""

    name: str
    title: str  # in a few words, as the paper calls it
    paper: str  # a link
    settings: Mapping[str, Any]  # of the `algorithm` section


@cache
def presets() -> dict[str, Preset]:
    """All presets by name, in the order of their modules' names."""
    package = importlib.import_module(_PACKAGE)
    modules = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    found = [importlib.import_module(f"{_PACKAGE}.{name}").PRESET for name in modules]
    return {preset.name: preset for preset in found}
