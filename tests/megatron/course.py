"""Five optimizer steps of one layout next to those of another."""

import pytest

from tests.megatron.cases import Life


def assert_same_course(life: Life, alone: Life) -> None:
    """Losses, logprobs and gradient norms agree within what summing in another order changes."""
    assert life.gap.gap_mean == pytest.approx(alone.gap.gap_mean, rel=1e-5)
    assert life.gap.num_tokens == alone.gap.num_tokens
    for mine, its in zip(life.steps, alone.steps, strict=True):
        assert mine.sums["loss/total"] == pytest.approx(its.sums["loss/total"], rel=1e-5)
        assert mine.sums["entropy"] == pytest.approx(its.sums["entropy"], rel=1e-5)
        assert mine.sums["kl/reference"] == pytest.approx(its.sums["kl/reference"], rel=1e-4, abs=1e-6)
        assert mine.maxima["logprob_gap/max"] == pytest.approx(its.maxima["logprob_gap/max"], rel=1e-4)
        assert mine.grad_norm == pytest.approx(its.grad_norm, rel=1e-4)
        assert mine.num_tokens == its.num_tokens
