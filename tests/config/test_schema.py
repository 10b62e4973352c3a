"""The schema explains itself."""

from nemorl.config.schema import describe, locate
from nemorl.errors import ABSENT


def test_every_field_has_help() -> None:
    silent = [field.path for field in describe() if not field.help and not field.path.endswith(".name")]

    assert set(silent) == {"generation.backend"}


def test_a_field_is_described_with_type_default_and_variant() -> None:
    fields = {(field.path, field.variant): field for field in describe("policy.optimizer")}

    adam, sgd = fields["policy.optimizer.lr", "adam"], fields["policy.optimizer.lr", "sgd"]
    assert (adam.type, adam.default) == ("number > 0", 1e-6)
    assert (sgd.type, sgd.default) == ("number > 0", ABSENT)


def test_types_are_in_words() -> None:
    types = {field.path: field.type for field in describe()}

    assert types["policy.max_grad_norm"] == "number > 0 or null"
    assert types["policy.model_path"] == "path"
    assert types["algorithm.validation.pass_at_k"] == "list of whole number"
    assert types["algorithm.kl.estimator"] == "k1 | k2 | k3"
    assert types["rewards.0.weight"] == "number"


def test_a_prefix_is_a_whole_name() -> None:
    assert describe("policy.opt") == []
    assert {field.path for field in describe("seed")} == {"seed"}


def test_pydantics_locations_lose_the_names_of_variants() -> None:
    path, _ = locate(("algorithm", "grpo", "loss", "clip_low"))

    assert path == ("algorithm", "loss", "clip_low")
