"""Networks of nodes on this machine: one namespace for each node, joined by a bridge. Needs root.

A node that is cut keeps its processes and its files. What others send to it is dropped, and no
connection is closed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

INTERFACE = "eth0"


class NodeNetwork:
    """The namespaces of `nodes` nodes. In each, the node's interface is `INTERFACE`."""

    def __init__(self, nodes: int) -> None:
        # Names of interfaces have at most 15 characters.
        self._name, self.nodes = f"hf{os.getpid()}", nodes

    def enter(self, node: int) -> list[str]:
        """Return the command that starts another one on a node."""
        return ["nsenter", f"--net=/var/run/netns/{self._space(node)}"]

    def cut(self, node: int) -> None:
        """Drop everything between a node and the others."""
        _ip("link", "set", self._port(node), "down")

    def join(self, node: int) -> None:
        """Connect a node again."""
        _ip("link", "set", self._port(node), "up")

    def open(self) -> None:
        bridge = f"{self._name}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for node in range(self.nodes):
            space, port = self._space(node), self._port(node)
            _ip("netns", "add", space)
            there = ["peer", "name", INTERFACE, "netns", space]
            _ip("link", "add", port, "type", "veth", *there)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"10.213.7.{node + 1}/24", "dev", INTERFACE)
            for name in ("lo", INTERFACE):
                _ip("-n", space, "link", "set", name, "up")

    def close(self) -> None:
        """Remove all of it. The processes on the nodes must have ended."""
        for node in range(self.nodes):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "del", self._port(node))
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(node))
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{self._name}b")

    def _space(self, node: int) -> str:
        return f"{self._name}-{node}"

    def _port(self, node: int) -> str:
        return f"{self._name}p{node}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def network_of(nodes: int) -> Iterator[NodeNetwork]:
    """A network, removed at the end."""
    made = NodeNetwork(nodes)
    try:
        made.open()
        yield made
    finally:
        made.close()
