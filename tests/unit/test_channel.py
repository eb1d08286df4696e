"""The channel between nodes when nodes are late, silent, unknown or suspended."""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import channel, handshake
from holdfast.contracts.node.channel import (
    ChannelHost,
    ChannelMember,
    DismissedError,
    NodeConnection,
    Peer,
    SilentError,
    Switchboard,
)
from holdfast.contracts.node.clocks import Timeout
from holdfast.contracts.node.handshake import SILENT_S, LineSocket, Proof, listen
from holdfast.contracts.node.rank_status import Proposal
from holdfast.workers.agent.member import run_member
from holdfast.workers.agent.node import NodeReport
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.agent.stops.signals import SignalBox

JOIN_S = 30.0


@contextlib.contextmanager
def joined(folder: Path, **hello: Any) -> Iterator[tuple[Peer, ChannelMember]]:
    """Both ends of a connection between node 0 and node 1."""
    host = ChannelHost(folder / "channel.json", nodes=2)
    member = ChannelMember(folder / "channel.json", {"node": 1, **hello})
    host.wait_for_peers(JOIN_S)
    try:
        yield host.peers[1], member
    finally:
        member.close()
        host.close()


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_reply_to_another_request_is_dropped(tmp_path: Path) -> None:
    with joined(tmp_path) as (peer, member):

        def answer() -> None:
            assert member.receive(JOIN_S) is not None
            # A late or repeated reply does not answer the next request.
            for number in (0, 7, None):
                member._line.send({"answers": number, "accepted": False})
            member.reply(accepted=True)

        thread = in_thread(answer)
        assert peer.propose(serial=1, step=5).result(JOIN_S) is True
        thread.join(JOIN_S)


def test_a_node_that_replies_too_late_is_dismissed_and_not_asked_again(tmp_path: Path) -> None:
    with joined(tmp_path) as (peer, member):
        with pytest.raises(SilentError, match="no answer to propose within 0 s"):
            peer.ask("propose", dict, timeout_s=0.2, serial=1, step=5).result(JOIN_S)
        assert peer.is_lost
        question = member.receive(JOIN_S)
        assert question == {"kind": "propose", "serial": 1, "step": 5}
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="node 1 is lost"):
            peer.answer(1, Proposal.ABORT).result(JOIN_S)
        assert time.monotonic() - began < 1.0, "the call waited for the lost node again"
        with contextlib.suppress(ConnectionError):
            member.reply(accepted=True)
        with pytest.raises(DismissedError, match="dismissed this node"):
            member.receive(JOIN_S)


def test_a_node_that_closes_its_connection_is_not_silent(tmp_path: Path) -> None:
    with joined(tmp_path) as (peer, member):
        member.close()
        with pytest.raises(ConnectionError, match="node 1 is lost") as raised:
            peer.ask("report", dict, timeout_s=JOIN_S).result(JOIN_S)
        assert not isinstance(raised.value, SilentError)


def test_the_kernel_ends_a_connection_on_which_nothing_arrives(tmp_path: Path) -> None:
    """Probes alone do not: a connection on which data waits for an answer sends none."""
    with joined(tmp_path) as (peer, member):
        transport = peer._connection._transport
        for one in (member._line._socket, transport.get_extra_info("socket")):
            limit_ms = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_ms == 1000 * SILENT_S
        peer._connection.connection_lost(OSError(errno.EHOSTUNREACH, "no route to host"))
        with pytest.raises(SilentError, match="no route to host"):
            peer.ask("report", dict, timeout_s=JOIN_S).result(JOIN_S)


def test_an_incomplete_message_does_not_extend_the_timeout(tmp_path: Path) -> None:
    with joined(tmp_path) as (peer, member):
        member._line._socket.sendall(struct.pack(">I", 100) + b'{"answers": 1')
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="no answer to report"):
            peer.ask("report", dict, timeout_s=0.3).result(JOIN_S)
        assert time.monotonic() - began < JOIN_S / 3


def test_a_node_that_sends_an_oversized_message_is_lost(tmp_path: Path) -> None:
    with joined(tmp_path) as (peer, member):
        member._line._socket.sendall(struct.pack(">I", 2**32 - 1))
        with pytest.raises(ConnectionError, match="a message of 4294967295 bytes"):
            peer.ask("report", dict, timeout_s=JOIN_S).result(JOIN_S)


def test_connections_that_send_one_byte_do_not_block_a_node(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2)
    strangers = []
    try:
        for _ in range(channel.HANDSHAKES_MAX + 10):
            stranger = socket.create_connection(("127.0.0.1", host.port), timeout=JOIN_S)
            stranger.sendall(b"\0")
            strangers.append(stranger)
        began = time.monotonic()
        member = ChannelMember(path, {"node": 1}, timeout_s=JOIN_S)
        host.wait_for_peers(JOIN_S)
        assert time.monotonic() - began < channel.HANDSHAKE_TIMEOUT_S / 2
        member.close()
    finally:
        for stranger in strangers:
            stranger.close()
        host.close()


