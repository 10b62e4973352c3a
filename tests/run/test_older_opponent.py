"""Self-play against older weights: `nemorl serve` over them has the other seat of a game."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemorl.models.create import CHAT, create_tiny_model
from tests.required import require_module

from .runs import finish, lines, served, start, write_experiment

require_module("textarena")


@pytest.fixture
def opponent(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The `opponent` of an environment: a server of weights that the policy no longer has."""
    create_tiny_model(tmp_path / "older", CHAT, hidden=32, ffn=64, heads=4, kv_heads=2, seed=1)
    with served(tmp_path / "older", "NEMORL_TEST_KEY") as address:
        yield {"name": "endpoint", "max_tokens": 3, **address}


@pytest.mark.slow
def test_a_run_plays_against_the_weights_behind_a_server(tmp_path: Path, opponent: dict[str, Any]) -> None:
    """Each turn of an untrained model is a move of this game, whatever else it says."""
    create_tiny_model(tmp_path / "newer", CHAT, hidden=32, ffn=64, heads=4, kv_heads=2, seed=2)
    game = {"name": "textarena", "game": "IteratedRockPaperScissors-v0", "options": {"num_rounds": 2}}
    config = write_experiment(
        tmp_path,
        tmp_path / "newer",
        "played",
        policy={"layout": {}, "max_sequence_length": 128, "micro_batch_tokens": 512},
        generation={"max_new_tokens": 3},
        data={
            "chat": True,
            "prompt_template": "{prompt}=",
            "train": {"name": "seeds", "size": 100},
            "validation": None,
        },
        env={**game, "action": "[rock]{turn}", "observation": "turns", "opponent": opponent},
        rewards=[],
        algorithm={"num_steps": 2, "kl": {}, "validation": {}},
        logger={"console": "plain", "samples_per_step": 16},
    )
    status, output = finish(start("train", config))
    assert status == 0, output
    steps = lines(tmp_path / "played")
    assert [step.values["errors"] for step in steps] == [0, 0]
    assert [step.values["turns/mean"] for step in steps] == [2, 2]
    samples = [json.loads(line) for line in (tmp_path / "played" / "samples.jsonl").read_text().splitlines()]
    assert [sample["reward"] for sample in samples] == [0.0] * len(samples)  # all rounds are drawn
    # The opponent's turns are what the policy is shown; no two games have the same ones.
    assert len({sample["completion"] for sample in samples}) > len(samples) / 2
