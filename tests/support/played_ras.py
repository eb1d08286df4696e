"""Plays the RAS thread of a process with NCCL. The messages are those of NCCL's own RAS.

Arguments: a port, a file with the answer, and what to do with clients: `answer`, or `silent`, or
`endless`, or `slow`, or `foreign`, or `better`: later answers are in a second file. As new NCCL,
it knows `set format json` if the answer is JSON.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from pathlib import Path

PROTOCOL = 2


def listen(port: int) -> socket.socket:
    """Listen as NCCL does: all processes of a node share the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def serve(client: socket.socket, answer: bytes, way: str) -> None:
    """Answer one client. NCCL ends the connection after the status."""
    if way == "foreign":
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return
    with client.makefile("rb") as lines:
        for line in lines:
            command = line.decode().rstrip("\r\n").lower()
            known = ["timeout ", *(["set format json"] if answer.startswith(b"{") else [])]
            if command.startswith("client protocol "):
                client.sendall(f"SERVER PROTOCOL {PROTOCOL}\n".encode())
            elif command.startswith(tuple(known)):
                client.sendall(b"OK\n")
            elif command in {"status", "verbose status"}:
                send(client, answer, way)
                return
            else:
                client.sendall(f"ERROR: Unknown command {command}\n".encode())


def send(client: socket.socket, answer: bytes, way: str) -> None:
    while way == "endless":
        client.sendall(answer)
    for byte in answer if way == "slow" else b"":
        client.sendall(bytes([byte]))
        time.sleep(0.1)
    client.sendall(answer)


def play(listener: socket.socket, path: Path, way: str) -> None:
    """Serve one client after the other."""
    while True:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            while way == "silent":
                time.sleep(1.0)
            serve(client, path.read_bytes(), way)
            path = path.with_suffix(".better") if way == "better" else path


def main() -> None:
    port, path, way = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    listener = listen(port)
    print(flush=True)
    play(listener, path, way)


if __name__ == "__main__":
    main()