def test_a_slow_handshake_ends_at_one_overall_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.5)
    host = ChannelHost(tmp_path / "channel.json", nodes=2)
    began = time.monotonic()
    stranger = socket.create_connection(("127.0.0.1", host.port), timeout=JOIN_S)
    with stranger, contextlib.suppress(OSError):
        stranger.sendall(struct.pack(">I", 60_000))
        while time.monotonic() - began < JOIN_S:
            stranger.sendall(b" ")
            time.sleep(0.05)
    assert 0.4 < time.monotonic() - began < JOIN_S / 3
    host.close()


def test_the_host_listens_on_a_port_in_the_given_range(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2, ports=range(free, free + 1))
    assert host.port == free
    with pytest.raises(
        AgreementError, match=f"no free port to listen on .* tried {free} to {free}"
    ):
        ChannelHost(tmp_path / "other.json", nodes=2, ports=range(free, free + 1))
    # It listens on each of its addresses, IPv4 and IPv6.
    for address in (*json.loads(path.read_bytes())["addresses"], "127.0.0.1"):
        socket.create_connection((address, free), timeout=JOIN_S).close()
    host.close()


def test_an_address_file_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ChannelHost(tmp_path / "channel.json", nodes=2)
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    (tmp_path / "channel.json").chmod(0o644)
    monkeypatch.setattr(handshake, "TRUSTED_USERS", frozenset())
    with pytest.raises(AgreementError, match="expected 4711"):
        ChannelMember(tmp_path / "channel.json", {"node": 1}, timeout_s=0.3)
    host.close()


class IdleNode:
    """A node without ranks."""

    def report(self) -> NodeReport:
        return NodeReport(exit_code=None, phases=(), registered=0, alive=0, completed=0, resumed=0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds added to the monotonic clock; a large jump simulates a suspension."""
    ahead = [0.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    return ahead


def test_a_timeout_does_not_run_while_the_process_is_suspended(clock: list[float]) -> None:
    timeout = Timeout(10.0)
    clock[0] += 3600.0
    assert 7.0 < timeout.left_s <= 10.0
    for _ in range(8):
        clock[0] += 1.0
        assert not timeout.is_over or clock[0] > 3607.0
    assert timeout.is_over
    timeout.restart()
    assert timeout.left_s > 9.0


def test_a_member_suspended_together_with_node_0_continues(
    tmp_path: Path, clock: list[float]
) -> None:
    errors: list[str] = []
    with joined(tmp_path) as (peer, member):

        def run_as_member() -> None:
            try:
                run_member(cast(NodeRuntime, IdleNode()), member, SignalBox(), 3.0)
            except ConnectionError as error:
                errors.append(str(error))

        thread = in_thread(run_as_member)
        time.sleep(0.2)
        clock[0] += 3600.0
        time.sleep(0.3)
        assert thread.is_alive(), errors
        assert not peer.is_lost
        # The silence of node 0 counts from when both can run again.
        thread.join(JOIN_S)
    assert errors == ["node 0 sent nothing for 3 s"]


def test_a_member_joins_although_node_0_first_closes_its_connection(tmp_path: Path) -> None:
    token, path = secrets.token_bytes(32), tmp_path / "channel.json"
    admitted: list[dict[str, Any]] = []
    refusals = [ConnectionError("too many callers")]

    def admit(connection: NodeConnection, hello: dict[str, Any]) -> None:
        if refusals:
            raise refusals.pop()
        admitted.append(hello)
        connection.send({"refused": None})

    listener = listen(None, backlog=4)
    port = listener.getsockname()[1]
    document = {"addresses": ["127.0.0.1"], "port": port, "token": token.hex()}
    path.write_text(json.dumps(document))
    switchboard = Switchboard(listener, 4, token, admit, lambda _, __: None)
    switchboard.start()
    member = ChannelMember(path, {"node": 1}, timeout_s=JOIN_S)
    assert (admitted, refusals) == ([{"node": 1}], [])
    member.close()
    switchboard.close()


def test_a_node_that_calls_before_the_host_is_complete_waits_for_it(tmp_path: Path) -> None:
    admitted = threading.Event()
    listener = listen(None, backlog=4)
    token = secrets.token_bytes(32)
    switchboard = Switchboard(listener, 4, token, lambda *_: admitted.set(), lambda _, __: None)
    with socket.create_connection(listener.getsockname()[:2], timeout=JOIN_S) as caller:
        line, proof = LineSocket(caller), Proof(token, is_host=False)
        line.send(proof.opening)
        assert line.receive(Timeout(0.2)) is None
        switchboard.start()
        opening = line.receive(Timeout(JOIN_S))
        assert opening is not None
        line.send(proof.answer(opening))
        line.send({"node": 1})
        assert admitted.wait(JOIN_S)
        line.close()
    switchboard.close()
