"""The schema explains itself."""

from nemorl.config.schema import describe, locate
from nemorl.errors import ABSENT


def test_every_field_has_help() -> None:
    silent = [field.path for field in describe() if not field.help and not field.path.endswith(".name")]

    assert silent == []
    assert all("\n" not in field.help for field in describe())


def test_what_all_variants_have_is_there_once() -> None:
    fields = [(field.path.rpartition(".")[2], field.variant) for field in describe("generation")]

    assert fields[0] == ("backend", "")
    assert ("replicas", "") in fields
    assert ("host", "") in fields
    assert ("max_num_seqs", "vllm") in fields
    assert len(fields) == len(set(fields))


def test_the_choice_of_a_variant_says_what_there_is() -> None:
    (backend,) = describe("generation.backend")

    assert (backend.type, backend.default) == (
        "torch | megatron | openai | vllm | vllm_server | trtllm",
        "torch",
    )
    assert "`torch`: The embedded engine: plain torch" in backend.help


def test_a_field_is_described_with_type_default_and_variant() -> None:
    fields = {(field.path, field.variant): field for field in describe("policy.optimizer")}

    adam, sgd = fields["policy.optimizer.lr", "adam"], fields["policy.optimizer.lr", "sgd"]
    assert (adam.type, adam.default) == ("number > 0", 1e-6)
    assert (sgd.type, sgd.default) == ("number > 0", ABSENT)


def test_types_are_in_words() -> None:
    types = {field.path: field.type for field in describe()}

    assert types["policy.max_grad_norm"] == "number > 0 or null"
    assert types["policy.model_path"] == "path"
    assert types["algorithm.validation.pass_at_k"] == "list of integer"
    assert types["algorithm.kl.estimator"] == "k1 | k2 | k3"
    assert types["rewards.0.weight"] == "number"


def test_many_names_of_one_variant_are_called_by_its_class() -> None:
    (compares,) = describe("algorithm.compares")
    (name,) = describe("algorithm.name")

    assert compares.variant == "online"
    assert "`online`: Sample, score, train" in name.help
    assert "| grpo |" in name.type


def test_a_prefix_is_a_whole_name() -> None:
    assert describe("policy.opt") == []
    assert {field.path for field in describe("seed")} == {"seed"}


def test_pydantics_locations_lose_the_names_of_variants() -> None:
    path, _ = locate(("algorithm", "grpo", "loss", "clip_low"))

    assert path == ("algorithm", "loss", "clip_low")
    assert locate(("env", "tools", "tools", 1))[0] == ("env", "tools", 1)  # a field of that name stays
    in_one_of_several = ("env", "by_task", "environments", "tools", "tools", "tools", 1)
    assert locate(in_one_of_several)[0] == ("env", "environments", "tools", "tools", 1)
