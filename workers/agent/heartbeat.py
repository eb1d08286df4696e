"""The node's heartbeat: one small file, replaced every few seconds by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Final

import psutil

from holdfast.contracts.board import Board, RankRecord
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.heartbeats import NodeBeat, RankBeat

STOP_WAIT_S: Final = 5.0


class Heartbeat:
    """Samples the board and the ranks' processes; never touches a rank."""

    def __init__(self, context: AgentContext, board: Board) -> None:
        self.incarnation = 0
        self._context = context
        self._board = board
        self._processes: dict[int, psutil.Process] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """One last beat, then silence."""
        self._over.set()
        self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        every_s = self._context.request.supervision.heartbeat_s
        while True:
            is_last = self._over.wait(every_s)
            # A full or absent file system must not end the heartbeats that come after it.
            with contextlib.suppress(OSError):
                self._write()
            if is_last:
                return

    def _write(self) -> None:
        beat = NodeBeat(
            node=self._context.node,
            host=self._context.host,
            time=time.time(),
            attempt=self._context.request.attempt,
            incarnation=self.incarnation,
            agent_pid=os.getpid(),
            ranks=tuple(self._rank(r) for r in self._board.records() if r.pid),
            memory_percent=psutil.virtual_memory().percent,
        )
        path = self._context.attempt.heartbeat(self._context.node)
        # Replaced but not fsynced: a beat lost in a power cut is no loss, a slow disk would be.
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(beat.model_dump_json())
        os.replace(temporary, path)

    def _rank(self, record: RankRecord) -> RankBeat:
        rss = cpu = None
        with contextlib.suppress(psutil.Error):
            process = self._processes.setdefault(record.pid, psutil.Process(record.pid))
            rss, cpu = process.memory_info().rss, process.cpu_percent()
        return RankBeat(
            rank=record.rank,
            step=record.completed,
            phase=record.phase.name.lower(),
            age_s=round(time.monotonic() - record.beat_at, 3) if record.beat_at else None,
            step_time_s=round(record.step_time_s, 6),
            pid=record.pid,
            rss_bytes=rss,
            cpu_percent=cpu,
        )
