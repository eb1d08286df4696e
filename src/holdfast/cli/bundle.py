"""`holdfast bundle RUN`: one archive about a run, without secrets, to attach to a report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast.cli.shared import index, output
from holdfast.cli.shared.arguments import RunArgument
from holdfast.contracts.disk.durable import create_bytes
from holdfast.contracts.errors import OutputExistsError, reading_run
from holdfast.contracts.plain_text import counted

# What is left out of every archive, or of one for its size, is in the manifest only.
PRINTED_MAX: Final = 20


def bundle(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file to write. Default: holdfast-RUN.tar.gz in this folder."
        ),
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Write an archive about a run, without secrets, that you can attach to a report.

    It has the spec, the journals, the documents of each attempt, what Slurm and the index say, the
    stacks, the ends of the logs, what was slow, and versions. MANIFEST.json in it lists what was
    left out.
    """
    from holdfast.cli.support.bundle import make_bundle

    paths = index.locate_run(run, root)
    target = (out or Path(f"holdfast-{paths.name}.tar.gz")).expanduser().absolute()
    output.check_folder_of("--out", target)
    _check_is_new(target)
    with reading_run(paths.directory):
        made = make_bundle(paths)
    # Readable by this user only: logs may be private.
    if not create_bytes(target, made.content, mode=0o600):
        _check_is_new(target)
    facts = {
        "run": paths.name,
        "path": str(target),
        "bytes": len(made.content),
        "files": len(made.files),
        "left_out": made.left_out,
        "secrets_without_a_value_here": made.unknown_secrets,
    }
    _warn(facts)
    output.answer(facts, as_json, _render)


def _check_is_new(target: Path) -> None:
    if os.path.lexists(target):
        raise OutputExistsError(
            f"{target}: exists already and is not overwritten; give another --out, or delete it"
        )


def _warn(facts: Mapping[str, Any]) -> None:
    """Name what could not be read, and the secrets whose values are not known here."""
    unread = [one for one in facts["left_out"] if not one["reason"].startswith("never included")]
    for one in unread[:PRINTED_MAX]:
        output.warn(f"holdfast: left out: {one['name']}: {one['reason']}")
    if len(unread) > PRINTED_MAX:
        output.warn(
            f"holdfast: {len(unread) - PRINTED_MAX} more are in the archive's MANIFEST.json"
        )
    for line in facts["secrets_without_a_value_here"]:
        output.warn(
            f"holdfast: this secret's value is unknown here, so look for it in the logs: {line}"
        )


def _render(facts: Mapping[str, Any]) -> None:
    size = output.bytes_text(facts["bytes"])
    output.say(f"wrote {facts['path']}: {counted(facts['files'], 'file')}, {size}, secrets removed")
    output.say("names of hosts, accounts and paths stay in it; read it before you send it")
