"""Routes that serve the web UI, which is built from `web/`."""

from __future__ import annotations

import mimetypes
import re
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from holdfast.api.access import cookie_name
from holdfast.api.problems import Refusal
from holdfast.api.routes.session import begin_session, prefix_of
from holdfast.api.schemas import TOKEN_CHARACTERS_MAX
from holdfast.api.services import services_of

STATIC: Final = Path(__file__).resolve().parents[1] / "static"
FOREVER: Final = "public, max-age=31536000, immutable"
# What views ask first. The browser asks for it while it loads the scripts.
FIRST_ROWS: Final = "/api/v1/runs?sort=live&limit=50"
RUN_ASKS: Final = ("/timeline", "")
LINEAGE_ASKS: Final = ("/lineage?folded=true", "")
UNBUILT: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Holdfast</title>
<h1>Holdfast</h1>
<p>The server is running, but its web UI is not built. In a checkout with Node 18 or later, run
<code>make page</code> to build it. The same data is at <a href="./api/v1/runs">/api/v1/runs</a>;
<a href="./api/v1/openapi.json">/api/v1/openapi.json</a> describes the API.</p>
</html>
"""

_RUN_VIEW: Final = re.compile(r"runs/([A-Za-z0-9][A-Za-z0-9._-]*)(/lineage)?")
_ADDRESS: Final = re.compile(r'((?:src|href)=)"\./')

router = APIRouter(include_in_schema=False)


@router.get("/")
def open_page(
    request: Request,
    token: Annotated[str | None, Query(max_length=TOKEN_CHARACTERS_MAX)] = None,
) -> Response:
    """Serve the page. With `?token=`, log in first, then redirect to a URL without the token."""
    if token is None:
        return show_page(request)
    home, headers = prefix_of(request) + "/", {"Cache-Control": "no-store"}
    response = RedirectResponse(home, 303, headers)
    try:
        begin_session(request, response, token)
    except Refusal as refusal:
        # With a wrong token, the page shows its login form and why.
        return RedirectResponse(f"{home}?refused={refusal.status}", 303, headers)
    return response


@router.get("/{path:path}")
def show_page(request: Request, path: str = "") -> Response:
    """Serve a built file, or the page itself for any other path outside `/api`."""
    if path == "api" or path.startswith("api/"):
        raise Refusal(
            404, f"/{path[:200]}: no such endpoint; /api/v1/openapi.json lists the endpoints"
        )
    file = _file_of(path)
    if file is not None:
        return _asset(request, file) if path.startswith("assets/") else FileResponse(file)
    if path.startswith("assets/"):
        raise Refusal(
            404, f"/{path[:200]}: no such file; the web UI was rebuilt, so reload the page"
        )
    index = STATIC / "index.html"
    page = index.read_text() if index.is_file() else UNBUILT
    headers = {"Cache-Control": "no-cache", **_early(request, path)}
    page = page.replace('name="event" content=""', f'name="event" content="{_seen(request)}"')
    return HTMLResponse(_placed(page, prefix_of(request)), headers=headers)


def _seen(request: Request) -> str:
    """Return the event after which the page's stream begins; empty without a session."""
    services = services_of(request)
    session = services.sessions.find(request.cookies.get(cookie_name(request), ""))
    return services.hub.newest_id if session else ""


def _early(request: Request, path: str) -> dict[str, str]:
    """Return the header that names what the view at `path` asks first, if there is a session."""
    asks: tuple[str, ...] = ()
    run = _RUN_VIEW.fullmatch(path)
    if not path and not request.query_params:
        asks = (FIRST_ROWS,)
    elif run:
        asks = tuple(
            f"/api/v1/runs/{run[1]}{ask}" for ask in (LINEAGE_ASKS if run[2] else RUN_ASKS)
        )
    if not asks or cookie_name(request) not in request.cookies:
        return {}
    links = (f"<{prefix_of(request)}{ask}>; rel=preload; as=fetch; crossorigin" for ask in asks)
    return {"Link": ", ".join(links)}


def _asset(request: Request, file: Path) -> Response:
    """Return a built asset, in the compressed form that the build wrote, if the client takes it.

    Compressing the largest one for each request would take longer than the slowest query.
    """
    # The names of built assets contain a digest of their content.
    headers = {"Cache-Control": FOREVER}
    packed = file.with_name(f"{file.name}.gz")
    if request.headers.get("accept-encoding") != "gzip" or not packed.is_file():
        return FileResponse(file, headers=headers)
    headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    kind = mimetypes.guess_type(file.name)[0]
    return FileResponse(packed, headers=headers, media_type=kind)


def _placed(page: str, prefix: str) -> str:
    """Return the page with its addresses, which are relative as it is built, below `prefix`.

    The page is the answer for many paths, and the content security policy forbids a base.
    """
    placed = page.replace(
        '<meta name="prefix" content="" />', f'<meta name="prefix" content="{prefix}" />'
    )
    return _ADDRESS.sub(rf'\1"{prefix}/', placed)


def _file_of(path: str) -> Path | None:
    """Return the built file at `path`, or None. Never returns a file outside `STATIC`."""
    if not path or "\0" in path:
        return None
    try:
        file = (STATIC / path).resolve()
        return file if file.is_relative_to(STATIC) and file.is_file() else None
    except OSError:
        return None
