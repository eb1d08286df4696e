"""Fake metadata services of the clouds on loopback, in the documented formats."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from holdfast.workers.agent.notices import aws, azure, gcp

TOKEN = "AQAEAB-the-token=="
GCP_WAIT_MAX_S = 60.0


@dataclass(frozen=True)
class RecordedRequest:
    """One request; `port` is the client's."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    port: int
    time: float


Reply = tuple[int, dict[str, str], bytes]


@dataclass
class MetadataServer:
    """Returns for each path a reply, or the result of a function of the request; else 404."""

    answers: dict[str, Reply | Callable[[RecordedRequest], Reply]] = field(default_factory=dict)
    asked: list[RecordedRequest] = field(default_factory=list)
    url: str = ""

    def paths(self) -> list[tuple[str, str]]:
        return [(one.method, one.path) for one in self.asked]

    def reply(self, asked: RecordedRequest) -> Reply:
        self.asked.append(asked)
        found = self.answers.get(f"{asked.method} {asked.path}", (404, {}, b"not found"))
        return found(asked) if callable(found) else found


S = TypeVar("S", bound=MetadataServer)


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Run the server on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            port = int(self.client_address[1])
            status, more, content = server.reply(
                RecordedRequest(self.command, parts.path, query, headers, body, port, time.time())
            )
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in more.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    server.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(10)


def text_reply(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return status, {"Content-Type": "text/plain", **(headers or {})}, text.encode()


def json_reply(document: Any) -> Reply:
    return 200, {"Content-Type": "application/json"}, json.dumps(document).encode()


class AwsService(MetadataServer):
    """IMDSv2: a token by PUT, and 404 until there is a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.token = TOKEN
        self.action: dict[str, Any] | None = None
        self.rebalance: dict[str, Any] | None = None
        self.answers = {
            f"PUT {aws.TOKEN}": self._give_token,
            f"GET {aws.ACTION}": lambda asked: self._say(asked, self.action),
            f"GET {aws.REBALANCE}": lambda asked: self._say(asked, self.rebalance),
        }

    def _give_token(self, asked: RecordedRequest) -> Reply:
        seconds = asked.headers.get(aws.TTL_HEADER.lower(), "")
        return text_reply(self.token) if seconds.isdecimal() else text_reply("", 400)

    def _say(self, asked: RecordedRequest, document: dict[str, Any] | None) -> Reply:
        if asked.headers.get(aws.TOKEN_HEADER.lower()) != self.token:
            return text_reply("Unauthorized", 401)
        return text_reply("Not Found", 404) if document is None else json_reply(document)


class GcpService(MetadataServer):
    """Values with an etag; a request may wait until the value changes."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._changed = threading.Condition()
        self.answers = {f"GET {gcp.INSTANCE}{entry}": self._say for entry in self.values}

    def change(self, entry: str, value: str) -> None:
        with self._changed:
            self.values[entry] = value
            self._changed.notify_all()

    def _say(self, asked: RecordedRequest) -> Reply:
        if asked.headers.get("metadata-flavor") != "Google":
            return text_reply("Missing Metadata-Flavor:Google header.", 403)
        entry = asked.path.rpartition("/")[2]
        known = asked.query.get("last_etag")
        if asked.query.get("wait_for_change") == "true":
            wait_s = min(float(asked.query.get("timeout_sec", GCP_WAIT_MAX_S)), GCP_WAIT_MAX_S)
            with self._changed:
                self._changed.wait_for(lambda: _etag(self.values[entry]) != known, wait_s)
        value = self.values[entry]
        return text_reply(value, headers={"Metadata-Flavor": "Google", "ETag": _etag(value)})


def _etag(value: str) -> str:
    return f"{sum(value.encode()):016x}"


class AzureService(MetadataServer):
    """Scheduled events of the scale set of machine `name`; `started` has acknowledged events.

    `is_hit` selects the clients that see the events; by default all do.
    """

    def __init__(self, name: str = "train_0") -> None:
        super().__init__()
        self.name = name
        self.events: list[dict[str, Any]] = []
        self.started: list[tuple[str, RecordedRequest]] = []
        self.is_hit: Callable[[RecordedRequest], bool] = lambda _: True
        path = urlsplit(azure.EVENTS).path
        self.answers = {
            f"GET {path}": self._tell,
            f"POST {path}": self._start,
            f"GET {urlsplit(azure.NAME).path}": lambda _: text_reply(self.name),
        }

    def preempt(self, event_id: str, *, name: str, lead_s: float = 60.0) -> None:
        until = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + lead_s))
        event = {
            "EventId": event_id,
            "EventStatus": "Scheduled",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [name],
            "NotBefore": until,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events = [*self.events, event]

    def _tell(self, asked: RecordedRequest) -> Reply:
        if asked.headers.get("metadata") != "true" or "api-version" not in asked.query:
            return text_reply("Bad request", 400)
        events = self.events if self.is_hit(asked) else []
        return json_reply({"DocumentLaunch": 1, "Events": events})

    def _start(self, asked: RecordedRequest) -> Reply:
        if asked.headers.get("metadata") != "true":
            return text_reply("Bad request", 400)
        for one in json.loads(asked.body)["StartRequests"]:
            self.started.append((one["EventId"], asked))
        return text_reply("")
