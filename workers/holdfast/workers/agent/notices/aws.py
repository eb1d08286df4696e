"""Amazon EC2: spot interruption notices and rebalance recommendations, by IMDSv2."""

from __future__ import annotations

import time
from typing import Final

from holdfast.contracts.errors import NoticeError
from holdfast.workers.agent.notices.metadata import Cloud, MetadataAnswer, expect
from holdfast.workers.agent.notices.notice import Notice, Poll, deadline_of

TOKEN: Final = "/latest/api/token"
ACTION: Final = "/latest/meta-data/spot/instance-action"
REBALANCE: Final = "/latest/meta-data/events/recommendations/rebalance"
TTL_HEADER: Final = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"
TTL_S: Final = 21_600
TOKEN_CHARACTERS_MAX: Final = 1024
LEAD_S: Final = 120.0
ACTIONS: Final = ("terminate", "stop", "hibernate")


class Aws(Cloud):
    """One node's view of EC2's metadata service."""

    name = "aws"
    # Amazon recommends polling every 5 seconds.
    every_s = 5.0

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self._token = ""
        self._token_until = 0.0

    def probe(self) -> None:
        self._renew()

    def polls(self) -> tuple[Poll, ...]:
        return (self.look,)

    def look(self, now: float) -> list[Notice]:
        """Return the current interruption and recommendation, if any."""
        found = []
        answer = self._get(ACTION)
        if answer.status == 200:
            found.append(read_action(answer, now))
        answer = self._get(REBALANCE)
        if answer.status == 200:
            found.append(read_rebalance(answer))
        return found

    def _get(self, path: str) -> MetadataAnswer:
        """Return the answer, which is 404 for no notice; replace a refused token once."""
        if time.monotonic() > self._token_until:
            self._renew()
        answer = self._service.ask("GET", path, {TOKEN_HEADER: self._token})
        if answer.status == 401:
            self._renew()
            answer = self._service.ask("GET", path, {TOKEN_HEADER: self._token})
        return expect(answer, 200, 404)

    def _renew(self) -> None:
        self._token_until = 0.0
        answer = expect(self._service.ask("PUT", TOKEN, {TTL_HEADER: str(TTL_S)}), 200)
        token = answer.text
        if not (token.isascii() and token.isprintable() and 0 < len(token) < TOKEN_CHARACTERS_MAX):
            raise NoticeError(f"expected a token, got {answer.excerpt}")
        self._token, self._token_until = token, time.monotonic() + TTL_S / 2


def read_action(answer: MetadataAnswer, now: float) -> Notice:
    """Parse `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`. Raises `NoticeError`."""
    document = answer.json()
    action = document.get("action")
    if action not in ACTIONS:
        raise NoticeError(f"expected an action of {ACTIONS}, got {answer.excerpt}")
    deadline = deadline_of(document.get("time"), now=now, lead_s=LEAD_S)
    detail = f"EC2 announced to {action} the instance at {document.get('time')}"
    return Notice(cloud="aws", wants="stop", deadline=deadline, detail=detail)


def read_rebalance(answer: MetadataAnswer) -> Notice:
    """Parse `{"noticeTime": "2020-10-27T08:22:00Z"}`. Raises `NoticeError`."""
    notice_time = answer.json().get("noticeTime")
    if not isinstance(notice_time, str):
        raise NoticeError(f"expected a noticeTime, got {answer.excerpt}")
    detail = f"EC2 recommended to rebalance at {notice_time}"
    return Notice(cloud="aws", wants="save", deadline=None, detail=detail)
