"""Which network interface gloo has to use, so that ranks reach each other and nothing else is asked.

Left alone, gloo looks up the machine's own name, which on laptops and in containers resolves to nothing, to a VPN, or
to an address that the other nodes cannot reach.
"""

from __future__ import annotations

import socket
import struct
import sys

from fabric.launchers.world import World

SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_for(world: World) -> str | None:
    """Loopback on a single node; with several, the interface that faces node 0. None where we cannot tell."""
    if sys.platform != "linux" or world.rendezvous is None:
        return None
    if world.num_nodes == 1:
        return "lo"
    address = _own_address_towards(world.rendezvous.address)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def own_address(world: World) -> str:
    """The address at which the other ranks reach this machine; empty where that is not known: any of its own."""
    if world.rendezvous is None or world.num_nodes == 1:
        return "127.0.0.1"
    return _own_address_towards(world.rendezvous.address) or ""


def _own_address_towards(host: str) -> str | None:
    """The address this machine speaks from when it talks to `host`. Nothing is sent."""
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
