"""The checks before a run starts, and forks from a committed checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import Manifest, is_dcp, read_manifest, require_own_directory
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, NotFoundError, RunConflictError, SpecError
from holdfast.contracts.records import history_cache, known_damage
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.parameters import load_spec
from holdfast.flows.start import has_service
from holdfast.flows.supervisor.secrets import require
from holdfast.lineage.database import sqlite_file
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.preflight import check
from holdfast.workers.runs.run_folders import ForkPoint, create_run, newest_generation


def fork_run(
    parent: RunPaths,
    directory: str,
    *,
    name: str | None,
    overrides: Sequence[str],
    by: str,
    spec_file: Path | None = None,
    root: Path | None = None,
    writer: str = "cli",
) -> RunPaths:
    """Create the run `name` from the committed checkpoint `directory` of `parent`.

    The run is not started. See `plan_fork` for its spec, its place and what is refused, and
    `check_everything` for what is checked besides.
    """
    plan = plan_fork(
        parent, directory, name=name, overrides=overrides, spec_file=spec_file, root=root
    )
    check_everything(plan.spec, plan.root)
    # Checked before the folder exists, so that a fork that cannot start leaves nothing behind.
    require(plan.spec)
    paths = create_run(plan.spec, plan.root, created_by=by, forked=plan.origin)
    uid = history_cache.load_tallied(paths).record.uid
    # In the parent's journal, which protects its checkpoint from deletion.
    with JournalWriter(parent.journal_of(writer)) as journal:
        journal.append(EventKind.FORKED, checkpoint=directory, into_uid=uid, into_run=paths.name)
    return paths


@dataclass(frozen=True)
class PlannedFork:
    """A run that can begin from a checkpoint, and the folder of runs for it."""

    spec: RunSpec
    root: Path
    origin: ForkPoint


def plan_fork(
    parent: RunPaths,
    directory: str,
    *,
    name: str | None,
    overrides: Sequence[str],
    spec_file: Path | None = None,
    root: Path | None = None,
) -> PlannedFork:
    """Return the run `name` from the committed checkpoint `directory` of `parent`. Write nothing.

    Its spec is that of `spec_file`, by default the parent's. A spec file also has a name for the
    run. The run's folder is under `root`, by default the parent's root. Raises `RunConflictError`
    for a name in use, `NotFoundError` or `CheckpointError` for a checkpoint that does not exist or
    is not committed, and `SpecError` without a name or a program or at a size that the checkpoint
    does not fit.
    """
    manifest = committed_manifest(parent, directory)
    require_own_directory(manifest, "start another run from it", _instead_of_fork(manifest))
    spec = _spec_of_fork(parent, name, overrides, spec_file)
    home = root or parent.directory.parent
    if newest_generation(home, spec.name) is not None:
        raise RunConflictError(
            f"a run with the name {spec.name} exists under {home}; choose another --name"
        )
    # A spec file may name another program, and only that program knows what it can load.
    if spec_file is None:
        _require_fit(spec, manifest)
    origin = ForkPoint(
        checkpoint_id=manifest.id, path=parent.checkpoint(directory), run_uid=manifest.run_uid
    )
    return PlannedFork(spec, home, origin)


def _require_fit(spec: RunSpec, manifest: Manifest) -> None:
    """Raise `SpecError` if the same program cannot continue from the checkpoint at this size."""
    if problem := Feasibility(manifest, spec.ranks).problem(spec.gpus):
        raise SpecError(
            f"{problem}. Choose a number of GPUs that can, as by --set resources.gpus_per_node=…. "
            "If another program can load it at this size, give that program's spec with --spec",
            [problem],
        )


def _instead_of_fork(manifest: Manifest) -> str:
    if is_dcp(manifest):
        return (
            "Let the program of a new run load this directory, or begin with its weights: "
            f"`holdfast import {manifest.source} --name NAME`, then fork the imported checkpoint"
        )
    return "Let the program of a new run start from a copy of them"


def _spec_of_fork(
    parent: RunPaths, name: str | None, overrides: Sequence[str], spec_file: Path | None
) -> RunSpec:
    if spec_file is not None:
        named = [] if name is None else [f"name={json.dumps(name)}"]
        return load_spec(spec_file, [*overrides, *named])
    record = history_cache.load_tallied(parent).record
    if record.imported_from is not None:
        raise SpecError(
            f"run {parent.name} was imported from {record.imported_from} and has no program; "
            "start a run from it with `holdfast fork CHECKPOINT --spec run.toml`"
        )
    if name is None:
        raise SpecError("no name is given; expected --name, because two runs cannot share a name")
    # What the parent's user wrote, with the values of its blocks. Its defaults were not written.
    written = record.read_spec().given if record.given is None else record.given
    own = {key: value for key, value in written.items() if key != "blocks"}
    return load_spec({**own, "name": name}, overrides, known=record.origins)


def check_everything(spec: RunSpec, root: Path) -> None:
    """Check cluster, program, root, database and Prefect before a run is created.

    Raises the error of the first check that fails.
    """
    check(spec, root)
    if not sqlite_file.is_ready():
        from holdfast.lineage.database.transactions import open_database

        open_database().close()
    if has_service():
        from holdfast.flows.deployments import check_service

        check_service()


def committed_manifest(paths: RunPaths, directory: str) -> Manifest:
    """Return the manifest of a committed checkpoint.

    Raises `NotFoundError` if there is no such directory, and `CheckpointError` if it was never
    committed or is known to be damaged.
    """
    folder = paths.checkpoint(directory)
    if not folder.is_dir():
        known = [path.name for path in paths.list_checkpoints()[-5:]]
        raise NotFoundError(
            f"{paths.name} has no checkpoint {directory}; its newest checkpoints: "
            f"{', '.join(known) or 'none'}"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} was never committed (no manifest.json); choose one that `holdfast "
            f"checkpoints {paths.name}` lists as committed"
        )
    known_damage.refuse_damaged(paths, directory, "start a run from it")
    return manifest
