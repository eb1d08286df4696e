"""The CPU cost of one supervisor that watches a large run's heartbeats: 1,250 simulated nodes.

Run `python benchmarks/heartbeats.py [--nodes N] [--seconds S]`. A separate process writes the
heartbeats of all nodes, as node 0's agent does. This process looks for silent nodes every two
seconds and counts its own CPU time. A tenth of the nodes falls silent during the run and must be
found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.workers.nodes.heartbeats import (
    BEATS_MISSED_MAX,
    HeartbeatWatch,
    HeartbeatWriter,
    NodeBeat,
    RankBeat,
    interval_s,
    newest_step,
    read_heartbeats,
)

RANKS: Final = 8
HEARTBEAT_S: Final = 2.0
# Progress is logged twice a minute, which reads all heartbeats.
READ_EVERY_S: Final = 30.0
SILENT_SHARE: Final = 0.1


def make_beat(node: int, step: int, every_s: float) -> dict[str, Any]:
    """Return a heartbeat as an agent writes it."""
    ranks = tuple(
        RankBeat(
            rank=node * RANKS + local,
            step=step,
            phase="train",
            age_s=0.2,
            step_time_s=0.412345,
            pid=100_000 + local,
            step_p50_s=0.412345,
            step_p99_s=0.512345,
            own_s=0.312345,
            rss_bytes=12_345_678_901,
            cpu_percent=101.5,
            threads=130,
            read_bytes=123_456_789_012,
            write_bytes=23_456_789_012,
        )
        for local in range(RANKS)
    )
    beat = NodeBeat(
        node=node,
        host=f"node-{node:04d}",
        time=time.time(),
        attempt=1,
        launch=1,
        agent_pid=4000,
        every_s=every_s,
        ranks=ranks,
    )
    return beat.model_dump(mode="json", exclude_none=True)


def stopped_nodes(nodes: int) -> range:
    """Return the last tenth of the nodes, which stops during the run."""
    return range(nodes - int(nodes * SILENT_SHARE), nodes)


def play_agents(attempt: AttemptPaths, nodes: int, seconds: float) -> None:
    """Write all heartbeats as node 0 does. After a third of the time a tenth of the nodes stops."""
    began = time.monotonic()
    every_s = interval_s(HEARTBEAT_S, nodes)
    beats = [make_beat(node, 1, every_s) for node in range(nodes)]
    writer = HeartbeatWriter(attempt)
    while (now := time.monotonic()) < began + seconds:
        live = nodes if now < began + seconds / 3 else stopped_nodes(nodes).start
        for beat in beats[:live]:
            beat["monotonic_s"] = now
        writer.write(beats)
        time.sleep(max(0.0, now + every_s - time.monotonic()))


def watch(attempt: AttemptPaths, seconds: float) -> dict[str, Any]:
    """Look for silent nodes for `seconds` and return the share of a core that this used."""
    watcher = HeartbeatWatch(attempt, HEARTBEAT_S)
    began, spent = time.monotonic(), time.process_time()
    read_at, step = began, None
    silent: set[str] = set()
    while (now := time.monotonic()) < began + seconds:
        fell, again = watcher.look()
        silent = (silent | set(fell)) - set(again)
        if now >= read_at:
            step, read_at = newest_step(read_heartbeats(attempt)), now + READ_EVERY_S
        time.sleep(max(0.0, now + HEARTBEAT_S - time.monotonic()))
    share = (time.process_time() - spent) / (time.monotonic() - began)
    return {"core_share": round(share, 4), "silent": sorted(silent), "step": step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--agents", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        play_agents(AttemptPaths(Path(given.agents)), given.nodes, given.seconds)
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-heartbeats-") as folder:
        attempt = AttemptPaths(Path(folder) / "0001")
        attempt.heartbeats.mkdir(parents=True)
        seconds = given.seconds + BEATS_MISSED_MAX * interval_s(HEARTBEAT_S, given.nodes)
        command = [sys.executable, __file__, "--agents", str(attempt.directory)]
        command += ["--nodes", str(given.nodes), "--seconds", str(seconds)]
        agents = subprocess.Popen(command)
        try:
            found = watch(attempt, given.seconds)
        finally:
            agents.kill()
            agents.wait()
    stopped = {f"node-{node:04d}" for node in stopped_nodes(given.nodes)}
    missed = sorted(stopped - set(found.pop("silent")))
    answer = {"nodes": given.nodes, "ranks": given.nodes * RANKS, **found}
    print(json.dumps({**answer, "fell_silent": len(stopped), "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
