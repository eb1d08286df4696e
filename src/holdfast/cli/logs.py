"""`holdfast logs RUN`: what the ranks wrote."""

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
# More is for a pager or an editor than for a terminal.
PRINTED_BYTES_MAX: Final = 8 * 1024 * 1024
_DECODER: Final = codecs.getincrementaldecoder("utf-8")


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(logs)


def logs(
    run: RunArgument,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Whose output.")] = 0,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Which attempt; the last one.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Print what a rank wrote, standard output and error of every launch of torchrun in order.

    Secrets are masked: the values of the spec's references, and what looks like one.
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
        _say_where_else(chosen, rank)


def choose_attempt(paths: RunPaths, number: int | None) -> AttemptPaths:
    """The attempt of that number, or the last one. Raises `NotFoundError`."""
    there = paths.list_attempts()
    if not there:
        raise NotFoundError(
            f"{paths.name} has no attempt yet; `holdfast show {paths.name}` says what it waits for"
        )
    if number is None:
        return there[-1]
    for attempt in there:
        if attempt.number == number:
            return attempt
    raise NotFoundError(f"{paths.name} has no attempt {number}; the last is {there[-1].number}")


def rank_logs(attempt: AttemptPaths, rank: int) -> list[Path]:
    """The files of one rank's output, launch by launch, standard output before standard error.

    What is no file of the attempt's, such as a link out of it or a pipe, is named and left out.
    """
    found = []
    for path in attempt.logs.glob(f"node-*/i*/rank-{rank:05d}.*.log"):
        try:
            os.close(open_regular(path, below=attempt.directory, follow=True))
            found.append(path)
        except (OSError, ForeignFileError) as error:
            warn(f"holdfast: left out: {error}")
    return sorted(found, key=lambda path: (path.parent.name, "stderr" in path.name, path.name))


class _Reader:
    """Prints each file from where it was left, with its secrets masked."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._spelled = [os.fsencode(secret) for secret in secrets]
        self._offsets: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}

    def print_new(self, files: list[Path], below: Path, *, is_last: bool = True) -> bool:
        """Print what the files gained since the last call; True when that was anything.

        Unless it `is_last`, an end of a file that may be the first half of a secret waits.
        """
        printed = False
        for path in files:
            for part in self._parts(path, below, is_last):
                # A log is the program's own words, and they are no commands to a terminal.
                typer.echo(plain_output(part), nl=False)
                printed = True
        sys.stdout.flush()
        return printed

    def _parts(self, path: Path, below: Path, is_last: bool) -> Iterator[str]:
        decoder = self._decoders.setdefault(path, _DECODER(errors="replace"))
        with open(open_regular(path, below=below, follow=True), "rb") as stream:
            size, start = os.fstat(stream.fileno()).st_size, self._offsets.get(path, 0)
            if size - start > PRINTED_BYTES_MAX:
                warn(
                    f"holdfast: {size - start} bytes, of which the last {PRINTED_BYTES_MAX} follow"
                )
                warn(f"holdfast: all of them are in {path}")
                start = size - PRINTED_BYTES_MAX
            # As much as there is now: a file that grows as fast as it is read has no end.
            end = size if is_last else size - self._unfinished(stream, start, size)
            while start < end:
                part = read_masked(stream, start, min(end - start, READ_BYTES_MAX), self._secrets)
                if not part:
                    break
                start += len(part)
                yield decoder.decode(part)
            self._offsets[path] = start

    def _unfinished(self, stream: BinaryIO, start: int, size: int) -> int:
        """Bytes at the end of a file that are the beginning of a secret, and not all of it."""
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
    """The last `JSON_BYTES_MAX` bytes of a file as text, its secrets masked."""
    with open(open_regular(path, below=below, follow=True), "rb") as stream:
        start = max(0, os.fstat(stream.fileno()).st_size - JSON_BYTES_MAX)
        return read_masked(stream, start, JSON_BYTES_MAX, secrets).decode(errors="replace")


def _follow(
    paths: RunPaths, attempt: AttemptPaths, rank: int, reader: _Reader, *, is_pinned: bool
) -> None:
    """Print on until the attempt, or unless it `is_pinned` the whole run, has ended."""
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


def _say_where_else(attempt: AttemptPaths, rank: int) -> None:
    others = [path for path in sorted(attempt.logs.rglob("*")) if not path.is_dir()]
    listing = "".join(f"\n  {path}" for path in others[:20])
    warn(
        f"holdfast: rank {rank} of attempt {attempt.number} has written nothing"
        + (f"; there is also:{listing}" if listing else "")
    )
