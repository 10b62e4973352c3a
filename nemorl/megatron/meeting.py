"""Where processes of several machines find each other: a store that one process serves by TCP."""

import fcntl
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

LOOPBACK_INTERFACE = "lo"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface
_REQUEST = struct.Struct("256s")
_ADDRESS = slice(20, 24)  # in the kernel's answer


def store_at(rendezvous: str, timeout: timedelta) -> PrefixStore:
    """A connection to the store of `tcp://host:port/name`; every name has keys of its own."""
    place = urlsplit(rendezvous)
    host, port = place.hostname, place.port
    assert host is not None, f"{rendezvous} names no host"
    assert port is not None, f"{rendezvous} names no port"
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(place.path, store)


def interface_towards(rendezvous: str) -> str | None:
    """The network interface of this machine that reaches the store; None where none has that address.

    Else gloo would take the one of the machine's name, which on many machines is a loopback address.
    """
    place = urlsplit(rendezvous)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((place.hostname, place.port))  # sends nothing
        own = way.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                asked = _REQUEST.pack(name.encode())
                if socket.inet_ntoa(fcntl.ioctl(way, _SIOCGIFADDR, asked)[_ADDRESS]) == own:
                    return name
    return None
