"""What copies at a neighbour cost in step time: jobs of two nodes with and without them.

Each node has an agent and a flusher on this machine, so all copies go over its loopback, and the
senders and receivers share its cores with the ranks. The steps of half of the jobs compute, and
those of the others wait, as for an accelerator. It does not import torch.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.errors import RunFailedError
from holdfast.contracts.records.documents import Outcome, read_document
from holdfast.contracts.records.history import load_events
from holdfast.contracts.records.protection import unprotected_in
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState
from holdfast_bench.drills.node_rehearsal import NodeJob
from holdfast_bench.limits.figures import WAITING

WAYS: Final = ("off", "on")
KINDS: Final = ("", WAITING)
STATE_BYTES: Final = 128_000_000
NEVER: Final = 1_000_000_000
SNAPSHOT_STEPS: Final = 2
PRODUCTS: Final = 100
WAIT_S: Final = 0.2
WARM_UP, STEPS = 15, 60
QUICK_STEPS: Final = 10
POLL_S: Final = 0.05
END_S: Final = 60.0


def measure(work: Path, *, pairs: int, end_by: float, is_quick: bool) -> dict[str, list[float]]:
    """Return the seconds of a step by way and kind, one for each pair. There is at least one pair.

    Raises `RunFailedError` if a job fails, or if its nodes hold no copies.
    """
    found: dict[str, list[float]] = {f"{way}{kind}": [] for kind in KINDS for way in WAYS}
    began = time.time()
    for pair in range(pairs):
        if pair and time.time() + (time.time() - began) / pair > end_by:
            break
        for kind in KINDS:
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                folder = work / f"neighbours-{way}{kind}-{pair}"
                folder.mkdir(parents=True)
                settings = _settings(folder, waits=kind == WAITING, is_quick=is_quick)
                found[f"{way}{kind}"].append(_step_s(folder, way, settings, is_quick=is_quick))
                shutil.rmtree(folder, ignore_errors=True)
    return found


def _settings(folder: Path, *, waits: bool, is_quick: bool) -> dict[str, Any]:
    return {
        "out": str(folder / "step_s"),
        "products": 0 if waits else PRODUCTS,
        "wait_s": WAIT_S if waits else 0.0,
        "state_bytes": STATE_BYTES // 16 if is_quick else STATE_BYTES,
        "warm_up": WARM_UP,
        "steps": QUICK_STEPS if is_quick else STEPS,
    }


def _step_s(folder: Path, way: str, settings: dict[str, Any], *, is_quick: bool) -> float:
    root = folder / "root"
    spec = _spec(way, folder, settings)
    scratch = {"TMPDIR": str(folder)}
    with NodeJob(spec, root, folder, {**os.environ, **scratch}) as job:
        give_up = time.monotonic() + END_S * (1 if is_quick else 3)
        problems: list[str] = []
        while (outcome := read_document(Outcome, job.attempt.outcome)) is None:
            # What a launch lacks is known while it runs.
            problems = [one["text"] for one in unprotected_in(load_events(job.paths))] or problems
            if time.monotonic() > give_up:
                raise RunFailedError(f"the job with neighbours {way} exceeded its time limit")
            time.sleep(POLL_S)
        if outcome.state is not AttemptState.COMPLETED or problems:
            evidence = "; ".join([*problems, *outcome.evidence])
            raise RunFailedError(f"the job with neighbours {way} {outcome.state}: {evidence}")
    return float(Path(settings["out"]).read_text())


def _spec(way: str, folder: Path, settings: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": f"neighbours-{way}",
            "command": ("-m", "holdfast_bench.limits.neighbour_steps"),
            "config": settings,
            "environment": {"OMP_NUM_THREADS": "1"},
            "launch": {"working_directory": str(folder)},
            "resources": {"executor": "slurm", "nodes": 2, "gpus_per_node": 1, "gres": "none"},
            "checkpoint": {
                "interval": NEVER,
                "snapshots": SNAPSHOT_STEPS,
                "neighbour": way == "on",
            },
            "supervision": {
                "notices": "off",
                "heartbeat_s": 0.25,
                "standby_after_s": "off",
                "restarts_in_place": 0,
            },
        }
    )
