"""The notice threads of a node, which cannot disturb training.

A service that hangs, answers slowly, redirects or returns invalid data is journaled once and polled
again. With `auto` the cloud is detected during training. If no service answers, nothing is
journaled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from holdfast.contracts import environment
from holdfast.contracts.errors import NoticeError
from holdfast.workers.agent.notices.aws import Aws
from holdfast.workers.agent.notices.azure import Azure
from holdfast.workers.agent.notices.gcp import Gcp
from holdfast.workers.agent.notices.metadata import LINK_LOCAL, Cloud
from holdfast.workers.agent.notices.notice import Notice, Poll

AUTO: Final = "auto"
PROBES_MAX: Final = 3
PROBE_PAUSE_S: Final = 10.0
NOTICES_MAX: Final = 1000


class NoticeWatch:
    """Watches from construction until `close`; `note` journals a text."""

    def __init__(
        self, mode: str, url: str, variables: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        """`mode` is a cloud's name, `auto` or `off`; `url` replaces the cloud's own address."""
        self._note = note
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str, str], Notice] = {}
        self._fresh: list[Notice] = []
        self._failed: set[str] = set()
        self._clouds = build_clouds(mode, url, variables)
        for cloud in self._clouds:
            self._start(self._begin, cloud, mode == AUTO)

    def take(self) -> list[Notice]:
        """Return the notices since the last call, each once."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    def acknowledge(self) -> None:
        """Tell the clouds that nothing is left to lose here, and journal the result."""
        with self._lock:
            waiting = [notice for notice in self._seen.values() if notice.event_id]
        by_name = {cloud.name: cloud for cloud in self._clouds}
        for notice in waiting:
            try:
                by_name[notice.cloud].acknowledge(notice.event_id)
                self._note(f"{notice.cloud}: acknowledged {notice.event_id}")
            except NoticeError as error:
                self._note(f"{notice.cloud}: {notice.event_id} was not acknowledged: {error}")

    def close(self) -> None:
        """End the threads by aborting their requests."""
        self._over.set()
        for cloud in self._clouds:
            cloud.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="notices", daemon=True).start()

    def _begin(self, cloud: Cloud, is_probed: bool) -> None:
        if is_probed and not self._is_here(cloud):
            return
        for poll in cloud.polls():
            self._start(self._watch, cloud, poll)

    def _is_here(self, cloud: Cloud) -> bool:
        """Return True once the cloud's service answers. It may start late, so try a few times."""
        for _ in range(PROBES_MAX):
            try:
                cloud.probe()
            except NoticeError:
                if self._over.wait(PROBE_PAUSE_S):
                    return False
                continue
            return True
        return False

    def _watch(self, cloud: Cloud, poll: Poll) -> None:
        """Poll repeatedly until the agent ends."""
        while not self._over.is_set():
            try:
                found = poll(time.time())
            except NoticeError as error:
                found = []
                self._report_failure(cloud, error)
            for notice in found:
                self._add(notice)
            self._over.wait(cloud.every_s)

    def _add(self, notice: Notice) -> None:
        key = (notice.cloud, notice.detail, notice.event_id)
        with self._lock:
            if key not in self._seen and len(self._seen) < NOTICES_MAX:
                self._seen[key] = notice
                self._fresh.append(notice)

    def _report_failure(self, cloud: Cloud, error: NoticeError) -> None:
        with self._lock:
            is_first = cloud.name not in self._failed and not self._over.is_set()
            self._failed.add(cloud.name)
        if is_first:
            self._note(f"notices of {cloud.name} are not available and are polled again: {error}")


def build_clouds(mode: str, url: str, variables: Mapping[str, str]) -> tuple[Cloud, ...]:
    """Return the clouds to watch, at the spec's `url`, the environment's or their own."""
    given = url or variables.get(environment.NOTICES_URL, "")
    google = variables.get("GCE_METADATA_HOST", "")
    aws = given or variables.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or LINK_LOCAL
    gcp = given or (f"http://{google}" if google else LINK_LOCAL)
    chosen: list[Cloud] = []
    is_without_aws = variables.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if mode == Aws.name or (mode == AUTO and not is_without_aws):
        chosen.append(Aws(aws))
    if mode in {AUTO, Gcp.name}:
        chosen.append(Gcp(gcp))
    if mode in {AUTO, Azure.name}:
        chosen.append(Azure(given or LINK_LOCAL))
    return tuple(chosen)
