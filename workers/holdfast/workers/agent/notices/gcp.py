"""Google Compute Engine: preemption and host maintenance, by requests that wait for a change."""

from __future__ import annotations

import time
from typing import Final
from urllib.parse import quote

from holdfast.contracts.errors import NoticeError
from holdfast.workers.agent.notices.metadata import Cloud, expect
from holdfast.workers.agent.notices.notice import Notice, Poll

INSTANCE: Final = "/computeMetadata/v1/instance/"
HEADERS: Final = {"Metadata-Flavor": "Google"}
WAIT_S: Final = 60
# The service answers slightly after the wait is over.
WAIT_MARGIN_S: Final = 10.0
# Google gives 30 s after a preemption, and at least that long before host maintenance.
LEAD_S: Final = 30.0
PREEMPTED: Final = {"TRUE": True, "FALSE": False}
MAINTENANCE: Final = {
    "NONE": False,
    "MIGRATE_ON_HOST_MAINTENANCE": False,
    "TERMINATE_ON_HOST_MAINTENANCE": True,
}


class Gcp(Cloud):
    """One node's view of Google's metadata service."""

    name = "gcp"
    # The pause between two requests, each of which waits at the server.
    every_s = 1.0

    def probe(self) -> None:
        answer = expect(self._service.ask("GET", f"{INSTANCE}preempted", HEADERS), 200)
        if answer.headers.get("metadata-flavor") != "Google":
            raise NoticeError("the answer has no header Metadata-Flavor: Google")

    def polls(self) -> tuple[Poll, ...]:
        return (
            self._waiting("preempted", PREEMPTED),
            self._waiting("maintenance-event", MAINTENANCE),
        )

    def _waiting(self, entry: str, meanings: dict[str, bool]) -> Poll:
        """Return a poll of one entry, which returns when the entry changes or after `WAIT_S`."""
        etag = "0"

        def look(now: float) -> list[Notice]:
            nonlocal etag
            wait = f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(etag)}"
            answer = self._service.ask(
                "GET", f"{INSTANCE}{entry}{wait}", HEADERS, timeout_s=WAIT_S + WAIT_MARGIN_S
            )
            value = expect(answer, 200).text
            if value not in meanings:
                raise NoticeError(
                    f"{entry}: expected one of {list(meanings)}, got {answer.excerpt}"
                )
            etag = answer.headers.get("etag", "0")
            return [_notice(entry, value)] if meanings[value] else []

        return look


def _notice(entry: str, value: str) -> Notice:
    detail = f"Google reported {entry} = {value}"
    # Count from now, not from when the wait started.
    return Notice(cloud="gcp", wants="stop", deadline=time.time() + LEAD_S, detail=detail)
