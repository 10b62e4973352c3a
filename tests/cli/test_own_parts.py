"""Functions of one's own are tried before a run."""

from pathlib import Path

import pytest

from tests.cli.conftest import Nemorl

PARTS = '''
from nemorl.algorithms.custom import advantage
from nemorl.algorithms.objective import TokenLoss


@advantage
def centred(groups, scale=1.0):
    """Less the mean of the group."""
    found = []
    for group in groups:
        rewards = [t.reward for t in group.trajectories]
        found.append([scale * (r - sum(rewards) / len(rewards)) for r in rewards])
    return found


def ending(groups):
    """The end of the process."""
    raise SystemExit(3)


def forgetful(groups):
    """Nothing at all."""
    return []


async def later(groups):
    """What nobody waits for."""
    return []


def measured(batch, logprobs, old, advantages, metric):
    """REINFORCE, and a metric."""
    return TokenLoss(-logprobs * advantages, metrics={metric: -logprobs})
'''


@pytest.mark.parametrize(
    ("section", "refused"),
    [
        ("advantage={name: custom, function: 'my_parts:centred', arguments: {scale: 2}}", None),
        ("advantage={name: custom, function: 'my_parts:forgetful'}", "returned 0 values for 2 groups"),
        ("advantage={name: custom, function: 'my_parts:ending'}", "it raised SystemExit: 3"),
        ("advantage={name: custom, function: 'my_parts:later'}", "it is an async function"),
        ("advantage={name: custom, function: 'my_parts:gone'}", "my_parts has no gone; correct the name"),
        ("advantage={name: custom, function: 'my_parts:centred', arguments: {rate: 1}}", "argument 'rate'"),
        ("loss={name: custom, function: 'my_parts:measured', arguments: {metric: own/gain}}", None),
        (
            "loss={name: custom, function: 'my_parts:measured', arguments: {metric: loss/total}}",
            "its metric loss/total has the name of a metric of the run",
        ),
        (
            "loss={name: custom, function: 'my_parts:measured', arguments: {metric: tokens}}",
            "its metric tokens has the name of a metric of the run",
        ),
        ("loss={name: custom, function: 'my_parts:gone'}", "my_parts has no gone; correct the name"),
    ],
)
def test_check_tries_them(nemorl: Nemorl, experiment: Path, section: str, refused: str | None) -> None:
    Path("my_parts.py").write_text(PARTS, encoding="utf-8")

    outcome = nemorl("check", experiment, f"algorithm.{section}")

    if refused is None:
        assert (outcome.status, outcome.err) == (0, outcome.err)
        return
    assert outcome.status == 2
    assert f"algorithm.{section.partition('=')[0]}.function = my_parts:" in outcome.err
    assert refused in outcome.err
