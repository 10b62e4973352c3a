"""Whether the addresses that an experiment names can be had from this machine."""

import errno
import os
import socket
from collections.abc import Iterator

from nemorl.config.generation import EndpointConfig, GenerationConfig, OpenAIGenerationConfig
from nemorl.errors import Violation

_HOST, _PORT = "generation.endpoint.host", "generation.endpoint.port"


def address_violations(generation: GenerationConfig, endpoint: EndpointConfig | None) -> Iterator[Violation]:
    """`endpoint` is where this machine would listen. Nothing is sent; the port is free again afterwards."""
    if isinstance(generation, OpenAIGenerationConfig):
        yield from _asking(generation)
    if endpoint is not None:
        yield from _listening(endpoint)


def _asking(config: OpenAIGenerationConfig) -> Iterator[Violation]:
    problem = _unknown(config.host) if config.host else None
    if problem is not None:
        mend = f"this machine finds no address of {config.host} ({problem}): mend the name"
        yield Violation("generation.base_url", config.base_url, mend)


def _listening(endpoint: EndpointConfig) -> Iterator[Violation]:
    host, port = endpoint.host, endpoint.port
    if (problem := _unknown(host)) is not None:
        mend = f"this machine finds no such address ({problem}): name one that it has, such as 127.0.0.1"
        yield Violation(_HOST, host, mend)
        return
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        number = _refused(family, address)
        if number is not None:
            yield _refusal(endpoint, number)
            return


def _unknown(host: str) -> str | None:
    """Why no address is known for a name."""
    try:
        socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a part of it is empty, or longer than names can be
        return "it is no name of a machine"
    return None


def _refused(family: int, address: tuple[object, ...]) -> int | None:
    """The error with which listening begins, if it does."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # As servers have it: a port whose connections are just ending is free.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        # A family that this machine lacks is left out when a server begins to listen.
        return None if error.errno == errno.EAFNOSUPPORT else error.errno
    return None


def _refusal(endpoint: EndpointConfig, number: int) -> Violation:
    if number == errno.EADDRINUSE:
        mend = "another program listens there: name another port, or 0 for a free one"
        return Violation(_PORT, endpoint.port, mend)
    if number == errno.EACCES:
        mend = "this port is for programs with special rights: name one of 1024 or more, or 0 for a free one"
        return Violation(_PORT, endpoint.port, mend)
    mend = f"this machine cannot listen there ({os.strerror(number)}): name an address of its own"
    return Violation(_HOST, endpoint.host, f"{mend}, such as 127.0.0.1")
