"""The network interface that gloo has to use, so that ranks reach each other.

By default, gloo resolves the machine's own name, which on laptops and in containers gives nothing, a VPN, or an address
that other nodes cannot reach.
"""

from __future__ import annotations

import socket
import struct
import sys

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
