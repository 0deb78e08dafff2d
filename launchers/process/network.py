"""The network interface that gloo has to use, so that ranks reach each other.

By default, gloo resolves the machine's own name, which on laptops and in containers gives nothing, a VPN, or an address
that other nodes cannot reach.
"""

import socket
import struct
import sys
from collections.abc import Mapping

from fabric.launchers.world import World

SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_for(world: World) -> str | None:
    """Loopback on a single node; otherwise the interface towards node 0. None if unknown."""
    if sys.platform != "linux" or world.rendezvous is None:
        return None
    if world.num_nodes == 1:
        return "lo"
    address = _own_address_towards(world.rendezvous.address)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def own_address(world: World) -> str:
    """The address at which other ranks reach this machine; empty if unknown: any of its own."""
    if world.rendezvous is None or world.num_nodes == 1:
        return "127.0.0.1"
    return _own_address_towards(world.rendezvous.address) or ""


def require_interfaces(environ: Mapping[str, str]) -> None:
    """Raise ValueError if GLOO_SOCKET_IFNAME names an interface that this machine does not have."""
    names, found = environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    missing = [name for name in names.split(",") if name not in found]
    if names and missing:
        raise ValueError(
            f"`GLOO_SOCKET_IFNAME={names}`: this machine has no network interface {missing[0]!r}. It has "
            f"{', '.join(found)}. Name one of these, or unset the variable: fabric then chooses one."
        )


def require_loopback() -> None:
    """Raise RuntimeError if this machine cannot connect to itself. Torch would try for five minutes."""
    if _own_address_towards("127.0.0.1") is None:
        raise RuntimeError(
            "The ranks of this machine cannot meet at 127.0.0.1, for it has no loopback interface, or one that is "
            "down. Write `ip link set lo up` (in a container or network namespace: inside it, as root)."
        )


def _own_address_towards(host: str) -> str | None:
    """The source address of connections from this machine to `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # an interface without an IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
