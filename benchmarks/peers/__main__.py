"""Holdfast beside other systems, under the same faults: steps lost, first new step, ETTR.

    .venv/bin/python -m benchmarks.peers --environments ~/.cache/holdfast-peers --json peers.json

Each peer trains the same small job of two ranks over gloo in an environment of its own, which is
made at the first use (about 1.2 GB in all). Faults come from a seed and are the same for all.
On this machine ranks are killed and the job gets SIGTERM; on a Slurm cluster that is started for
it (root, and Slurm's packages) the job is preempted. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Final

from .conduct import Outcome, conduct
from .environments import Environments, InstallError
from .faults import Fault, Job, draw
from .launchers import RANKS, Launcher
from .report import as_json, tables

LOCAL: Final = ("torchrun", "nvrx", "dlrover", "holdfast")
CACHE: Final = Path("~/.cache/holdfast-peers")


def main() -> int:
    options = build_parser().parse_args()
    job = Job(steps=options.steps)
    kinds = ["kill-rank"] * options.kills + ["sigterm"] * options.terms
    faults: dict[str, tuple[Fault, ...]] = {"local": draw(options.seed, kinds, job, RANKS)}
    environments = Environments(options.environments.expanduser().resolve())
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as folder:
        outcomes = run_local(options.local, environments, job, faults["local"], Path(folder))
    if options.json:
        command = f"python -m benchmarks.peers {shlex.join(sys.argv[1:])}"
        found = as_json(job, faults, outcomes, command)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(tables(outcomes))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=Path, default=CACHE, help=f"default: {CACHE}")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=240, help="of 0.2 s each")
    parser.add_argument("--kills", type=int, default=3, help="ranks killed, one after another")
    parser.add_argument("--terms", type=int, default=1, help="signals to the whole job, after them")
    parser.add_argument("--local", type=names, default=LOCAL, help="peers, by commas; empty: none")
    parser.add_argument("--json", type=Path, help="where everything measured is written to")
    return parser


def names(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name for name in text.split(",") if name)


def run_local(
    peers: tuple[str, ...],
    environments: Environments,
    job: Job,
    faults: tuple[Fault, ...],
    folder: Path,
) -> list[Outcome]:
    """One peer after another; one that cannot be installed says why."""
    outcomes = []
    for peer in peers:
        try:
            python = environments.python_of(peer)
        except InstallError as error:
            outcomes.append(Outcome(peer, "local", problem=f"not installed: {error}"))
            continue
        outcome = conduct(Launcher(peer, python, job, folder / peer), faults)
        outcome.versions, outcome.load = environments.versions_of(peer), os.getloadavg()[0]
        print(f"{peer}: {outcome.as_json()}", file=sys.stderr)
        outcomes.append(outcome)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
