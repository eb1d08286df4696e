"""Answers of some megabytes: written once, and compressed as quickly as they can be."""

from __future__ import annotations

import zlib
from typing import Any, Final

from fastapi import Request, Response
from pydantic_core import to_json

# In half the time of the level that suits files which are kept, for a seventh more bytes.
LEVEL: Final = 1
_GZIP: Final = 16 + zlib.MAX_WBITS


def long_answer(request: Request, value: Any) -> Response:
    """`value` as JSON, not checked against its model again: it must have been built to it."""
    content = to_json(value)
    headers = {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = zlib.compress(content, LEVEL, _GZIP)
        headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return Response(content, media_type="application/json", headers=headers)
