"""Addresses to listen on, and those of servers, before anything starts."""

import socket
from collections.abc import Iterator

import pytest

from nemorl.config.environment import ByTaskEnvConfig, ProgramEnvConfig, SingleTurnEnvConfig
from nemorl.config.generation import EndpointConfig, OpenAIGenerationConfig, TorchGenerationConfig
from nemorl.config.run import LoggerConfig
from nemorl.errors import Problem
from nemorl.plan.addresses import address_problems


def found(host: str, port: int = 0) -> list[Problem]:
    endpoint = EndpointConfig(host=host, port=port)
    return list(address_problems(TorchGenerationConfig(), endpoint, SingleTurnEnvConfig(), LoggerConfig()))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which a server listens."""
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
    (problem,) = found(host)

    assert (problem.field, problem.value) == ("generation.endpoint.host", host)
    assert fix in problem.fix
    assert "127.0.0.1" in problem.fix


def test_a_port_in_use_is_refused(taken: int) -> None:
    (problem,) = found("127.0.0.1", taken)

    assert (problem.field, problem.value) == ("generation.endpoint.port", taken)
    assert problem.fix == "another program listens there: name another port, or 0 for a free one"


def test_an_address_of_prometheus_is_one_of_this_machine(taken: int) -> None:
    config = LoggerConfig(prometheus={"port": taken})
    (problem,) = address_problems(TorchGenerationConfig(), None, SingleTurnEnvConfig(), config)

    assert (problem.field, problem.value) == ("logger.prometheus.port", taken)


def test_a_server_whose_name_is_unknown_is_refused() -> None:
    config = OpenAIGenerationConfig(backend="openai", base_url="http://nowhere.invalid:80/v1", model="m")

    (problem,) = address_problems(config, None, SingleTurnEnvConfig(), LoggerConfig())

    assert problem.field == "generation.base_url"
    assert "finds no address of nowhere.invalid" in problem.fix


def test_an_endpoint_for_agents_is_refused_where_this_machine_cannot_listen() -> None:
    agent = ProgramEnvConfig(name="program", command=("python3",), endpoint_host="192.0.2.7")
    env = ByTaskEnvConfig(name="by_task", environments={"sums": SingleTurnEnvConfig(), "agent": agent})

    (problem,) = address_problems(TorchGenerationConfig(), None, env, LoggerConfig())

    assert (problem.field, problem.value) == ("env.environments.agent.endpoint_host", "192.0.2.7")
    assert "this machine cannot listen there" in problem.fix
