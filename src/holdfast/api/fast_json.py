"""Fast JSON responses for results of some megabytes."""

from __future__ import annotations

from typing import Any, Final

import orjson
from fastapi import Request, Response
from isal import isal_zlib

# Smaller output than zlib's fastest level, in a fifth of the time.
LEVEL: Final = 1
_GZIP: Final = 16 + isal_zlib.MAX_WBITS


def long_answer(request: Request, value: Any) -> Response:
    """Return `value` as a JSON response without validation: it must already match its model."""
    # Without FastAPI's validation and encoding, which take longer than the query for such results.
    content = orjson.dumps(value)
    headers = {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = isal_zlib.compress(content, LEVEL, _GZIP)
        headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return Response(content, media_type="application/json", headers=headers)
