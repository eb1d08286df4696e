"""Authentication: a bearer token, or the browser session of a page that logged in with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Request, Security
from fastapi.security import APIKeyCookie, HTTPBearer

from holdfast.api.problems import Refusal
from holdfast.api.security import SAFE_METHODS
from holdfast.api.services import Services, services_of
from holdfast.api.sessions import COOKIE, CSRF_HEADER, same
from holdfast.api.tokens import Role, Token

LOG_IN = (
    "open the URL that `holdfast serve` printed, or send a token as `Authorization: Bearer "
    "hold_…`; `holdfast token add` creates one"
)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The authenticated caller of a request, as the audit log records it; `token` is an id."""

    name: str
    role: Role
    address: str
    token: str
    csrf: str | None = None


def identify(request: Request) -> Caller | None:
    """Return the caller, or None without credentials.

    Raises `Refusal` for a wrong token, and for a write without the session's CSRF token.
    """
    services = services_of(request)
    address = address_of(request)
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    # A token in the header needs no CSRF check: no page of another site can add that header.
    if kind.lower() == "bearer":
        token = try_token(services, text.strip(), address)
        return Caller(name=token.name, role=token.role, address=address, token=token.id)
    found = services.sessions.find(request.cookies.get(cookie_name(request), ""))
    if found is None:
        return None
    token, csrf = found
    _check_csrf(request, csrf)
    return Caller(name=token.name, role=token.role, address=address, token=token.id, csrf=csrf)


def _check_csrf(request: Request, csrf: str) -> None:
    if request.method not in SAFE_METHODS and not same(request.headers.get(CSRF_HEADER, ""), csrf):
        raise Refusal(
            403,
            f"{CSRF_HEADER} is missing or wrong; expected the session's CSRF token, which "
            "GET /api/v1/session returns as `csrf`",
        )


def address_of(request: Request) -> str:
    """Return the client's address; behind a trusted proxy, the one that the proxy reports."""
    # uvicorn has put the proxy's report here, and only from proxies that the operator trusts.
    return request.client.host if request.client else "unknown"


def cookie_name(request: Request) -> str:
    """Return the name of the session cookie.

    It contains the port, because browsers send a host's cookies to all of its ports.
    """
    server = request.scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


def try_token(services: Services, text: str, address: str) -> Token:
    """Return the token whose text is `text`. Raises `Refusal` if it is not valid.

    The login throttle applies to failures only: a valid token is always accepted.
    """
    # The check comes first, so that wrong tokens never lock a valid one out, see decision 40.
    token = services.tokens.check(text)
    if token is not None:
        return token
    wait_s = services.login_throttle.wait_s(address)
    if wait_s:
        raise Refusal(
            429,
            f"too many failed logins from {address}; wait {wait_s:.0f} s, or send a valid token",
            {"Retry-After": str(int(wait_s) + 1)},
        )
    services.login_throttle.failed(address)
    raise Refusal(
        401, f"this token is not valid on this server; {LOG_IN}", {"WWW-Authenticate": "Bearer"}
    )


# For the OpenAPI document. `identify` reads the credentials.
_BEARER: Final = HTTPBearer(
    scheme_name="token", description="A token of `holdfast token add`.", auto_error=False
)
_COOKIE: Final = APIKeyCookie(
    name=f"{COOKIE}_PORT",
    scheme_name="session",
    description="The session of the web UI. PORT is that of the server. Writes also need the "
    f"session's CSRF token in the header `{CSRF_HEADER}`.",
    auto_error=False,
)


def _at_least(role: Role) -> Callable[..., Caller]:
    def caller(
        request: Request,
        _token: Annotated[object, Security(_BEARER)],
        _session: Annotated[object, Security(_COOKIE)],
    ) -> Caller:
        found = identify(request)
        if found is None:
            raise Refusal(
                401, f"authentication is required; {LOG_IN}", {"WWW-Authenticate": "Bearer"}
            )
        if role is Role.OPERATOR and found.role is not Role.OPERATOR:
            raise Refusal(
                403, f"{found.name} has the role reader; this action needs an operator's token"
            )
        return found

    return caller


Operator = Annotated[Caller, Depends(_at_least(Role.OPERATOR))]
AS_READER: Any = Depends(_at_least(Role.READER))
