"""Background jobs: actions that take longer than a request should, such as an export."""

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

# Does the work and returns the job's result. Its argument adds to the bytes done so far.
Work = Callable[[Callable[[int], None]], dict[str, Any]]


@dataclass
class Job:
    """One job; times are Unix seconds, and `done_bytes` of `total_bytes` have been processed."""

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
    """Runs up to `AT_ONCE_MAX` jobs at a time, in order, and keeps the last `REMEMBERED_MAX`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="holdfast-job")
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def start(self, job: Job, work: Work) -> Job:
        """Queue `work` and return its job, or the unfinished job of the same `kind` and `about`.

        Raises `Refusal` if `WAITING_MAX` jobs are unfinished.
        """
        with self._lock:
            waiting = [one for one in self._jobs.values() if one.ended_at is None]
            # Two clicks on the same button are one job.
            same = [one for one in waiting if (one.kind, one.about) == (job.kind, job.about)]
            if same:
                return same[0]
            if len(waiting) >= WAITING_MAX:
                raise Refusal(
                    429, f"{WAITING_MAX} jobs are waiting or running; try again later", _LATER
                )
            self._jobs[job.id] = job
            while len(self._jobs) > REMEMBERED_MAX:
                done = next((key for key, one in self._jobs.items() if one.ended_at), job.id)
                del self._jobs[done]
        self._pool.submit(self._run, job, work)
        return job

    def find(self, identity: str) -> Job:
        """Return the job with this id. Raises `NotFoundError` if it is unknown or was dropped."""
        with self._lock:
            job = self._jobs.get(identity)
        if job is None:
            raise NotFoundError(
                f"{identity!r}: no such job; the server keeps the last {REMEMBERED_MAX} jobs "
                "since it started"
            )
        return job

    def close(self) -> None:
        """Start no more jobs, and end each running job when it next reports progress."""
        self._closing.set()
        # Not waited for: an export may run for hours, and the server must be able to end.
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Job, work: Work) -> None:
        def advance(count: int) -> None:
            if self._closing.is_set():
                raise Refusal(503, "the server stopped before the job was complete")
            job.done_bytes += count

        job.state = "running"
        try:
            job.result = work(advance)
            job.state = "done"
        except (HoldfastError, OSError, Refusal) as error:
            job.error, job.state = str(error), "failed"
        # After an unexpected error too, the job must not stay in the state `running`.
        except Exception:
            LOG.exception("job %s of %s failed", job.kind, job.about)
            job.error, job.state = "the job failed; the server's log has the traceback", "failed"
        finally:
            job.ended_at = time.time()


_LATER: Final = {"Retry-After": "30"}
