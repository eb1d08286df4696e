"""`holdfast logs RUN`: what the ranks wrote."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from holdfast.cli.index import locate_run, look_at
from holdfast.cli.operate import RunArgument
from holdfast.cli.output import AsJson, RootOption, answer, warn
from holdfast.contracts.errors import ForeignFileError, NotFoundError
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.plain_text import plain_output
from holdfast.contracts.reading import open_regular, read_tail

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
    """Print what a rank wrote, standard output and error of every launch of torchrun in order."""
    paths = locate_run(run, root)
    chosen = choose_attempt(paths, attempt)
    if as_json:
        files = [
            {"path": str(path), "text": read_tail(path, JSON_BYTES_MAX, below=chosen.directory)}
            for path in rank_logs(chosen, rank)
        ]
        answer(
            {"run": paths.name, "attempt": chosen.number, "rank": rank, "logs": files},
            True,
            typer.echo,
        )
        return
    reader = _Reader()
    printed = reader.print_new(rank_logs(chosen, rank), chosen.directory)
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
    """Prints each file from where it was left."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}

    def print_new(self, files: list[Path], below: Path) -> bool:
        """Print what the files gained since the last call; True when that was anything."""
        printed = False
        for path in files:
            for part in self._parts(path, below):
                # A log is the program's own words, and they are no commands to a terminal.
                typer.echo(plain_output(part), nl=False)
                printed = True
        sys.stdout.flush()
        return printed

    def _parts(self, path: Path, below: Path) -> Iterator[str]:
        decoder = self._decoders.setdefault(path, _DECODER(errors="replace"))
        with open(open_regular(path, below=below, follow=True), "rb") as stream:
            size, start = os.fstat(stream.fileno()).st_size, self._offsets.get(path, 0)
            if size - start > PRINTED_BYTES_MAX:
                warn(
                    f"holdfast: {size - start} bytes, of which the last {PRINTED_BYTES_MAX} follow"
                )
                warn(f"holdfast: all of them are in {path}")
                start = size - PRINTED_BYTES_MAX
            stream.seek(start)
            # As much as there is now: a file that grows as fast as it is read has no end.
            left = size - start
            while left > 0 and (part := stream.read(min(left, READ_BYTES_MAX))):
                left -= len(part)
                yield decoder.decode(part)
            self._offsets[path] = stream.tell()


def _follow(
    paths: RunPaths, attempt: AttemptPaths, rank: int, reader: _Reader, *, is_pinned: bool
) -> None:
    """Print on until the attempt, or unless it `is_pinned` the whole run, has ended."""
    ends_at = time.monotonic() + FOLLOW_S_MAX
    while time.monotonic() < ends_at:
        history = look_at(paths)
        view = next(a for a in history.attempts if a.number == attempt.number)
        reader.print_new(rank_logs(attempt, rank), attempt.directory)
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
