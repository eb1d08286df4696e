"""Who asks: the holder of a token, or a page that logged in with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

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
    """Who asks, as the records will show it; `token` is the token's id."""

    name: str
    role: Role
    address: str
    token: str
    csrf: str | None = None


def identify(request: Request) -> Caller | None:
    """Who asks, or None for a stranger. Raises `Refusal` for a wrong token, or a forged change."""
    services = services_of(request)
    address = address_of(request)
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        token = try_token(services, text.strip(), address)
        return Caller(name=token.name, role=token.role, address=address, token=token.id)
    found = services.sessions.find(request.cookies.get(cookie_name(request), ""))
    if found is None:
        return None
    token, csrf = found
    if request.method not in SAFE_METHODS and not same(request.headers.get(CSRF_HEADER, ""), csrf):
        raise Refusal(403, f"{CSRF_HEADER}: not the session's; GET /api/v1/session tells it")
    return Caller(name=token.name, role=token.role, address=address, token=token.id, csrf=csrf)


def address_of(request: Request) -> str:
    """The client's address; behind a trusted proxy, the one that the proxy names."""
    return request.client.host if request.client else "unknown"


def cookie_name(request: Request) -> str:
    """The session's cookie. Browsers send a host's cookies to all of its ports."""
    server = request.scope.get("server")
    return f"{COOKIE}_{server[1]}" if server else COOKIE


def try_token(services: Services, text: str, address: str) -> Token:
    """The token that `text` is. Raises `Refusal` when it is none.

    Only failures are limited: a valid token passes however often its address has failed.
    """
    token = services.tokens.check(text)
    if token is not None:
        return token
    wait_s = services.login_throttle.wait_s(address)
    if wait_s:
        raise Refusal(
            429,
            f"too many wrong tokens from {address}; wait {wait_s:.0f} s, or send a valid token",
            {"Retry-After": str(int(wait_s) + 1)},
        )
    services.login_throttle.failed(address)
    raise Refusal(401, f"not a token of this server; {LOG_IN}", {"WWW-Authenticate": "Bearer"})


def _at_least(role: Role) -> Callable[[Request], Caller]:
    def caller(request: Request) -> Caller:
        found = identify(request)
        if found is None:
            raise Refusal(401, LOG_IN, {"WWW-Authenticate": "Bearer"})
        if role is Role.OPERATOR and found.role is not Role.OPERATOR:
            raise Refusal(403, f"{found.name} may read only; this needs a token of an operator")
        return found

    return caller


Operator = Annotated[Caller, Depends(_at_least(Role.OPERATOR))]
AS_READER: Any = Depends(_at_least(Role.READER))
