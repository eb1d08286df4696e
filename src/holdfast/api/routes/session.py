"""Logging in and out from a page, and who one is."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from holdfast import __version__
from holdfast.api.access import Caller, identify, try_token
from holdfast.api.audit import audit_session
from holdfast.api.problems import Refusal
from holdfast.api.schemas import LogIn, Session
from holdfast.api.services import services_of
from holdfast.api.sessions import COOKIE, CSRF_COOKIE, SESSION_S_MAX

router = APIRouter(prefix="/session", tags=["session"])


@router.get("")
def show_session(request: Request) -> Session:
    """Who asks; a stranger learns whether a token is needed."""
    return _session(request, identify(request))


@router.post("")
def log_in(request: Request, response: Response, body: LogIn) -> Session:
    """Begin a session with a token."""
    services = services_of(request)
    if not services.exposure.needs_token:
        return _session(request, identify(request))
    address = request.client.host if request.client else "unknown"
    try:
        token = try_token(services, body.token, address)
    except Refusal as refusal:
        audit_session("log in", address, outcome=f"refused: {refusal.status}")
        raise
    text, csrf = services.sessions.open(token)
    is_secure = request.url.scheme == "https"
    # The page's own script reads the word and sends it back; the session itself it cannot read.
    for name, value, hidden in ((COOKIE, text, True), (CSRF_COOKIE, csrf, False)):
        response.set_cookie(
            name,
            value,
            max_age=int(SESSION_S_MAX),
            httponly=hidden,
            secure=is_secure,
            samesite="strict",
        )
    audit_session("log in", address, outcome="done", by=token.name, token=token.id)
    caller = Caller(name=token.name, role=token.role, address=address, token=token.id, csrf=csrf)
    return _session(request, caller)


@router.delete("", status_code=204)
def log_out(request: Request, response: Response) -> None:
    """End the session; harmless when there is none."""
    caller = identify(request)
    services_of(request).sessions.close(request.cookies.get(COOKIE, ""))
    for name in (COOKIE, CSRF_COOKIE):
        response.delete_cookie(name, samesite="strict")
    if caller is not None and caller.csrf is not None:
        audit_session("log out", caller.address, outcome="done", by=caller.name)


def _session(request: Request, caller: Caller | None) -> Session:
    return Session(
        login_required=services_of(request).exposure.needs_token,
        name=caller.name if caller else None,
        role=caller.role if caller else None,
        csrf=caller.csrf if caller else None,
        version=__version__,
    )
