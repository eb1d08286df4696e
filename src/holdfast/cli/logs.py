"""`holdfast logs RUN`: print the output of the ranks."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from holdfast.cli.index import locate_run, look_at, secrets_in
from holdfast.cli.operate import RunArgument
from holdfast.cli.output import AsJson, RootOption, answer, warn
from holdfast.contracts.errors import ForeignFileError, NotFoundError
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.plain_text import plain_output
from holdfast.contracts.reading import open_regular
from holdfast.contracts.redaction import read_masked

FOLLOW_S_MAX: Final = 366 * 24 * 3600.0
POLL_S: Final = 0.5
READ_BYTES_MAX: Final = 1024 * 1024
JSON_BYTES_MAX: Final = 1024 * 1024
# Beyond this size, a terminal shows the end only.
PRINTED_BYTES_MAX: Final = 8 * 1024 * 1024
_DECODER: Final = codecs.getincrementaldecoder("utf-8")


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(logs)


def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank whose output to print.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="The attempt. Default: the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the run has ended.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Print a rank's output: standard output and standard error of each launch, in order.

    Secrets are masked: the values of the spec's secret references, and text that looks like one.
    """
    paths = locate_run(run, root)
    secrets = secrets_in(paths)
    chosen = choose_attempt(paths, attempt)
    if as_json:
        files = [
            {"path": str(path), "text": _masked_tail(path, chosen.directory, secrets)}
            for path in rank_logs(chosen, rank)
        ]
        answer(
            {"run": paths.name, "attempt": chosen.number, "rank": rank, "logs": files},
            True,
            typer.echo,
        )
        return
    reader = _Reader(secrets)
    printed = reader.print_new(rank_logs(chosen, rank), chosen.directory, is_last=not follow)
    if follow:
        _follow(paths, chosen, rank, reader, is_pinned=attempt is not None)
    elif not printed:
        _list_other_logs(chosen, rank)


def choose_attempt(paths: RunPaths, number: int | None) -> AttemptPaths:
    """Return the attempt `number`, or the last one. Raises `NotFoundError` if there is none."""
    there = paths.list_attempts()
    if not there:
        raise NotFoundError(
            f"{paths.name} has no attempt yet; `holdfast show {paths.name}` shows the reason"
        )
    if number is None:
        return there[-1]
    for attempt in there:
        if attempt.number == number:
            return attempt
    raise NotFoundError(f"{paths.name} has no attempt {number}; the last one is {there[-1].number}")


def rank_logs(attempt: AttemptPaths, rank: int) -> list[Path]:
    """Return the files of a rank's output, by launch, standard output before standard error.

    Anything but a regular file of the attempt, such as a link or a pipe, is logged and skipped.
    """
    found = []
    for path in attempt.logs.glob(f"node-*/l*/rank-{rank:05d}.*.log"):
        try:
            os.close(open_regular(path, below=attempt.directory, follow=True))
            found.append(path)
        except (OSError, ForeignFileError) as error:
            warn(f"holdfast: skipped: {error}")
    return sorted(found, key=lambda path: (path.parent.name, "stderr" in path.name, path.name))


class _Reader:
    """Prints the new part of each file, with its secrets masked."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._spelled = [os.fsencode(secret) for secret in secrets]
        self._offsets: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}

    def print_new(self, files: list[Path], below: Path, *, is_last: bool = True) -> bool:
        """Print the output since the last call; return True if there was any.

        Unless `is_last`, the end of a file that may be the start of a secret is kept back.
        """
        printed = False
        for path in files:
            for part in self._parts(path, below, is_last):
                # Remove terminal control sequences from the program's output.
                typer.echo(plain_output(part), nl=False)
                printed = True
        sys.stdout.flush()
        return printed

    def _parts(self, path: Path, below: Path, is_last: bool) -> Iterator[str]:
        decoder = self._decoders.setdefault(path, _DECODER(errors="replace"))
        with open(open_regular(path, below=below, follow=True), "rb") as stream:
            size, start = os.fstat(stream.fileno()).st_size, self._offsets.get(path, 0)
            if size - start > PRINTED_BYTES_MAX:
                warn(f"holdfast: printing the last {PRINTED_BYTES_MAX} of {size - start} bytes")
                warn(f"holdfast: the complete output is in {path}")
                start = size - PRINTED_BYTES_MAX
            # Read up to the current size only: a growing file might never end.
            end = size if is_last else size - self._unfinished(stream, start, size)
            while start < end:
                part = read_masked(stream, start, min(end - start, READ_BYTES_MAX), self._secrets)
                if not part:
                    break
                start += len(part)
                yield decoder.decode(part)
            self._offsets[path] = start

    def _unfinished(self, stream: BinaryIO, start: int, size: int) -> int:
        """Return how many bytes at the end of a file are an incomplete secret."""
        longest = max(map(len, self._spelled), default=0)
        stream.seek(max(start, size - longest))
        tail = stream.read(size - stream.tell())
        return max(
            (
                count
                for secret in self._spelled
                for count in range(1, min(len(secret) - 1, len(tail)) + 1)
                if tail.endswith(secret[:count])
            ),
            default=0,
        )


def _masked_tail(path: Path, below: Path, secrets: Sequence[str]) -> str:
    """Return the last `JSON_BYTES_MAX` bytes of a file as text, with its secrets masked."""
    with open(open_regular(path, below=below, follow=True), "rb") as stream:
        start = max(0, os.fstat(stream.fileno()).st_size - JSON_BYTES_MAX)
        return read_masked(stream, start, JSON_BYTES_MAX, secrets).decode(errors="replace")


def _follow(
    paths: RunPaths, attempt: AttemptPaths, rank: int, reader: _Reader, *, is_pinned: bool
) -> None:
    """Print new output until the run has ended, or only the attempt if it `is_pinned`."""
    ends_at = time.monotonic() + FOLLOW_S_MAX
    while time.monotonic() < ends_at:
        history = look_at(paths)
        view = next(a for a in history.attempts if a.number == attempt.number)
        is_last = view.state.is_terminal
        reader.print_new(rank_logs(attempt, rank), attempt.directory, is_last=is_last)
        if view.state.is_terminal:
            newer = history.attempts[-1].number > attempt.number
            if is_pinned or not (newer or history.state.is_live):
                return
            if newer:
                attempt = paths.attempt(attempt.number + 1)
                warn(f"--- attempt {attempt.number}")
                continue
        time.sleep(POLL_S)


def _list_other_logs(attempt: AttemptPaths, rank: int) -> None:
    others = [path for path in sorted(attempt.logs.rglob("*")) if not path.is_dir()]
    listing = "".join(f"\n  {path}" for path in others[:20])
    warn(
        f"holdfast: rank {rank} of attempt {attempt.number} has written no output"
        + (f". Other logs of the attempt:{listing}" if listing else "")
    )
