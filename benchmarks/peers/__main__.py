"""Compares Holdfast with other systems under the same faults: steps lost, first new step, ETTR.

    .venv/bin/python -m benchmarks.peers --environments ~/.cache/holdfast-peers --json peers.json

Each peer trains the same small job of two ranks over gloo in its own environment, which is created
at the first use (about 1.2 GB in total). A seed chooses the faults, which are the same for all.
On this machine, ranks are killed and the job gets SIGTERM. On a temporary Slurm cluster (this
needs root and Slurm's packages), the job is preempted. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from .environments import Environments, InstallError
from .faults import Fault, Job, draw
from .launchers import GRACE_S, RANKS, Launcher
from .report import as_json, tables
from .runner import Outcome, run_job
from .slurm import PLACES, SlurmLauncher, UnusableError, cluster, release

LOCAL: Final = ("torchrun", "nvrx", "dlrover", "holdfast")
SLURM: Final = ("submitit", "lightning", "holdfast")
REST_S: Final = GRACE_S + 10.0
CACHE: Final = Path("~/.cache/holdfast-peers")


def main() -> int:
    options = build_parser().parse_args()
    if options.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    kinds = ["kill-rank"] * options.kills + ["sigterm"] * options.terms
    local = Plan(Job(steps=options.steps), options.local, options.seed, kinds)
    # A job that continues through the whole grace time must not be finished by then.
    slurm = Plan(Job(steps=options.slurm_steps), options.slurm, options.seed, ["preempted"], REST_S)
    environments = Environments(options.environments.expanduser().resolve())
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as name:
        outcomes = [
            run_peer(Launcher(peer, python, local.job, Path(name, peer)), local.faults)
            if isinstance(python, Path)
            else Outcome(peer, Launcher.where, problem=python)
            for peer, python in local.installed(environments)
        ]
        for place in PLACES if slurm.peers else ():
            outcomes += run_on_slurm(place, slurm, environments, Path(name))
    for outcome in outcomes:
        outcome.versions = environments.versions_of(outcome.peer)
    if options.json:
        command = f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}"
        found = as_json((local.as_json(), slurm.as_json()), outcomes, command)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(outcomes))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, default=CACHE, help=f"default: {CACHE}")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=240, help="number of steps of 0.2 s each")
    parser.add_argument("--kills", type=int, default=3, help="number of ranks to kill in turn")
    parser.add_argument("--terms", type=int, default=1, help="SIGTERMs to the job, after the kills")
    parser.add_argument("--local", type=names, default=LOCAL, help="peers, by commas; empty: none")
    parser.add_argument("--slurm", type=names, default=SLURM, help="peers on Slurm, likewise")
    parser.add_argument("--slurm-steps", type=int, default=230, help="steps, with one preemption")
    parser.add_argument(
        "--real-time", action="store_true", help="take priority over other processes (root)"
    )
    parser.add_argument("--json", type=Path, help="file for all results")
    return parser


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(name for name in text.split(",") if name)


class Plan:
    """The job and the faults of all peers of one place."""

    def __init__(
        self, job: Job, peers: tuple[str, ...], seed: int, kinds: list[str], rest_s: float = 3.0
    ) -> None:
        self.job, self.peers = job, peers
        self.faults = draw(seed, kinds, job, ranks=RANKS, rest_s=rest_s)

    def installed(self, environments: Environments) -> Iterator[tuple[str, Path | str]]:
        """Yield each peer with its interpreter, or with the reason why it has none."""
        for peer in self.peers:
            try:
                yield peer, environments.python_of(peer)
            except InstallError as error:
                yield peer, f"not installed: {error}"

    def as_json(self) -> dict[str, Any]:
        """Return the plan for `--json`."""
        return {"job": asdict(self.job), "faults": [asdict(one) for one in self.faults]}


def run_on_slurm(
    place: str, plan: Plan, environments: Environments, folder: Path
) -> Iterator[Outcome]:
    """Run the peers in turn on one cluster. Without a cluster, each row has the reason."""
    try:
        with cluster(folder, place) as slurm:
            for peer, python in plan.installed(environments):
                if isinstance(python, str):
                    yield Outcome(peer, place, problem=python)
                    continue
                where = folder / f"{peer}-{list(PLACES).index(place)}"
                launcher = SlurmLauncher(peer, python, plan.job, where, where=place, slurm=slurm)
                yield run_peer(launcher, plan.faults)
                release(slurm)
    except UnusableError as error:
        yield from (Outcome(peer, place, problem=str(error)) for peer in plan.peers)


def run_peer(launcher: Launcher, faults: tuple[Fault, ...]) -> Outcome:
    """Return one peer's outcome, and print it to standard error."""
    outcome = run_job(launcher, faults)
    outcome.load = os.getloadavg()[0]
    print(json.dumps(outcome.as_json()), file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
