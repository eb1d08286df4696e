"""The runs of experiment trackers that a run's journals name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from holdfast.contracts.disk.journal import Event
from holdfast.contracts.plain_text import plain_line


def trackers_in(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return each tracker's newest run; `events` are the lines `tracked`, oldest first."""
    newest = {str(event.data["tracker"]): event.data for event in events}
    return [
        {
            "tracker": plain_line(name),
            "tracker_id": plain_line(str(data["tracker_id"])),
            "url": _web_address(data.get("url")),
        }
        for name, data in sorted(newest.items())
    ]


def _web_address(url: object) -> str | None:
    """Return an address of the web. Another user's journal may have any other scheme."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return url if parts.scheme in {"http", "https"} and parts.netloc else None
