"""`algorithm`: what is optimised.

The name says which: one of the online algorithms, each a preset of parts (`nemorl.algorithms.presets`), or
one that learns from data as it stands.
"""

from typing import Annotated

from pydantic import Field

from .advantages import AdvantageConfig, GroupAdvantageConfig
from .base import Aggregation, AlgorithmBase, EarlyStopConfig, ValidationConfig
from .correction import (
    CorrectionConfig,
    IcePopCorrectionConfig,
    MaskedCorrectionConfig,
    NoCorrectionConfig,
    SequenceMaskConfig,
    TruncatedCorrectionConfig,
)
from .distillation import (
    DistillationAlgorithm,
    DistillationConfig,
    DistillationLossConfig,
    ForwardKlLossConfig,
    JsdLossConfig,
    OnPolicyDistillationConfig,
    ReverseKlLossConfig,
    TopLossConfig,
)
from .entropy import AdaptiveEntropyConfig, EntropyBonusConfig, EntropyConfig
from .kl import KLConfig
from .likelihood import LikelihoodConfig
from .losses import (
    CispoLossConfig,
    ClipCovLossConfig,
    ClipLossConfig,
    CustomLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    GspoTokenLossConfig,
    KlCovLossConfig,
    PolicyLossConfig,
    ReinforceLossConfig,
    SapoLossConfig,
)
from .offline import OfflineBase
from .online import OnlineConfig
from .online_base import OnlineBase
from .picked import IterativePreferenceConfig, RejectionSamplingConfig
from .preference import KtoConfig, PreferenceConfig
from .reward_model import ProcessLossConfig, RewardModelConfig
from .sft import SftConfig

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
    "CispoLossConfig",
    "ClipCovLossConfig",
    "ClipLossConfig",
    "CorrectionConfig",
    "CustomLossConfig",
    "DistillationAlgorithm",
    "DistillationConfig",
    "DistillationLossConfig",
    "EarlyStopConfig",
    "EntropyBonusConfig",
    "EntropyConfig",
    "ForwardKlLossConfig",
    "GmpoLossConfig",
    "GroupAdvantageConfig",
    "GspoLossConfig",
    "GspoTokenLossConfig",
    "IcePopCorrectionConfig",
    "IterativePreferenceConfig",
    "JsdLossConfig",
    "KLConfig",
    "KlCovLossConfig",
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
    "ReinforceLossConfig",
    "RejectionSamplingConfig",
    "ReverseKlLossConfig",
    "RewardModelConfig",
    "SapoLossConfig",
    "SequenceMaskConfig",
    "SftConfig",
    "TopLossConfig",
    "TruncatedCorrectionConfig",
    "ValidationConfig",
]
