"""The network interface that a spec names: this node's addresses on it, and the ranks' settings."""

from __future__ import annotations

import socket

import psutil

from holdfast.contracts.errors import InterfaceError


def addresses_of(interface: str, host: str) -> list[str]:
    """Return this node's addresses on `interface`, IPv4 first. `host` is the node's name.

    Raises `InterfaceError` if the node has no such interface, if it is down, or without an address
    that other nodes can use. Link-local IPv6 addresses are none, since each node names them in its
    own way.
    """
    known, states = psutil.net_if_addrs(), psutil.net_if_stats()
    if interface not in known:
        raise InterfaceError(
            f"node {host}: launch.network_interface {interface!r}: the node has no such interface; "
            f"it has {', '.join(sorted(known))}"
        )
    if not (interface in states and states[interface].isup):
        up = sorted(name for name, state in states.items() if state.isup)
        raise InterfaceError(
            f"node {host}: launch.network_interface {interface!r} is down; these interfaces of the "
            f"node are up: {', '.join(up)}"
        )
    found = [
        str(one.address)
        for family in (socket.AF_INET, socket.AF_INET6)
        for one in known[interface]
        if one.family == family and not str(one.address).lower().startswith("fe80:")
    ]
    if not found:
        raise InterfaceError(
            f"node {host}: launch.network_interface {interface!r} has no IPv4 address and no "
            f"global IPv6 address; name an interface with one, of {', '.join(sorted(known))}"
        )
    return found


def interface_environment(interface: str | None) -> dict[str, str]:
    """Return the variables by which NCCL and gloo use exactly `interface`; none for None."""
    if interface is None:
        return {}
    # For NCCL, a name without `=` stands for all interfaces that begin with it.
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
