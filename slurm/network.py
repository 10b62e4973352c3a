"""By which address of a node the others reach it."""

import asyncio
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import SlurmError

VARIABLE = "NEMORL_INTERFACE"
_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1"  # of a network for documentation: nothing is sent, only the route is asked for
_LOOPBACK = "127."


@dataclass(frozen=True)
class Interface:
    """A network interface with its IPv4 address."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.address.startswith(_LOOPBACK)


def interfaces() -> tuple[Interface, ...]:
    """Those of this machine that have an address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # without an address
                continue
            found.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    return tuple(found)


def own_interface(environment: Mapping[str, str]) -> Interface:
    """The interface for talking to the other nodes: the chosen one, or that of the machine's own name.

    Where there is neither it is that of the way out. Raises `SlurmError`.
    """
    there = interfaces()
    chosen = environment.get(VARIABLE)
    if chosen:
        return _named(chosen, there)
    candidates = [_address_of_name(), _source_for(_ANYWHERE), *(i.address for i in there)]
    reachable = [a for a in candidates if a and not a.startswith(_LOOPBACK)]
    return _with_address(next((a for a in reachable if a in {i.address for i in there}), None), there)


async def reachable(address: str, seconds: float, node: str) -> None:
    """Wait until Ray's head listens; Ray itself would try for minutes, and not say for what.

    `node` is where this runs. Raises `SlurmError`.
    """
    host, _, port = address.rpartition(":")
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout(10):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            if asyncio.get_running_loop().time() > end:
                raise SlurmError(
                    f"{node} cannot reach Ray's head at {address} ({error or 'no answer'}): let the nodes "
                    "reach each other's ports, or see the head's log"
                ) from None
            await asyncio.sleep(0.5)


def _named(name: str, there: Sequence[Interface]) -> Interface:
    found = next((interface for interface in there if interface.name == name), None)
    if found is None:
        names = ", ".join(interface.name for interface in there)
        raise SlurmError(
            f"{VARIABLE} = {name}: {socket.gethostname()} has no such interface with an IPv4 address; there "
            f"are {names}. Name one that every node has, or none."
        )
    return found


def _with_address(address: str | None, there: Sequence[Interface]) -> Interface:
    found = next((interface for interface in there if interface.address == address), None)
    if found is not None:
        return found
    loopback = next((interface for interface in there if interface.is_loopback), None)
    if loopback is None:
        raise SlurmError(f"{socket.gethostname()} has no network interface with an IPv4 address.")
    return loopback


def _source_for(address: str) -> str | None:
    """Our address on the way to another; UDP sends nothing to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
