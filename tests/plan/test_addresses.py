"""Addresses to listen on, and those of servers, before anything starts."""

import socket
from collections.abc import Iterator

import pytest

from nemorl.config.generation import EndpointConfig, OpenAIGenerationConfig, TorchGenerationConfig
from nemorl.errors import Violation
from nemorl.plan.problems import address_violations


def found(host: str, port: int = 0) -> list[Violation]:
    return list(address_violations(TorchGenerationConfig(), EndpointConfig(host=host, port=port)))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_addresses_of_this_machine_are_taken(host: str) -> None:
    assert found(host) == []


@pytest.mark.parametrize(
    ("host", "fix"),
    [
        ("nowhere.invalid", "this machine finds no such address"),
        ("a..b", "it is no name of a machine"),
        ("192.0.2.7", "this machine cannot listen there"),  # an address for documentation
    ],
)
def test_other_addresses_are_refused(host: str, fix: str) -> None:
    (violation,) = found(host)

    assert (violation.field, violation.value) == ("generation.endpoint.host", host)
    assert fix in violation.fix
    assert "127.0.0.1" in violation.fix


def test_a_port_in_use_is_refused(taken: int) -> None:
    (violation,) = found("127.0.0.1", taken)

    assert (violation.field, violation.value) == ("generation.endpoint.port", taken)
    assert violation.fix == "another program listens there: name another port, or 0 for a free one"


def test_a_server_whose_name_nobody_knows_is_refused() -> None:
    config = OpenAIGenerationConfig(backend="openai", base_url="http://nowhere.invalid:80/v1", model="m")

    (violation,) = address_violations(config, None)

    assert violation.field == "generation.base_url"
    assert "finds no address of nowhere.invalid" in violation.fix
