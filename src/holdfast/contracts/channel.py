"""The channel between the nodes of one attempt: node 0 listens, the others call.

Standard library only (`multiprocessing.connection`, authenticated by a random token), JSON in
its byte messages and never pickles. Address and token lie in the attempt's folder, readable by
the run's user alone.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.board import NOWHERE, Board, Proposal
from holdfast.contracts.durable import to_json, write_bytes
from holdfast.contracts.errors import AgreementError

CALL_TIMEOUT_S: Final = 30.0
JOIN_TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.1


class ChannelHost:
    """Node 0's end: accepts the other nodes and asks them things, one question at a time."""

    def __init__(self, path: Path, nodes: int) -> None:
        self._token = secrets.token_bytes(32)
        self._listener = Listener(("0.0.0.0", 0), backlog=max(nodes, 16), authkey=self._token)
        self.port = int(self._listener.address[1])
        self.nodes = nodes
        self.peers: dict[int, Peer] = {}
        document = {
            "addresses": _own_addresses(),
            "port": self.port,
            "token": self._token.hex(),
        }
        write_bytes(path, to_json(document), mode=0o600)
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def wait_for_peers(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """Wait until every other node has called; raises `AgreementError` naming those missing."""
        give_up = time.monotonic() + timeout_s
        while len(self.peers) < self.nodes - 1:
            if time.monotonic() > give_up:
                missing = sorted(set(range(1, self.nodes)) - set(self.peers))
                raise AgreementError(
                    f"nodes {missing} did not join within {timeout_s:.0f} s; expected all "
                    f"{self.nodes}. Is the run's root shared, and can nodes reach port {self.port}?"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Hang up on everybody; the others take it as the end."""
        self._listener.close()
        for peer in list(self.peers.values()):
            peer.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                if not connection.poll(CALL_TIMEOUT_S):
                    connection.close()
                    continue
                hello = json.loads(connection.recv_bytes())
            except OSError:
                return
            except Exception:
                # Whatever a stranger sends must not end the thread that others wait for.
                time.sleep(POLL_S)
                continue
            self.peers[int(hello["node"])] = Peer(connection, hello)


class Peer:
    """Another node, as node 0 sees it. Also a `NodePort` of the stop agreement."""

    def __init__(self, connection: Connection, hello: dict[str, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.hello = hello
        self.is_lost = False

    def call(self, kind: str, *, timeout_s: float = CALL_TIMEOUT_S, **data: Any) -> dict[str, Any]:
        """Ask the node and wait for its answer; raises `ConnectionError` when it is lost."""
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps({"kind": kind, **data}).encode())
                if not self._connection.poll(timeout_s):
                    raise ConnectionError(f"no answer to {kind} within {timeout_s:.0f} s")
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                self.is_lost = True
                raise ConnectionError(f"node {self.hello['node']} is lost: {error}") from error
        return answer

    def newest_entered(self) -> int:
        return int(self.call("newest")["step"])

    def propose(self, serial: int, step: int) -> bool:
        return bool(self.call("propose", serial=serial, step=step)["accepted"])

    def answer(self, serial: int, state: Proposal) -> None:
        self.call("answer", serial=serial, state=int(state))

    def close(self) -> None:
        self._connection.close()


class ChannelMember:
    """Another node's end: calls node 0 and answers its questions from `handlers`."""

    def __init__(
        self, path: Path, hello: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S
    ) -> None:
        self._connection, self.host_address = _dial(path, timeout_s)
        self._connection.send_bytes(json.dumps(hello).encode())

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Node 0's next question, or None when none came; `ConnectionError` when it is gone."""
        try:
            if not self._connection.poll(timeout_s):
                return None
            question: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise ConnectionError(f"node 0 is gone: {error}") from error
        return question

    def reply(self, **data: Any) -> None:
        """Answer the question received last."""
        self._connection.send_bytes(json.dumps(data).encode())

    def close(self) -> None:
        self._connection.close()


def answer_for_board(board: Board, question: dict[str, Any]) -> dict[str, Any] | None:
    """A member's answer to the questions of the stop agreement; None for any other question."""
    kind = question["kind"]
    if kind == "newest":
        return {"step": board.newest_entered, "signal": board.signals}
    if kind == "propose":
        board.propose(question["serial"], question["step"])
        return {"accepted": board.accepts(question["serial"], question["step"])}
    if kind == "answer":
        board.answer(question["serial"], Proposal(question["state"]))
        return {}
    if kind == "announce":
        board.announce_stop(question.get("deadline"))
        return {"step": NOWHERE}
    return None


def _own_addresses() -> list[str]:
    """Names and addresses under which another node may reach this one, best first."""
    name = socket.gethostname()
    found = [name]
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError:
        found.append("127.0.0.1")
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(path: Path, timeout_s: float) -> tuple[Connection, str]:
    give_up = time.monotonic() + timeout_s
    problem = f"{path} was not there"
    while time.monotonic() < give_up:
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            time.sleep(POLL_S)
            continue
        for address in document["addresses"]:
            try:
                token = bytes.fromhex(document["token"])
                return Client((address, document["port"]), authkey=token), address
            except Exception as error:
                # Refused, unresolvable, or another attempt's listener on a port used again.
                problem = f"{address}:{document['port']}: {error}"
        time.sleep(POLL_S)
    raise AgreementError(f"could not join node 0 within {timeout_s:.0f} s; last seen: {problem}")
