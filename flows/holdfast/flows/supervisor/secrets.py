"""The submitter's side of secrets: record the values that a node cannot read itself.

`from_env` is read from the environment of the user who submits, and a Prefect block from the
server. A recorded value stays in use if a later supervisor has no value. It is deleted when the
run has ended (`contracts.secrets`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError, SecretError, ServiceError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.redaction import places_of_secrets
from holdfast.contracts.spec import secrets
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.supervisor.deliveries import check_address
from holdfast.workers.runs.reconcile import needs_secrets


@dataclass(frozen=True)
class ReferenceCheck:
    """Whether a reference has a value here. Unless `is_final`, a node may still have one."""

    name: str
    reference: secrets.SecretReference
    problem: str = ""
    is_final: bool = True

    def __str__(self) -> str:
        return secrets.describe(self.name, self.reference, self.problem or "has a value here")


def all_references(spec: RunSpec) -> dict[str, secrets.SecretReference]:
    """Return the references of a spec: variables by name, targets by `place_of_target`."""
    targets = {secrets.place_of_target(name): one for name, one in spec.alerts.targets.items()}
    return {**secrets.references_in(spec.environment), **targets}


def examine(spec: RunSpec, known: Mapping[str, str] | None = None) -> list[ReferenceCheck]:
    """Look up the value of every reference. `known` are the values recorded before."""
    found = []
    is_local = spec.resources.executor == "local"
    for name, reference in all_references(spec).items():
        is_target = name not in spec.environment
        # Nodes do not read the addresses of targets.
        is_final = reference.kind != secrets.FROM_FILE or is_local or is_target
        problem = ""
        try:
            value = _look_up(reference)
            if is_target:
                check_address(value)
        except SecretError as error:
            problem = "" if known and name in known else str(error)
        found.append(ReferenceCheck(name, reference, problem, is_final))
    return found


def require(spec: RunSpec, earlier: RunPaths | None = None) -> list[str]:
    """Check that every reference has a value; return warnings about files that only nodes have.

    `earlier` is a run of the same name, to which the spec may attach. Raises `PreflightError`.
    """
    known = recorded(earlier, spec) if earlier is not None else {}
    missing = [check for check in examine(spec, known) if check.problem]
    problems = [str(check) for check in missing if check.is_final]
    if problems:
        listing = "".join(f"\n  - {problem}" for problem in problems)
        raise PreflightError(
            f"run {spec.name} cannot start: secrets have no value. Nothing was queued:{listing}",
            problems,
        )
    return [f"{check}; the node must be able to read it" for check in missing]


def require_again(paths: RunPaths) -> None:
    """Check that a run that is to continue still has its secrets. Raises `PreflightError`.

    Another user's run is not checked, because only its owner can read its secrets.
    """
    if paths.is_mine():
        found = read_document(RunRecord, paths.spec)
        if found is not None:
            require(RunSpec.read(found.spec), paths)


def plain_secret_warnings(spec: RunSpec) -> list[str]:
    """Return a warning for each key of the spec that looks like a secret in plain text."""
    return [
        f"{place} looks like a secret in plain text, which is stored with the run; use a "
        f"reference in a variable of `environment` instead: {secrets.FORMS}"
        for place in places_of_secrets(spec.given)
    ]


def recorded(paths: RunPaths, spec: RunSpec) -> dict[str, str]:
    """Return the recorded values of one of the caller's runs; none if they cannot be read."""
    try:
        if not paths.is_mine():
            return {}
        return secrets.read_record(paths, all_references(spec))
    except (SecretError, OSError):
        return {}


def report(paths: RunPaths, spec: RunSpec) -> list[str]:
    """Return a line for each reference of one of the caller's runs: whether it has a value."""
    if not paths.is_mine():
        return []
    return [str(check) for check in examine(spec, recorded(paths, spec))]


def record(paths: RunPaths, *, refresh: bool) -> None:
    """Record the values that nodes cannot read, for the run's next attempt.

    With `refresh`, the caller's environment replaces recorded values; otherwise it only adds
    missing ones. Prefect's blocks are always read again. Raises `SecretError` if a reference has
    no value, neither here nor recorded.
    """
    found = read_document(RunRecord, paths.spec)
    if found is None:
        return
    spec = RunSpec.read(found.spec)
    references = {
        name: reference
        for name, reference in all_references(spec).items()
        if reference.kind != secrets.FROM_FILE
    }
    if not references:
        return
    before = secrets.read_record(paths, references)
    values, problems = dict(before), []
    for name, reference in references.items():
        if name in before and not refresh and reference.kind == secrets.FROM_ENV:
            continue
        try:
            values[name] = _look_up(reference)
        except SecretError as error:
            if name not in before:
                problems.append(secrets.describe(name, reference, error))
    if problems:
        raise SecretError("; ".join(problems))
    if values != before:
        secrets.write_record(paths, references, values)


def forget(paths: RunPaths) -> None:
    """Delete the run's recorded values if it has ended and no consumer may need them."""
    secrets.forget_record(paths, lambda: not needs_secrets(paths, load_tallied(paths)))


def _look_up(reference: secrets.SecretReference) -> str:
    """Return the current value of a reference. Raises `SecretError`."""
    if reference.kind == secrets.FROM_FILE:
        return secrets.read_secret_file(reference.source)
    if reference.kind == secrets.PREFECT_SECRET:
        return secrets.check_value(_load_block(reference.source))
    if reference.source not in os.environ:
        raise SecretError(
            f"the variable {reference.source} is not set here; set it, then submit or relaunch "
            "the run from the same shell"
        )
    return secrets.check_value(os.environ[reference.source])


def _load_block(name: str) -> str:
    """Return the value of a `Secret` block of the configured Prefect API."""
    from holdfast.flows.deployments import api_url, read_secret_block

    if not api_url():
        raise SecretError("no Prefect API is configured here; set PREFECT_API_URL")
    try:
        value: Any = read_secret_block(name)
    except ServiceError as error:
        raise SecretError(str(error)) from error
    if not isinstance(value, str):
        raise SecretError("the block does not contain a string")
    return value
