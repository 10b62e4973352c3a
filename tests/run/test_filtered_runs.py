"""A whole run that trains on filtered samples: engine and trainer compute the same for the same tokens."""

from pathlib import Path

import pytest
import yaml

from tests.run.runs import finish, lines, start, write_experiment


@pytest.mark.slow
def test_the_gap_is_rounding_as_without_filters(folder: Path, model: Path) -> None:
    """Three steps with a divergence in the loss, under TP2."""
    path = write_experiment(folder, model, "filtered")
    tree = yaml.safe_load(path.read_text())
    tree["generation"] |= {"sampling": {"top_k": 8, "top_p": 0.9}}
    tree["algorithm"] |= {"num_steps": 3, "validation": {}}
    tree |= {"checkpointing": {"enabled": False}}
    path.write_text(yaml.safe_dump(tree))
    status, output = finish(start("train", path), 500)
    assert status == 0, output
    steps = lines(folder / "filtered")
    assert len(steps) == 3
    for step in steps:
        assert 0 < step.values["logprob_gap/max"] < 1e-4
        assert step.values["sampling/dropped"] == 0
        assert 0 < step.values["entropy"] < 2.0794  # the logarithm of top_k
        assert step.values["updates/skipped"] == step.values["updates/empty"] == 0
    assert steps[0].values["kl/reference"] == pytest.approx(0, abs=1e-6)  # of all tokens, on both sides
    assert steps[-1].values["kl/reference"] > 1e-6
