"""`launch.network_interface`: addresses, variables, and nodes that lack the interface."""

from __future__ import annotations

import json
import socket
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.errors import InterfaceError
from holdfast.contracts.node.channel import ChannelHost, ChannelMember
from holdfast.workers.agent.health.interface import addresses_of
from holdfast.workers.agent.launch.command import build_environment
from holdfast.workers.runs.request import build_request

Address = namedtuple("Address", "family address")
V4, V6, LINK = socket.AF_INET, socket.AF_INET6, psutil.AF_LINK
NODE = {
    "lo": [Address(V4, "127.0.0.1")],
    "ib0": [
        Address(LINK, "80:00:02"),
        Address(V6, "fe80::1%ib0"),
        Address(V6, "fd00::7"),
        Address(V4, "10.0.0.7"),
    ],
    "eth1": [Address(V4, "192.168.0.7")],
    "ib1": [Address(V6, "fe80::2%ib1")],
}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with an InfiniBand interface, one that is down, and one without a usable address."""
    states = {name: SimpleNamespace(isup=name != "eth1") for name in NODE}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: NODE)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.mark.usefixtures("node")
def test_ipv4_comes_first_and_link_local_addresses_are_left_out() -> None:
    assert addresses_of("ib0", "n1") == ["10.0.0.7", "fd00::7"]


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("ib7", r"node n1: .*'ib7': the node has no such interface; it has eth1, ib0, ib1, lo$"),
        ("eth1", r"node n1: .*'eth1' is down; these interfaces of the node are up: ib0, ib1, lo$"),
        ("ib1", r"node n1: .*'ib1' has no IPv4 address and no global IPv6 address"),
    ],
)
def test_a_node_without_the_interface_is_an_error_with_those_that_it_has(
    interface: str, message: str
) -> None:
    with pytest.raises(InterfaceError, match=message):
        addresses_of(interface, "n1")


def test_this_machine_has_a_loopback_interface() -> None:
    assert addresses_of("lo", "here")[0] == "127.0.0.1"


def test_other_nodes_call_node_0_at_the_addresses_of_the_interface(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2, addresses=addresses_of("lo", "here"))
    try:
        assert json.loads(path.read_text())["addresses"][0] == "127.0.0.1"
        member = ChannelMember(path, {"node": 1, "host": "n1"}, timeout_s=20)
        assert member.host_address in addresses_of("lo", "here")
        member.close()
    finally:
        host.close()


def environment_of(given: dict[str, str], inherited: dict[str, str], **launch: Any) -> Any:
    spec = spec_of(launch=launch)
    request = build_request(record_of(spec), spec, attempt=1, gpus=spec.gpus, reason="test")
    run = SimpleNamespace(directory=Path("/r"))
    context: Any = SimpleNamespace(request=request, run=run, node=0, nodes=2)
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    return build_environment(context, 1, handles, inherited, given)


def test_nccl_and_gloo_get_exactly_the_interface() -> None:
    site = {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth1"}
    built = environment_of({}, site, network_interface="ib0")
    assert (built["NCCL_SOCKET_IFNAME"], built["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")
    own = environment_of({"NCCL_SOCKET_IFNAME": "ib"}, site, network_interface="ib0")
    assert (own["NCCL_SOCKET_IFNAME"], own["GLOO_SOCKET_IFNAME"]) == ("ib", "ib0")
    kept = environment_of({}, site)
    assert kept["GLOO_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize("name", ["", "a b", "ib0;x", "-ib0", "sixteen-letters-"])
def test_names_that_no_interface_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="network_interface"):
        spec_of(launch={"network_interface": name})
