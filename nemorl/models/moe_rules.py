"""Which settings of `policy.moe` a model has a use for. Imports no torch."""

from collections.abc import Iterator

from nemorl.config.policy import MoeConfig
from nemorl.errors import Violation

from .shape import ModelShape

_MOE = "policy.moe"


def moe_violations(shape: ModelShape, config: MoeConfig, *, samples: bool) -> Iterator[Violation]:
    """Settings that would do nothing; `samples` is whether the run generates what it learns from."""
    if shape.moe is None:
        usual = MoeConfig().model_dump()
        for name, value in config.model_dump().items():
            if value != usual[name]:
                yield Violation(f"{_MOE}.{name}", value, "the model has no experts: remove this")
        return
    if config.router_replay:
        # A batch may carry choices already (`PackedBatch.routed_experts`); no back end fills them in yet.
        reason = "no generation back end returns the experts it chose" if samples else "nothing is sampled"
        yield Violation(f"{_MOE}.router_replay", True, f"{reason}, so there is nothing to replay: set false")
