"""The page: files built from `web/`, and its one document for every address it knows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from holdfast.api.problems import Refusal
from holdfast.api.routes.session import begin_session
from holdfast.api.schemas import TOKEN_CHARACTERS_MAX

STATIC: Final = Path(__file__).resolve().parents[1] / "static"
FOREVER: Final = "public, max-age=31536000, immutable"
UNBUILT: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Holdfast</title>
<h1>Holdfast</h1>
<p>The server runs; its page is not built. In a checkout, with Node 18 or later, <code>make
page</code> builds it. What it would show is under <a href="/api/v1/runs">/api/v1/runs</a>,
described in <a href="/api/v1/openapi.json">/api/v1/openapi.json</a>.</p>
</html>
"""

router = APIRouter(include_in_schema=False)


@router.get("/")
def open_page(
    request: Request,
    token: Annotated[str | None, Query(max_length=TOKEN_CHARACTERS_MAX)] = None,
) -> Response:
    """The page; with `?token=`, a session begins and the address bar keeps no token."""
    if token is None:
        return show_page()
    response = RedirectResponse("/", 303, {"Cache-Control": "no-store"})
    # A wrong token leads to the page's own form.
    with contextlib.suppress(Refusal):
        begin_session(request, response, token)
    return response


@router.get("/{path:path}")
def show_page(path: str = "") -> Response:
    """A built file, or the page for any address that is the page's own to understand."""
    if path == "api" or path.startswith("api/"):
        raise Refusal(404, f"/{path[:200]}: nothing is answered there; see /api/v1/openapi.json")
    file = _file_of(path)
    if file is not None:
        # Built names carry a digest of their content.
        headers = {"Cache-Control": FOREVER} if path.startswith("assets/") else {}
        return FileResponse(file, headers=headers)
    if path.startswith("assets/"):
        raise Refusal(404, f"/{path[:200]}: no such file; the page was built again, load it again")
    index = STATIC / "index.html"
    if not index.is_file():
        return HTMLResponse(UNBUILT)
    return FileResponse(index, headers={"Cache-Control": "no-cache"})


def _file_of(path: str) -> Path | None:
    """The built file at `path`, never one outside of the folder."""
    if not path or "\0" in path:
        return None
    try:
        file = (STATIC / path).resolve()
        return file if file.is_relative_to(STATIC) and file.is_file() else None
    except OSError:
        return None
