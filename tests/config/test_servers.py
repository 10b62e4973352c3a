"""Settings of endpoints and of servers of others."""

from pathlib import Path

import pytest

from nemorl.config.generation import is_loopback
from nemorl.config.load import load_experiment
from tests.config.experiments import problems_of

SERVER = "generation={backend: openai, base_url: 'http://10.0.0.1:8000/v1', model: m, max_new_tokens: 8"


def test_a_server_that_returns_token_ids_trains(sound: Path) -> None:
    generation = load_experiment(sound, [SERVER + "}"]).generation
    assert (generation.takes_weights, generation.ranks_per_replica) == (False, 0)
    # It takes no GPU of the run.
    load_experiment(sound, [SERVER + "}", "cluster.gpus_per_node=1"])


@pytest.mark.parametrize(
    ("override", "field", "fix"),
    [
        (
            SERVER + ", token_ids: false}",
            "generation.token_ids",
            "training needs token ids and logprobs, not only text",
        ),
        (
            SERVER + ", transport: gloo}",
            "generation.transport",
            "the server receives no weights from the run; remove it",
        ),
        (
            SERVER + ", check_one_in: 2}",
            "generation.check_one_in",
            "the server receives no weights from the run; remove it",
        ),
        (
            SERVER + ", token_ids: false, stop_token_ids: [5]}",
            "generation.stop_token_ids",
            "with generation.token_ids: false only text is sent to the server; remove it",
        ),
        (
            SERVER.replace("http://", "ftp://") + "}",
            "generation.base_url",
            "such as http://127.0.0.1:8000/v1",
        ),
        (SERVER.replace("10.0.0.1", "") + "}", "generation.base_url", "such as http://127.0.0.1:8000/v1"),
        (SERVER.replace("10.0.0.1", "[::1") + "}", "generation.base_url", "such as http://127.0.0.1:8000/v1"),
        (SERVER.replace("/v1", "/") + "}", "generation.base_url", "10.0.0.1:8000/completions, which"),
        (
            SERVER.replace("/v1", "/v1/completions") + "}",
            "generation.base_url",
            "/completions is appended to it for each request; end it with /v1",
        ),
        (
            "generation.endpoint={host: 0.0.0.0}",
            "generation.endpoint.host",
            "other machines reach this address without a key; set api_key_env",
        ),
        (
            "generation={backend: megatron, endpoint: {}}",
            "generation.endpoint",
            "the policy's processes sample, and between two stages of sampling it cannot answer",
        ),
    ],
)
def test_it_is_refused(sound: Path, override: str, field: str, fix: str) -> None:
    found = {problem.field: problem for problem in problems_of(sound, override)}
    assert field in found
    assert fix in found[field].fix


def test_an_address_for_everyone_is_taken_with_a_key(sound: Path) -> None:
    load_experiment(sound, ["generation.endpoint={host: 0.0.0.0, api_key_env: SECRET}"])


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.4", False), ("localhost.example", False),
    ],
)  # fmt: skip
def test_what_only_this_machine_reaches(host: str, here: bool) -> None:
    assert is_loopback(host) == here
