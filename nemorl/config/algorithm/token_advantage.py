"""Advantages that differ from token to token: of a critic's values, or of what is paid after each token."""

from typing import ClassVar, Literal

from pydantic import Field

from nemorl.config.base import Config


class TokenAdvantageBase(Config):
    """What estimators share that run over the sampled tokens of a trajectory."""

    needs_values: ClassVar[bool] = True
    """Whether a critic has to say what may be expected at each token."""

    whiten: bool = True
    """Shift and scale the advantages to mean 0 and variance 1 over the sampled tokens of the whole batch."""


class GaeConfig(TokenAdvantageBase):
    """Generalised advantage estimation over sampled tokens (Schulman et al. 2015, arXiv 1506.02438)."""

    name: Literal["gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of the policy's advantages."""
    length_adaptive_alpha: float | None = Field(None, gt=0)
    """In place of `lam`, 1 - 1 / (alpha l) for a trajectory of l sampled tokens (VAPO, arXiv 2504.05118)."""
    critic_lam: float | None = Field(None, ge=0, le=1)
    """Lambda of the returns that the critic learns; null takes the policy's. With 1 it learns what came."""


class TurnGaeConfig(TokenAdvantageBase):
    """GAE in which a whole turn is one action; all its tokens have its advantage."""

    name: Literal["turn_gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one turn to the next."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda over turns."""


class BiLevelGaeConfig(TokenAdvantageBase):
    """GAE over turns, and inside each turn over its tokens (VAGEN, arXiv 2510.16907)."""

    name: Literal["bi_level_gae"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one token of a turn to the next."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda over the tokens of a turn."""
    turn_gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one turn to the next."""
    turn_lam: float = Field(1.0, ge=0, le=1)
    """Lambda over turns."""


class TokenReturnsConfig(TokenAdvantageBase):
    """What is paid from each token on, without a critic (REINFORCE++, arXiv 2501.03262)."""

    needs_values: ClassVar[bool] = False

    name: Literal["token_returns"]
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from one sampled token to the next."""


TOKEN_ADVANTAGES = (GaeConfig, TurnGaeConfig, BiLevelGaeConfig, TokenReturnsConfig)
