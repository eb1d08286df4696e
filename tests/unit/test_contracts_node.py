"""How processes exchange data: staging slots, packets with descriptors, and the channel."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.errors import AgreementError
from holdfast.contracts.node import channel, wire
from holdfast.contracts.node.channel import ChannelHost, ChannelMember
from holdfast.trainer.slots.slots import TABLE_BYTES, Slot, SlotState

JOIN_S = 30.0


# --- slots ------------------------------------------------------------------------------------


def test_a_slot_outlives_the_process_that_filled_it() -> None:
    handle = Slot.create(10_000)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            slot = Slot(handle)
            slot.begin(41)
            slot.data[:5] = b"bytes"
            slot.seal({"step": 41, "files": [{"path": "a", "offset": 0, "bytes": 5}]})
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    slot = Slot(handle)
    os.close(handle)
    assert (slot.state, slot.step) == (SlotState.SEALED, 41)
    (entry,) = slot.table["files"]
    assert bytes(slot.data[entry["offset"] : entry["offset"] + entry["bytes"]]) == b"bytes"
    assert len(slot.data) >= 10_000
    slot.close()


def test_a_reused_slot_is_not_sealed_until_it_is_filled_again() -> None:
    slot = Slot(Slot.create(1))
    assert slot.state is SlotState.EMPTY
    slot.begin(1)
    slot.seal({"a": 1})
    slot.begin(2)
    assert (slot.state, slot.step) == (SlotState.COPYING, 2)
    slot.seal({})
    assert (slot.state, slot.table) == (SlotState.SEALED, {})


def test_a_failed_slot_keeps_its_reason_of_any_length() -> None:
    slot = Slot(Slot.create(1))
    slot.fail("No space left on device")
    assert (slot.state, slot.error) == (SlotState.FAILED, "No space left on device")
    slot.fail("ß" * 5000)
    assert slot.error.startswith("ßßß")
    slot.begin(1)
    slot.seal({"whole": True})
    assert slot.table == {"whole": True}


def test_a_table_that_does_not_fit_is_refused_and_the_slot_stays_unsealed() -> None:
    slot = Slot(Slot.create(1))
    slot.begin(3)
    with pytest.raises(ValueError, match=f"expected at most {TABLE_BYTES}"):
        slot.seal({"files": "x" * TABLE_BYTES})
    assert slot.state is SlotState.COPYING


def test_memory_that_is_not_a_slot_is_refused() -> None:
    handle = os.memfd_create("other")
    os.write(handle, struct.pack("q", 12345) + bytes(2 * TABLE_BYTES))
    with pytest.raises(ValueError, match="not a staging slot of this version"):
        Slot(handle)
    os.close(handle)


# --- wire -------------------------------------------------------------------------------------


def test_a_packet_delivers_descriptors_that_the_receiver_owns() -> None:
    left, right = wire.pair()
    with left, right:
        handle = os.memfd_create("content")
        os.write(handle, b"hello")
        wire.send(left, "keep", descriptors=(handle,), rank=3)
        os.close(handle)
        received = wire.receive(right)
        assert received is not None
        message, (theirs,) = received
        assert message == {"kind": "keep", "rank": 3}
        assert os.pread(theirs, 10, 0) == b"hello"
        assert not os.get_inheritable(theirs)
        os.close(theirs)


def test_packets_keep_their_boundaries_and_order() -> None:
    left, right = wire.pair()
    with left, right:
        for number in range(20):
            wire.send(left, "sealed", step=number, filler="x" * number * 100)
        for number in range(20):
            received = wire.receive(right)
            assert received is not None
            assert received[0]["step"] == number


def test_a_closed_socket_returns_none_and_a_silent_one_times_out() -> None:
    left, right = wire.pair()
    with right:
        right.settimeout(0.05)
        with pytest.raises(TimeoutError):
            wire.receive(right)
        left.close()
        assert wire.receive(right) is None
        with pytest.raises(OSError, match="Broken pipe"):
            wire.send(right, "drain")


def test_a_message_that_is_too_long_is_refused_before_it_is_sent() -> None:
    left, right = wire.pair()
    with left, right:
        with pytest.raises(ValueError, match=f"expected at most {wire.MESSAGE_BYTES_MAX}"):
            wire.send(left, "sealed", filler="x" * wire.MESSAGE_BYTES_MAX)
        wire.send(left, "sealed", filler="x" * (wire.MESSAGE_BYTES_MAX - 100))
        assert wire.receive(right) is not None


def test_a_listener_is_found_by_its_address_file(tmp_path: Path) -> None:
    place = tmp_path / "address"
    with pytest.raises(FileNotFoundError):
        wire.connect(place, 1.0)
    with open(place, "wb") as address:
        with pytest.raises(ConnectionRefusedError, match="contains no socket name yet"):
            wire.connect(place, 1.0)
        wire.listen(address.fileno()).close()
        former = place.read_bytes()
        with pytest.raises(ConnectionRefusedError):
            wire.connect(place, 1.0)
        with wire.listen(address.fileno()) as listener, wire.connect(place, 1.0) as caller:
            assert place.read_bytes() != former
            assert wire.peer_of(caller) == (os.getpid(), os.geteuid())
            called, _ = listener.accept()
            with called:
                assert wire.is_same_user(called)
                wire.send(caller, "hello", rank=0)
                assert wire.receive(called) == ({"kind": "hello", "rank": 0}, ())


# --- channel ----------------------------------------------------------------------------------


def answer_with_echo(member: ChannelMember, count: int) -> None:
    for _ in range(count):
        question = member.receive(JOIN_S)
        assert question is not None
        member.reply(echo=question)


def test_every_node_joins_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=4)
    members = [ChannelMember(path, {"node": n, "host": f"h{n}"}) for n in (3, 1, 2)]
    threads = [threading.Thread(target=answer_with_echo, args=(m, 2)) for m in members]
    for thread in threads:
        thread.start()
    host.wait_for_peers(JOIN_S)
    assert {node: peer.hello["host"] for node, peer in host.peers.items()} == {
        1: "h1",
        2: "h2",
        3: "h3",
    }
    for node, peer in host.peers.items():
        assert peer.ask("first", dict, to=node).result(JOIN_S) == {
            "echo": {"kind": "first", "to": node}
        }
        assert peer.ask("second", dict).result(JOIN_S)["echo"]["kind"] == "second"
    for thread in threads:
        thread.join(JOIN_S)
    host.close()
    for member in members:
        with pytest.raises(ConnectionError, match="node 0 is gone"):
            member.receive(JOIN_S)
        member.close()


def test_only_the_user_can_read_the_channel_address(tmp_path: Path) -> None:
    host = ChannelHost(tmp_path / "channel.json", nodes=1)
    assert (tmp_path / "channel.json").stat().st_mode & 0o777 == 0o600
    host.wait_for_peers(0.0)
    host.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", host.port), timeout=5).close()


def rewrite(path: Path, **changes: Any) -> Path:
    other = path.with_name("other.json")
    other.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    return other


def test_a_wrong_token_is_refused_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2)
    with pytest.raises(AgreementError, match="could not join node 0"):
        ChannelMember(rewrite(path, token="00" * 32), {"node": 1}, timeout_s=0.5)
    assert host.peers == {}
    with pytest.raises(AgreementError, match=r"nodes \[1\] did not join"):
        host.wait_for_peers(0.1)
    host.close()


def test_a_host_that_does_not_know_the_token_is_refused(tmp_path: Path) -> None:
    impostor, genuine = ChannelHost(tmp_path / "a.json", 2), ChannelHost(tmp_path / "b.json", 2)
    path = rewrite(tmp_path / "b.json", port=impostor.port)
    with pytest.raises(AgreementError, match="could not join node 0"):
        ChannelMember(path, {"node": 1}, timeout_s=0.5)
    impostor.close()
    genuine.close()


def test_unknown_connections_neither_stop_nor_delay_the_host(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2)
    address = ("127.0.0.1", host.port)
    silent = [socket.create_connection(address, timeout=5) for _ in range(3)]
    for content in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64)):
        with socket.create_connection(address, timeout=5) as stranger:
            stranger.sendall(content)
            # A reset, as a port scanner leaves it.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    begun = time.monotonic()
    member = ChannelMember(path, {"node": 1}, timeout_s=JOIN_S)
    host.wait_for_peers(JOIN_S)
    assert time.monotonic() - begun < channel.HANDSHAKE_TIMEOUT_S
    member.close()
    host.close()
    for stranger in silent:
        stranger.close()


def test_a_member_waits_until_the_host_listens(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    hosts: list[ChannelHost] = []

    def start_late() -> None:
        time.sleep(0.3)
        hosts.append(ChannelHost(path, nodes=2))

    thread = threading.Thread(target=start_late)
    thread.start()
    member = ChannelMember(path, {"node": 1}, timeout_s=JOIN_S)
    thread.join()
    hosts[0].wait_for_peers(JOIN_S)
    assert member.receive(0.05) is None
    member.close()
    hosts[0].close()
    with pytest.raises(AgreementError, match="does not exist"):
        ChannelMember(tmp_path / "none.json", {"node": 1}, timeout_s=0.2)


def test_a_call_to_a_lost_node_raises(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=3)
    gone, silent = ChannelMember(path, {"node": 1}), ChannelMember(path, {"node": 2})
    host.wait_for_peers(JOIN_S)
    gone.close()
    for node in (1, 2):
        with pytest.raises(ConnectionError, match=f"node {node} is lost"):
            host.peers[node].ask("newest", dict, timeout_s=0.2).result(JOIN_S)
        assert host.peers[node].is_lost
    silent.close()
    host.close()


def test_a_second_agent_for_a_node_is_refused_while_the_first_is_connected(tmp_path: Path) -> None:
    path = tmp_path / "channel.json"
    host = ChannelHost(path, nodes=2)
    first = ChannelMember(path, {"node": 1, "pid": 7})
    host.wait_for_peers(JOIN_S)
    with pytest.raises(
        AgreementError, match=r"already joined with the agent .*'pid': 7.*refuses a second agent"
    ):
        ChannelMember(path, {"node": 1, "pid": 8})
    thread = threading.Thread(target=answer_with_echo, args=(first, 1))
    thread.start()
    assert host.peers[1].ask("report", dict).result(JOIN_S)["echo"]["kind"] == "report"
    thread.join(JOIN_S)
    first.close()
    # After a disconnect the node may join again, even before its next request.
    second = ChannelMember(path, {"node": 1, "pid": 9})
    assert host.peers[1].hello["pid"] == 9
    second.close()
    host.close()
