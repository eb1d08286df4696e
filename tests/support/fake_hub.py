"""A server with the HTTP interface of the Hugging Face Hub, for its own client on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "planted" * 5


@dataclass
class FakeHub:
    """The repositories of a hub: for each, its commits with all files, newest last."""

    url: str = ""
    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def files(self, repository: str, revision: str | None = None) -> dict[str, bytes]:
        """The files of a commit, by default of the newest one. Raises `KeyError` without it."""
        return self.at(repository, revision or "main")[1]

    def at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]]:
        history = self.commits[repository]
        if revision == "main":
            return history[-1]
        return next(iter(one for one in history if one[0] == revision))

    def commit(self, repository: str, changes: dict[str, bytes]) -> str:
        before = self.files(repository)
        found = {**before, **changes}
        text = repr(sorted((name, hashlib.sha1(one).hexdigest()) for name, one in found.items()))
        oid = hashlib.sha1(f"{len(self.commits[repository])}{text}".encode()).hexdigest()
        self.commits[repository].append((oid, found))
        return oid


def environment_of(hub: FakeHub, home: Path) -> dict[str, str]:
    """The variables with which the Hub's client uses this server, with its cache in `home`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve a hub until the block ends."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._get()

    def do_GET(self) -> None:
        self._get()

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        self.hub.blobs[oid] = self._body()
        self._answer(200, {})

    def do_POST(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        self.hub.asked.append(f"POST {path}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid user token."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer(200, {"transfer": "basic", "objects": self._uploads(json.loads(body))})
        elif "/preupload/" in path:
            self._answer(200, {"files": self._modes(json.loads(body))})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer(200, {})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        known = self.hub.commits.setdefault(name, [("0" * 40, {})])
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._answer(200 if len(known) == 1 else 409, {"url": f"{self.hub.url}/{name}", "id": name})

    def _modes(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for one in asked["files"]
        ]

    def _uploads(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
            for one in asked["objects"]
        ]

    def _commit(self, repository: str, body: bytes) -> None:
        changes: dict[str, bytes] = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.hub.blobs[value["oid"]]
        oid = self.hub.commit(repository, changes)
        url = f"{self.hub.url}/{repository}/commit/{oid}"
        self._answer(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        try:
            if "/resolve/" in path:
                self._file(*path[1:].split("/resolve/"))
            else:
                self._facts(path.removeprefix("/api/models/"))
        except (KeyError, StopIteration):
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def _facts(self, path: str) -> None:
        repository, _, rest = path.partition("/revision/")
        repository, is_tree, of = repository.partition("/tree/")
        oid, files = self.hub.at(repository, rest or of or "main")
        if is_tree:
            found = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(one),
                    "oid": hashlib.sha1(one).hexdigest(),
                }
                for name, one in files.items()
            ]
            self._answer(200, found)
            return
        siblings = [{"rfilename": name} for name in files]
        self._answer(200, {"id": repository, "sha": oid, "siblings": siblings, "private": False})

    def _file(self, repository: str, rest: str) -> None:
        revision, _, name = rest.partition("/")
        oid, files = self.hub.at(repository, revision)
        content = files[name]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": oid,
            "Content-Type": "application/octet-stream",
        }
        self._send(200, content, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(
            status,
            json.dumps(value).encode(),
            {**(headers or {}), "Content-Type": "application/json"},
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
