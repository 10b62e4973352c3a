"""Addresses of a run: servers that it names, where it listens, and the nodes of its cluster."""

import errno
import os
import socket
from urllib.parse import urlsplit

from nemorl.config.environment import EnvConfig, environments_in
from nemorl.config.experiment import Experiment
from nemorl.config.facts import environment_urls, server_urls
from nemorl.config.generation import EndpointConfig, GenerationConfig, server_host
from nemorl.config.run import ClusterConfig, LoggerConfig
from nemorl.errors import Problem, Problems


def address_problems(
    generation: GenerationConfig, endpoint: EndpointConfig | None, env: EnvConfig, logger: LoggerConfig
) -> Problems:
    """Addresses that this machine cannot find, or where it cannot listen; nothing is sent."""
    for field, url in server_urls(generation, (), {}).items():
        host = server_host(url)
        if host and (problem := _unknown(host)) is not None:
            fix = f"this machine finds no address of {host} ({problem}); correct the name"
            yield Problem(field, url, fix)
    if endpoint is not None:
        yield from _listening_problems("generation.endpoint.host", endpoint.host, endpoint.port)
    if (metrics := logger.prometheus) is not None:
        yield from _listening_problems("logger.prometheus.host", metrics.host, metrics.port)
    for path, one in environments_in(env):
        if one.calls_model is not False:  # others listen nowhere
            yield from _listening_problems(f"{path}.endpoint_host", one.endpoint_host)


def _listening_problems(field: str, host: str, port: int = 0) -> Problems:
    """`field` is that of the host; that of a port that is not 0 has the same section."""
    if (problem := _unknown(host)) is not None:
        fix = f"this machine finds no such address ({problem}): name one that it has, such as 127.0.0.1"
        yield Problem(field, host, fix)
        return
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                # As servers have it: a port whose connections are just ending is free.
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(address)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # a server leaves such a family out
                continue
            fixes = {
                errno.EADDRINUSE: "another program listens there: name another port",
                errno.EACCES: "this port is for programs with special rights: name one of 1024 or more",
            }
            if fix := fixes.get(error.errno or 0, ""):
                yield Problem(field.replace("host", "port"), port, f"{fix}, or 0 for a free one")
            else:
                fix = f"this machine cannot listen there ({error.strerror}): name an address of its own"
                yield Problem(field, host, f"{fix}, such as 127.0.0.1")
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


def server_problems(experiment: Experiment) -> Problems:
    """Servers of rewards, environments and generation to which this machine cannot connect."""
    if "RAY_ADDRESS" in os.environ:  # workers on other machines connect
        return
    urls = server_urls(experiment.generation, experiment.rewards, teachers={})
    for field, url in (urls | environment_urls(experiment.env)).items():
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if parts.hostname:
                socket.create_connection((parts.hostname, port), timeout=5.0).close()
        except OSError as error:
            problem = error.strerror or str(error)
            yield Problem(field, url, f"this machine cannot connect to it ({problem}); start the server")
        except (ValueError, UnicodeError):  # no address, which the checks of the configuration report
            continue


def node_problems(cluster: ClusterConfig) -> Problems:
    """A run over several nodes joins a Ray that was started on them."""
    if cluster.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        on_slurm = f"on a Slurm cluster use `nemorl slurm submit CONFIG --nodes {cluster.num_nodes}`"
        elsewhere = "elsewhere start Ray on the nodes and set RAY_ADDRESS to its head (docs/slurm.md)"
        fix = f"this command starts the run on this machine only; {on_slurm}; {elsewhere}"
        yield Problem("cluster.num_nodes", cluster.num_nodes, fix)
