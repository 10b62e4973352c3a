"""What optimizers say about themselves."""

import pytest

from nemorl.config.policy import AdamConfig, MuonConfig, OptimizerBase, SgdConfig

ADAM = AdamConfig()


@pytest.mark.parametrize(
    ("optimizer", "moments", "float32_bytes", "bfloat16_bytes"),
    [
        (ADAM, ("exp_avg", "exp_avg_sq"), 8, 12),
        (ADAM.model_copy(update={"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "float16"}), ADAM.moments, 3, 7),
        (ADAM.model_copy(update={"main_params_dtype": "float16"}), ADAM.moments, 8, 10),
        (SgdConfig(name="sgd", lr=0.1), ("momentum_buffer",), 4, 8),
        (SgdConfig(name="sgd", lr=0.1, momentum=0.0), (), 0, 4),
        (MuonConfig(name="muon", lr=0.1), ("momentum_buffer", *ADAM.moments), 8, 12),
    ],
)
def test_bytes_of_state_follow_from_moments_and_types(
    optimizer: OptimizerBase, moments: tuple[str, ...], float32_bytes: int, bfloat16_bytes: int
) -> None:
    assert optimizer.moments == moments
    assert optimizer.state_bytes("float32") == float32_bytes
    assert optimizer.state_bytes("bfloat16") == bfloat16_bytes


def test_muon_alone_needs_complete_matrices_on_every_copy() -> None:
    sharded = {cls.__name__: cls.is_sharded for cls in OptimizerBase.__subclasses__()}
    assert sharded == {"AdamConfig": True, "SgdConfig": True, "MuonConfig": False}
