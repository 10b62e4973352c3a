"""Settings of `policy.moe` that a model has no use for are named."""

import pytest

from nemorl.config.policy import MoeConfig
from nemorl.models.moe_rules import moe_violations
from tests.models.test_layout_rules import DENSE, EXPERTS


@pytest.mark.parametrize(
    ("shape", "fields", "samples", "refused"),
    [
        (DENSE, {}, True, None),
        (DENSE, {"freeze_router": True}, True, "freeze_router"),
        (DENSE, {"load_balancing_loss_coefficient": 0.1}, True, "load_balancing_loss_coefficient"),
        (EXPERTS, {"freeze_router": True}, True, None),
        (EXPERTS, {"router_replay": True}, True, "router_replay"),
        (EXPERTS, {"router_replay": True}, False, "router_replay"),
    ],
)
def test_each_setting(shape, fields, samples, refused):
    found = [violation.field for violation in moe_violations(shape, MoeConfig(**fields), samples=samples)]
    assert found == ([] if refused is None else [f"policy.moe.{refused}"])
