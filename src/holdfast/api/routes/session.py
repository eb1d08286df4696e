"""Routes for browser sessions: log in, log out, and show the current caller."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from holdfast.api.access import Caller, address_of, cookie_name, identify, try_token
from holdfast.api.problems import Refusal
from holdfast.api.schemas import LogIn, Session
from holdfast.api.services import services_of
from holdfast.api.sessions import SESSION_S_MAX
from holdfast.contracts.version import holdfast_version

router = APIRouter(prefix="/session", tags=["session"])


@router.get("")
def show_session(request: Request) -> Session:
    """Return the current caller. Without valid credentials, only the version is set."""
    return _session(identify(request))


@router.post("")
def log_in(request: Request, response: Response, body: LogIn) -> Session:
    """Log in with a token and start a browser session."""
    return _session(begin_session(request, response, body.token))


@router.delete("", status_code=204)
def log_out(request: Request, response: Response) -> None:
    """Log out. Without a session, this does nothing."""
    caller = identify(request)
    name = cookie_name(request)
    services_of(request).sessions.close(request.cookies.get(name, ""))
    response.delete_cookie(name, path=prefix_of(request) or "/", samesite="strict")
    if caller is not None and caller.csrf is not None:
        audit = services_of(request).session_audit
        audit.record("log out", caller.address, outcome="done", by=caller.name)


def begin_session(request: Request, response: Response, text: str) -> Caller:
    """Start a session with the token `text` and set its cookie. Raises `Refusal` if it is wrong."""
    services, address = services_of(request), address_of(request)
    try:
        token = try_token(services, text, address)
    except Refusal as refusal:
        services.session_audit.refused(address, refusal.status)
        raise
    session, csrf = services.sessions.open(token)
    response.set_cookie(
        cookie_name(request),
        session,
        max_age=int(SESSION_S_MAX),
        httponly=True,
        secure=request.url.scheme == "https",
        samesite="strict",
        path=prefix_of(request) or "/",
    )
    services.session_audit.record("log in", address, outcome="done", by=token.name, token=token.id)
    return Caller(name=token.name, role=token.role, address=address, token=token.id, csrf=csrf)


def prefix_of(request: Request) -> str:
    """Return the server's path below its proxy, without a slash at the end; empty without one."""
    return str(request.scope.get("root_path", ""))


def _session(caller: Caller | None) -> Session:
    return Session(
        name=caller.name if caller else None,
        role=caller.role if caller else None,
        csrf=caller.csrf if caller else None,
        version=holdfast_version(),
    )
