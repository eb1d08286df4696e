"""Error responses of the API: an HTTP status, a code for programs and a message for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from holdfast.contracts import errors

LOG: Final = logging.getLogger("holdfast.api")
PROBLEMS_MAX: Final = 50

# (error class, HTTP status, code). The first class that matches is used.
_STATUS: Final[Sequence[tuple[type[Exception], int, str]]] = (
    (errors.NotFoundError, 404, "not_found"),
    (errors.RequestConflictError, 409, "conflict"),
    (errors.OrdersChangedError, 409, "conflict"),
    (errors.RunConflictError, 409, "conflict"),
    (errors.SpecError, 422, "invalid"),
    (errors.QueryError, 422, "invalid"),
    (errors.PreflightError, 422, "preflight"),
    (errors.SecretError, 422, "preflight"),
    (errors.CheckpointError, 409, "checkpoint"),
    (errors.SchedulerUnavailableError, 503, "scheduler_away"),
    (errors.SchedulerError, 502, "scheduler"),
    (errors.ServiceError, 503, "service_away"),
    (errors.LineageError, 503, "database_away"),
    (errors.HoldfastError, 500, "error"),
)
_CODES: Final = {
    400: "invalid",
    401: "log_in",
    403: "forbidden",
    404: "not_found",
    405: "method",
    409: "conflict",
    413: "too_large",
    415: "media_type",
    421: "wrong_host",
    422: "invalid",
    429: "too_many",
    500: "error",
    503: "away",
}


class Refusal(Exception):
    """Raised when the API itself refuses a request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def problem(status: int, code: str, message: str, **more: Any) -> dict[str, Any]:
    """Return the body of an error response; see `schemas.Problem`."""
    return {"status": status, "code": code, "message": message, **more}


def refused(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error response with the usual code of its status."""
    body = problem(status, _CODES.get(status, "refused"), message)
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


def register(app: FastAPI) -> None:
    """Register handlers that give every error response the same form."""
    app.add_exception_handler(Refusal, _refusal)
    app.add_exception_handler(errors.HoldfastError, _on_purpose)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OSError, _files)


async def _refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return refused(error.status, str(error), error.headers)


async def _on_purpose(_: Request, error: Exception) -> JSONResponse:
    status, code = next((s, c) for kind, s, c in _STATUS if isinstance(error, kind))
    more: dict[str, Any] = {"problems": list(getattr(error, "problems", ()))[:PROBLEMS_MAX]}
    if isinstance(error, errors.RequestConflictError):
        more |= {"by": error.by, "action": error.action, "at": error.at}
    headers = {"Retry-After": "5"} if status == 503 else None
    return JSONResponse(problem(status, code, str(error), **more), status, headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [
        f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()
    ]
    body = problem(422, "invalid", "; ".join(found[:3]), problems=found[:PROBLEMS_MAX])
    return JSONResponse(body, 422)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return refused(error.status_code, str(error.detail), error.headers)


async def _files(_: Request, error: Exception) -> JSONResponse:
    """Return 503 for an `OSError`: neither the request nor the server is at fault."""
    assert isinstance(error, OSError)
    LOG.warning("storage error: %s", error)
    message = f"the run's storage is not available: {error.strerror or type(error).__name__}"
    return JSONResponse(problem(503, "storage_away", message), 503, {"Retry-After": "5"})
