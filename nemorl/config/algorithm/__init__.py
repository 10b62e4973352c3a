"""`algorithm`: what is optimized. Its `name` is a preset, or an algorithm that learns from data."""

from typing import Annotated

from pydantic import Field

from .aligned import AlignedDistillationConfig as AlignedDistillationConfig
from .base import Aggregation as Aggregation
from .base import EarlyStopConfig as EarlyStopConfig
from .base import ValidationConfig as ValidationConfig
from .distillation import DistillationConfig as DistillationConfig
from .distillation import DistillationLossConfig as DistillationLossConfig
from .distillation import ForwardKlLossConfig as ForwardKlLossConfig
from .distillation import IterativePreferenceConfig as IterativePreferenceConfig
from .distillation import JsdLossConfig as JsdLossConfig
from .distillation import MixedKlLossConfig as MixedKlLossConfig
from .distillation import OnPolicyDistillationConfig as OnPolicyDistillationConfig
from .distillation import RejectionSamplingConfig as RejectionSamplingConfig
from .distillation import ReverseKlLossConfig as ReverseKlLossConfig
from .distillation import TopLossConfig as TopLossConfig
from .losses import PolicyLossConfig as PolicyLossConfig
from .offline import KtoConfig as KtoConfig
from .offline import OfflineBase as OfflineBase
from .offline import PreferenceConfig as PreferenceConfig
from .offline import RewardModelConfig as RewardModelConfig
from .offline import SftConfig as SftConfig
from .online import AdaptiveEntropyConfig as AdaptiveEntropyConfig
from .online import CorrectionConfig as CorrectionConfig
from .online import EntropyBonusConfig as EntropyBonusConfig
from .online import EntropyConfig as EntropyConfig
from .online import IcePopCorrectionConfig as IcePopCorrectionConfig
from .online import KLConfig as KLConfig
from .online import MaskedCorrectionConfig as MaskedCorrectionConfig
from .online import NoCorrectionConfig as NoCorrectionConfig
from .online import OnlineBase as OnlineBase
from .online import OnlineConfig as OnlineConfig
from .online import SequenceMaskConfig as SequenceMaskConfig
from .online import TruncatedCorrectionConfig as TruncatedCorrectionConfig

_Online = OnlineConfig | IterativePreferenceConfig | RejectionSamplingConfig | OnPolicyDistillationConfig
_Distilled = DistillationConfig | AlignedDistillationConfig
_Offline = SftConfig | _Distilled | PreferenceConfig | KtoConfig | RewardModelConfig
AlgorithmConfig = Annotated[_Online | _Offline, Field(discriminator="name")]
