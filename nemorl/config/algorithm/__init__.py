"""`algorithm`: what is optimized.

Its `name` selects one: a preset of the online parts or of the losses of pairs (`PRESETS`), or an algorithm
that learns from data.
"""

from typing import Annotated

from pydantic import Field

from .advantages import AdvantageConfig, GroupAdvantageConfig
from .base import Aggregation, AlgorithmBase, EarlyStopConfig, ValidationConfig
from .distillation import (
    DistillationAlgorithm,
    DistillationConfig,
    DistillationLossConfig,
    ForwardKlLossConfig,
    IterativePreferenceConfig,
    JsdLossConfig,
    OnPolicyDistillationConfig,
    RejectionSamplingConfig,
    ReverseKlLossConfig,
    TopLossConfig,
)
from .losses import PolicyLossConfig
from .offline import KtoConfig, OfflineBase, PreferenceConfig, ProcessLossConfig, RewardModelConfig, SftConfig
from .online import (
    AdaptiveEntropyConfig,
    CorrectionConfig,
    EntropyBonusConfig,
    EntropyConfig,
    IcePopCorrectionConfig,
    KLConfig,
    LikelihoodConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    OnlineBase,
    OnlineConfig,
    SequenceMaskConfig,
    TruncatedCorrectionConfig,
)

AlgorithmConfig = Annotated[
    OnlineConfig
    | IterativePreferenceConfig
    | RejectionSamplingConfig
    | OnPolicyDistillationConfig
    | SftConfig
    | DistillationConfig
    | PreferenceConfig
    | KtoConfig
    | RewardModelConfig,
    Field(discriminator="name"),
]

__all__ = [
    "AdaptiveEntropyConfig",
    "AdvantageConfig",
    "Aggregation",
    "AlgorithmBase",
    "AlgorithmConfig",
    "CorrectionConfig",
    "DistillationAlgorithm",
    "DistillationConfig",
    "DistillationLossConfig",
    "EarlyStopConfig",
    "EntropyBonusConfig",
    "EntropyConfig",
    "ForwardKlLossConfig",
    "GroupAdvantageConfig",
    "IcePopCorrectionConfig",
    "IterativePreferenceConfig",
    "JsdLossConfig",
    "KLConfig",
    "KtoConfig",
    "LikelihoodConfig",
    "MaskedCorrectionConfig",
    "NoCorrectionConfig",
    "OfflineBase",
    "OnPolicyDistillationConfig",
    "OnlineBase",
    "OnlineConfig",
    "PolicyLossConfig",
    "PreferenceConfig",
    "ProcessLossConfig",
    "RejectionSamplingConfig",
    "ReverseKlLossConfig",
    "RewardModelConfig",
    "SequenceMaskConfig",
    "SftConfig",
    "TopLossConfig",
    "TruncatedCorrectionConfig",
    "ValidationConfig",
]
