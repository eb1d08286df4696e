"""Load test of `holdfast serve`: open pages, replayed journals and the delay of the index.

Run `python -m benchmarks.serve [--pages N] [--runs N] [--seconds S]` in the checkout. One process
is the server. Another one commits in N runs, in one of them every second. This process reads N
event streams. The lag is the time from a journal line to its arrival at every page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx
from tests.support.runs import RunFolder

COMMIT_S: Final = 10.0
LIVE_COMMIT_S: Final = 1.0
WARM_S: Final = 5.0
ASK_S: Final = 0.5


def replay(root: Path, runs: int, seconds: float) -> None:
    """Commit in each run at its own times until `seconds` have passed."""
    folders = [RunFolder(root, f"replayed-{n:03d}", f"{n:032x}") for n in range(runs)]
    now = time.time()
    for folder in folders:
        folder.submit(1, 2, now)
        folder.claim(1, now)
        folder.launch(1, 1, 0, None)
    due = [now + COMMIT_S * n / runs for n in range(runs)]
    steps = [0] * runs
    ends_at = now + seconds
    while (moment := min(due)) < ends_at:
        time.sleep(max(0.0, moment - time.time()))
        chosen = due.index(moment)
        steps[chosen] += 10
        folders[chosen].commit(steps[chosen], 1, at=time.time())
        due[chosen] += LIVE_COMMIT_S if chosen == 0 else COMMIT_S


async def read_page(client: httpx.AsyncClient, lags_s: list[float]) -> None:
    """Read one page's stream and record how late each commit arrives."""
    async with client.stream("GET", "/api/v1/events", timeout=None) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: ") and '"committed"' in line:
                event = json.loads(line[6:])
                lags_s.append(time.time() - _unix(event["time"]))


async def ask(client: httpx.AsyncClient, answers_s: dict[str, list[float]]) -> None:
    """Send the requests that a page sends after an event."""
    while True:
        for path in ("/api/v1/runs", "/api/v1/runs/replayed-000"):
            began = time.perf_counter()
            answer = await client.get(path, timeout=60)
            if answer.status_code == 200:
                answers_s.setdefault(path, []).append(time.perf_counter() - began)
        await asyncio.sleep(ASK_S)


async def measure(url: str, token: str, pages: int, seconds: float) -> dict[str, Any]:
    """Listen for `seconds` and return the lags and answer times in milliseconds."""
    lags_s: list[float] = []
    answers_s: dict[str, list[float]] = {}
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, limits=limits, headers=headers) as client:
        tasks = [asyncio.create_task(read_page(client, lags_s)) for _ in range(pages)]
        await asyncio.sleep(WARM_S)
        tasks.append(asyncio.create_task(ask(client, answers_s)))
        await asyncio.sleep(seconds)
        streams = (await client.get("/healthz")).json()["streams"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "pages": streams,
        "news_heard": len(lags_s),
        "lag_ms": _spread(lags_s),
        "answer_ms": {path: _spread(times) for path, times in answers_s.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--runs", type=int, default=51)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        replay(options.replay, options.runs, options.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        root.mkdir()
        given = {"HOLDFAST_HOME": folder, "HOLDFAST_ROOT": str(root)}
        environment = {**os.environ, **given}
        serve = [sys.executable, "-m", "holdfast.cli.main", "serve", "--port", "0"]
        server = subprocess.Popen(serve, env=environment, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        url, token = server.stderr.readline().split()[-1].split("/?token=")
        again = [sys.executable, "-m", "benchmarks.serve", "--replay", str(root)]
        again += ["--runs", str(options.runs), "--seconds", str(options.seconds + WARM_S)]
        replayer = subprocess.Popen(again)
        try:
            figures = asyncio.run(measure(url, token, options.pages, options.seconds))
        finally:
            for process in (replayer, server):
                process.terminate()
                process.wait(30)
    print(json.dumps({"runs": options.runs, "seconds": options.seconds, **figures}, indent=1))
    return 0


def _spread(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100)
    facts = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(seconds)}
    return {name: round(value * 1e3, 1) for name, value in facts.items()}


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


if __name__ == "__main__":
    sys.exit(main())
