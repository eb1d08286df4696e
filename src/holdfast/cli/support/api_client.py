"""A small client of the REST API of `holdfast serve`, with the caller's token."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from holdfast.contracts.errors import ServiceError, SpecError
from holdfast.contracts.version import holdfast_version

PREFIX: Final = "/api/v1"
TIMEOUT_S: Final = 60.0
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
# A part of a path is one name: it must not lead to another operation.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
# What a status means for the caller of a tool, before the server's own message.
_REFUSED: Final = {
    401: "the server does not accept the token; give a valid one in HOLDFAST_TOKEN or --token-file",
    403: "the token may not do this; ask for an operator's token, or for the role",
    404: "there is no such thing, or the token's account may not see it",
    409: "another request is pending, or the state of the run forbids this",
    429: "too many requests; wait, then repeat",
}


def is_token(text: str) -> bool:
    """Return True for a text that a header can have: one word of ASCII characters."""
    return re.fullmatch(r"[\x21-\x7e]{1,200}", text) is not None


@dataclass(frozen=True)
class Answer:
    """The status of a response and its JSON, or its text if it is none."""

    status: int
    content: Any

    @property
    def is_refusal(self) -> bool:
        return not 200 <= self.status < 300

    @property
    def problem(self) -> str:
        """What the refusal means, with the server's message."""
        said = self.content.get("message") if isinstance(self.content, Mapping) else self.content
        meaning = _REFUSED.get(self.status, "the server refused the request")
        return f"{self.status}: {meaning}. The server says: {said}"


def server_parts(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises `SpecError` for anything else."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # A port that is not a number, or brackets without an IPv6 address.
        usable = None
    if not usable or parts.username:
        raise SpecError(f"{url!r}: expected the address of a server, such as https://runs.lab")
    return parts


class ApiClient:
    """Sends requests to one server. Redirects are not followed: they could take the token away."""

    def __init__(self, url: str, token: str) -> None:
        """Raises `SpecError` for what is no HTTP address or no token."""
        parts = server_parts(url)
        if not is_token(token):
            raise SpecError(
                "the token has blanks or control characters, or more than 200; give one"
            )
        self.url = url.rstrip("/")
        self._parts, self._path = parts, parts.path.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "User-Agent": f"holdfast/{holdfast_version()}",
        }

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Answer:
        """Return the answer to a GET. Raises `ServiceError` if there is none."""
        asked = urlencode(_texts(query or {}), doseq=True)
        return self._send("GET", f"{PREFIX}{path}{'?' if asked else ''}{asked}", None)

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a POST with a JSON body. Raises `ServiceError` if there is none."""
        return self._send("POST", f"{PREFIX}{path}", json.dumps(body).encode())

    def _send(self, method: str, path: str, body: bytes | None) -> Answer:
        host, port = self._parts.hostname or "", self._parts.port
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection: http.client.HTTPConnection
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        try:
            connection.request(method, f"{self._path}{path}", body, headers)
            response = connection.getresponse()
            content = response.read(ANSWER_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(
                f"{self.url} does not answer: {error}; start `holdfast serve`, or give its address "
                "with --url"
            ) from error
        finally:
            connection.close()
        if len(content) > ANSWER_BYTES_MAX:
            raise ServiceError(
                f"{self.url}: an answer of more than {ANSWER_BYTES_MAX} bytes; ask for less"
            )
        return Answer(response.status, _parsed(content))


def path_of(template: str, values: Mapping[str, Any]) -> str:
    """Return a path of the API with `{names}` replaced. Raises `SpecError` for a value of none."""

    def replace(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise SpecError(f"{found[1]} is missing; expected a name or a number")
        text = str(values[found[1]])
        if not _NAME.fullmatch(text):
            raise SpecError(f"{found[1]}={text!r}: expected a name without slashes or blanks")
        return quote(text, safe="")

    return re.sub(r"\{(\w+)\}", replace, template)


def _texts(query: Mapping[str, Any]) -> dict[str, Any]:
    """Return a query as the API reads it: booleans in lower case, nothing for null."""

    def text(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [text(one) for one in value]
        return str(value).lower() if isinstance(value, bool) else value

    return {key: text(value) for key, value in query.items() if value is not None}


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")[:2000]
