"""What each key decides next to the others: the fields that differ with its value."""

from typing import Any

import pytest

from nemorl.importing.document import PROJECTS, import_values
from nemorl.importing.outcome import NO_EFFECT, settled
from nemorl.importing.rules import CannotImport, Fields, Origin, Part, Row, apply
from tests.importing.contexts import GRPO, OPTIONS, VERL

_A = "actor_rollout_ref.actor"


def sizes(x: Origin) -> Fields:
    """Micro-batches of a number of samples, or of at most as many tokens; at least one sample."""
    if (samples := x.get("samples", 1)) > 8:
        raise CannotImport(f"samples = {samples}: these are too many")
    tokens = x.get("tokens", 100) if x.get("by_tokens", False) else 10 * samples
    return {"policy.micro_batch_tokens": max(tokens, 10), "policy.sections": {"model": x.get("model", "a")}}


RULES = (
    Part(("samples", "tokens", "by_tokens", "model", "unused"), ("policy", "data.chat"), sizes),
    Part(("chat", "unused"), ("data.chat",), lambda x: {"data.chat": x.get("chat", False)}),
    Part(("seed",), ("seed",), lambda x: {"seed": x.get("seed", 0), "algorithm.steps": x.get("samples", 1)}),
)


def rows_of(**values: Any) -> dict[str, Row]:
    origin = Origin(values)
    return {row.key: row for row in settled(apply(RULES, origin), RULES, origin).rows}


def test_a_key_becomes_the_fields_that_differ_with_its_value() -> None:
    rows = rows_of(tokens=200, by_tokens=True, model="b", chat=True)
    tokens = ("policy.micro_batch_tokens",)
    assert {key: row.fields for key, row in rows.items()} == {
        "tokens": tokens,
        "by_tokens": tokens,
        "model": ("policy.sections.model",),
        "chat": ("data.chat",),
    }
    assert {row.outcome for row in rows.values()} == {"mapped"}


def test_a_number_that_changes_nothing_has_no_effect() -> None:
    rows = rows_of(tokens=200, by_tokens=False, unused=3, seed=1)
    for key in ("tokens", "unused"):
        assert rows[key] == Row(key, rows[key].value, "none", (), NO_EFFECT)
    assert rows["by_tokens"].fields == ("policy.micro_batch_tokens",), "the number of samples makes 10"
    assert rows["seed"].fields == ("seed",)


def test_what_another_rule_makes_of_a_key_is_an_effect() -> None:
    """Its own rule does not use the number of samples here; that of the seed does."""
    rows = rows_of(samples=2, tokens=200, by_tokens=True)
    assert (rows["samples"].outcome, rows["samples"].fields) == ("mapped", ("algorithm.steps",))


def test_where_nothing_is_known_a_row_stays_as_it_is() -> None:
    """Of text there may be other values than the ones that were tried, and others may be refused."""
    refused = (*RULES[:2], Part(("limit",), ("run_dir",), lambda x: {"run_dir": _limited(x)}))
    origin = Origin({"unused": "a text", "limit": 3})
    rows = {row.key: row for row in settled(apply(refused, origin), refused, origin).rows}
    assert (rows["unused"].outcome, rows["unused"].fields) == ("mapped", ("policy", "data.chat"))
    assert (rows["limit"].outcome, rows["limit"].fields) == ("mapped", ("run_dir",))


def _limited(x: Origin) -> str:
    if x.get("limit") != 3:
        raise CannotImport("limit: 3 is the only value that is imported")
    return "runs/three"


@pytest.mark.parametrize("by_tokens", [True, False])
def test_micro_batches_of_verl_are_of_samples_or_of_tokens(by_tokens: bool) -> None:
    given = {
        f"{_A}.use_dynamic_bsz": by_tokens,
        f"{_A}.ppo_micro_batch_size_per_gpu": 2,
        f"{_A}.ppo_max_token_len_per_gpu": 16_384,
        "trainer.save_freq": -1,
    }
    found = import_values(PROJECTS["verl"], VERL | given, OPTIONS, compares=True)
    rows = {row.key.removeprefix(f"{_A}."): (row.fields, row.note) for row in found.rows}
    tokens, unused = (("policy.micro_batch_tokens",), ""), ((), NO_EFFECT)
    assert rows["ppo_max_token_len_per_gpu"] == (tokens if by_tokens else unused)
    assert rows["ppo_micro_batch_size_per_gpu"] == (unused if by_tokens else tokens)
    assert rows["use_dynamic_bsz"] == tokens
    assert rows["trainer.save_freq"] == (("checkpointing.enabled",), ""), "another value than -1 saves"


def test_the_experiment_and_remarks_are_the_same_as_without_a_comparison() -> None:
    given = {"policy.optimizer.kwargs.lr": 1e-5, "loss_fn.reference_policy_kl_penalty": 0.0}
    plain, compared = (
        import_values(PROJECTS["nemo-rl"], GRPO | given, OPTIONS, compares=compares)
        for compares in (False, True)
    )
    assert compared.tree == plain.tree
    assert compared.comments == plain.comments
    for before, after in zip(plain.rows, compared.rows, strict=True):
        assert (before.key, before.value, before.changes_result) == (
            after.key,
            after.value,
            after.changes_result,
        )
        assert after.note in (before.note, NO_EFFECT)
    (row,) = [row for row in compared.rows if row.key == "policy.optimizer.kwargs.lr"]
    assert row.fields == ("policy.optimizer.lr",)
