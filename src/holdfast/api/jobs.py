"""Actions that take longer than a request should: started by one, looked at by others."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.api.problems import LOG, Refusal
from holdfast.contracts.errors import HoldfastError, NotFoundError

AT_ONCE_MAX: Final = 2
WAITING_MAX: Final = 32
REMEMBERED_MAX: Final = 256

# Given a function that counts bytes done, does the work and returns its answer.
Work = Callable[[Callable[[int], None]], dict[str, Any]]


@dataclass
class Job:
    """One of them; times are Unix seconds, and `done_bytes` of `total_bytes` are through."""

    kind: str
    about: str
    by: str
    total_bytes: int | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "waiting"
    done_bytes: int = 0
    result: dict[str, Any] | None = None
    error: str | None = None
    created_at: float = field(default_factory=time.time)
    ended_at: float | None = None


class Jobs:
    """Runs `AT_ONCE_MAX` at a time, in the order they came, and remembers the last ones."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="holdfast-job")
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def start(self, job: Job, work: Work) -> Job:
        """Queue `work`; the same work on the same thing, still under way, is joined instead."""
        with self._lock:
            waiting = [one for one in self._jobs.values() if one.ended_at is None]
            same = [one for one in waiting if (one.kind, one.about) == (job.kind, job.about)]
            if same:
                return same[0]
            if len(waiting) >= WAITING_MAX:
                raise Refusal(503, f"{WAITING_MAX} jobs are under way; try later", _LATER)
            self._jobs[job.id] = job
            while len(self._jobs) > REMEMBERED_MAX:
                done = next((key for key, one in self._jobs.items() if one.ended_at), job.id)
                del self._jobs[done]
        self._pool.submit(self._run, job, work)
        return job

    def find(self, identity: str) -> Job:
        """Raises `NotFoundError` for one that is not, or no longer, remembered."""
        with self._lock:
            job = self._jobs.get(identity)
        if job is None:
            raise NotFoundError(
                f"{identity!r}: no such job; the last {REMEMBERED_MAX} of this server are known"
            )
        return job

    def close(self) -> None:
        """Begin no more, and end what runs at its next word of how far it is."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Job, work: Work) -> None:
        def advance(count: int) -> None:
            if self._closing.is_set():
                raise Refusal(503, "the server was stopped before this was through")
            job.done_bytes += count

        job.state = "running"
        try:
            job.result = work(advance)
            job.state = "done"
        except (HoldfastError, OSError, Refusal) as error:
            job.error, job.state = str(error), "failed"
        # Whatever else it is, the asker must hear that the work has ended.
        except Exception:
            LOG.exception("job %s of %s", job.kind, job.about)
            job.error, job.state = "it failed; the server's log has the traceback", "failed"
        finally:
            job.ended_at = time.time()


_LATER: Final = {"Retry-After": "30"}
