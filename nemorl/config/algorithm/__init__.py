"""`algorithm`: what is optimised.

The name says which: one of the online algorithms, each a preset of parts (`nemorl.algorithms.presets`), or
one that learns from data as it stands.
"""

from typing import Annotated

from pydantic import Field

from .advantage import AdvantageConfig, GroupAdvantageConfig
from .base import Aggregation, AlgorithmBase, ValidationConfig
from .kl import KLConfig
from .online import OnlineConfig
from .policy_loss import ClipLossConfig, PolicyLossConfig
from .sft import SftConfig

AlgorithmConfig = Annotated[OnlineConfig | SftConfig, Field(discriminator="name")]

__all__ = [
    "AdvantageConfig",
    "Aggregation",
    "AlgorithmBase",
    "AlgorithmConfig",
    "ClipLossConfig",
    "GroupAdvantageConfig",
    "KLConfig",
    "OnlineConfig",
    "PolicyLossConfig",
    "SftConfig",
    "ValidationConfig",
]
