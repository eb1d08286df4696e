"""`holdfast logs RUN`: print the output of the ranks."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import typer

from holdfast.cli.shared.arguments import RunArgument, SinceOption, refuse_unused
from holdfast.cli.shared.index import locate_run, look_at, secrets_in
from holdfast.cli.shared.output import AsJson, RootOption, answer, echo, to_json_text, warn
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.disk.rank_logs import RankLog, choose_attempt, rank_logs
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.plain_text import counted, plain_output
from holdfast.contracts.records.documents import Request, read_document
from holdfast.contracts.redaction import read_masked

FOLLOW_S_MAX: Final = 366 * 24 * 3600.0
POLL_S: Final = 0.5
READ_BYTES_MAX: Final = 1024 * 1024
JSON_BYTES_MAX: Final = 1024 * 1024
# A longer line without an end is printed in parts.
LINE_CHARACTERS_MAX: Final = 1024 * 1024
# Beyond this size, a terminal shows the end only.
PRINTED_BYTES_MAX: Final = 8 * 1024 * 1024
# A text, and the Unix time at which it was in the file.
_Part = tuple[str, float | None]
_DECODER: Final = codecs.getincrementaldecoder("utf-8")


def logs(
    context: typer.Context,
    run: RunArgument,
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank whose output to print.")] = 0,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="Print the output of every rank, with its number.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="The attempt. Default: the last one.")
    ] = None,
    all_attempts: Annotated[
        bool, typer.Option("--all-attempts", help="Print the output of every attempt, in order.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Print the last N lines per file.")
    ] = None,
    since: SinceOption = None,
    grep: Annotated[
        re.Pattern[str] | None,
        typer.Option(
            "--grep", parser=parse_pattern, metavar="REGEX", help="Print matching lines only."
        ),
    ] = None,
    timestamps: Annotated[
        bool,
        typer.Option("--timestamps", help="Begin each line with the time at which it was there."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the run has ended.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Print a rank's output: standard output and standard error of each launch, in order.

    --since leaves out the files whose last output is older. The times of --timestamps are up to a
    minute late. Secrets are masked: those that the spec refers to, and text that looks like one.
    """
    _check(context, timestamps=timestamps, is_one_document=as_json and not follow)
    paths = locate_run(run, root)
    secrets = secrets_in(paths)
    chosen = choose_attempt(paths, attempt)
    wanted = None if all_ranks else rank
    is_stream = as_json and follow
    lines = LineFilter(grep=grep, tail=tail, show_rank=all_ranks and not is_stream, whole=is_stream)
    lines.show_time = timestamps and not is_stream
    shown = paths.list_attempts() if all_attempts else [chosen]
    found = {one.number: sorted_logs(one, wanted, since) for one in shown}
    numbers = [one.number for one in paths.list_attempts()]
    if as_json and not follow:
        facts = {"run": paths.name, "attempts": numbers, "rank": wanted}
        facts["attempt"] = None if all_attempts else chosen.number
        answer({**facts, "logs": _texts(found, lines, secrets)}, True, echo)
        return
    if attempt is None and not all_attempts and len(numbers) > 1:
        warn(
            f"holdfast: attempt {chosen.number}, the last of {len(numbers)}; `holdfast logs "
            f"{paths.name} --attempt N` prints an earlier one, --all-attempts all of them"
        )
    reader = _Reader(secrets, lines, as_json=as_json, with_times=timestamps)
    printed = False
    for number, logs in found.items():
        if all_attempts:
            warn(f"--- attempt {number}")
        printed |= reader.print_new(logs, is_last=not follow or number != chosen.number)
    if follow:
        lines.tail = None
        _follow(paths, chosen, wanted, reader, is_pinned=attempt is not None)
    elif not printed and tail != 0:
        _list_other_logs(chosen, wanted)


def _texts(
    found: Mapping[int, Sequence[RankLog]], lines: LineFilter, secrets: Sequence[str]
) -> list[dict[str, object]]:
    """Return the chosen text of each file, for one document of JSON."""
    return [
        {**_source(log), "text": lines.select(log, _masked_tail(log, secrets))}
        for logs in found.values()
        for log in logs
    ]


def _check(context: typer.Context, *, timestamps: bool, is_one_document: bool) -> None:
    """Raise `SpecError` or `typer.BadParameter` for options that exclude each other."""
    for one, every in (("attempt", "all_attempts"), ("rank", "all_ranks")):
        if context.params[every]:
            option = every.replace("_", "-")
            refuse_unused(context, f"--{option} prints every {one}", one)
    if timestamps and is_one_document:
        raise typer.BadParameter(
            "--timestamps and --json: add --follow, which prints an object for each line, with its "
            "time in `at`"
        )


def sorted_logs(
    attempt: AttemptPaths, rank: int | None, since: float | None = None
) -> list[RankLog]:
    """Return a rank's logs, or every rank's, by launch, standard output before standard error.

    Files whose last output is older than `since` (Unix seconds) are left out.
    """

    def skip(error: Exception) -> None:
        warn(f"holdfast: skipped: {error}")

    found = [
        one
        for one in rank_logs(attempt, rank, on_skip=skip)
        if since is None or one.changed_at >= since
    ]
    return sorted(found, key=lambda one: (one.launch, one.stream == "stderr", one.rank))


def parse_pattern(text: str) -> re.Pattern[str]:
    """Return a compiled regular expression. Raises `typer.BadParameter` for an invalid one."""
    try:
        return re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r}: not a regular expression: {error}") from None


class LineFilter:
    """Selects what to print of each file: the lines that match, the last ones, with the rank.

    Without a condition, text passes unchanged and immediately, even an incomplete last line. With
    `whole`, only whole lines pass.
    """

    def __init__(
        self,
        *,
        grep: re.Pattern[str] | None,
        tail: int | None,
        show_rank: bool,
        whole: bool = False,
    ) -> None:
        self.tail = tail
        # Each line then begins with its time, or with "-" if that is not known.
        self.show_time = False
        self._whole = whole
        self._grep, self._show_rank = grep, show_rank
        self._unfinished: dict[Path, tuple[str, float | None]] = {}

    def select(self, log: RankLog, text: str) -> str:
        """Return what to print of `text`, the whole content of a file."""
        return "".join(one for one, _ in self.feed(log, [(text, None)], is_last=True))

    def feed(self, log: RankLog, parts: Iterable[_Part], *, is_last: bool) -> Iterator[_Part]:
        """Yield what to print of the next parts of a file, each text with its time."""
        has_condition = self._grep is not None or self.tail is not None or self._show_rank
        if not has_condition and not self._whole and not self.show_time:
            yield from parts
            return
        lines = self._lines(log, parts, is_last)
        yield from lines if self.tail is None else deque(lines, maxlen=self.tail)

    def _lines(self, log: RankLog, parts: Iterable[_Part], is_last: bool) -> Iterator[_Part]:
        path = log.path
        for part, at in parts:
            former, began = self._unfinished.pop(path, ("", at))
            lines = (former + part).splitlines(keepends=True)
            times = [began, *[at] * (len(lines) - 1)]
            if lines and not lines[-1].endswith("\n") and len(lines[-1]) < LINE_CHARACTERS_MAX:
                self._unfinished[path] = lines.pop(), times[len(lines)]
            for line, when in zip(lines, times, strict=False):
                if self._is_chosen(line):
                    yield self._prefix(log, when) + line, when
        line, when = self._unfinished.pop(path, ("", None)) if is_last else ("", None)
        if line and self._is_chosen(line):
            yield f"{self._prefix(log, when)}{line}\n", when

    def _prefix(self, log: RankLog, at: float | None) -> str:
        time = f"{_moment(at)} " if self.show_time else ""
        return f"{time}{log.rank}: " if self._show_rank else time

    def _is_chosen(self, line: str) -> bool:
        return self._grep is None or self._grep.search(line.rstrip("\n")) is not None


class _Reader:
    """Prints the new part of each file, with its secrets masked, as text or an object per line."""

    def __init__(
        self,
        secrets: Sequence[str],
        lines: LineFilter,
        *,
        as_json: bool = False,
        with_times: bool = False,
    ) -> None:
        self._lines, self._as_json, self._with_times = lines, as_json, with_times
        self._secrets = secrets
        self._spelled = [os.fsencode(secret) for secret in secrets]
        self._offsets: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}

    def print_new(self, logs: Iterable[RankLog], *, is_last: bool) -> bool:
        """Print the output since the last call; return True if there was any.

        Unless `is_last`, the end of a file that may be the start of a secret is kept back.
        """
        printed = False
        for log in logs:
            parts = self._parts(log, is_last)
            for part, at in self._lines.feed(log, parts, is_last=is_last):
                if self._as_json:
                    when = {"at": at} if self._with_times else {}
                    echo(to_json_text({**_source(log), **when, "text": part}))
                else:
                    # Remove terminal control sequences from the program's output.
                    echo(plain_output(part), nl=False)
                printed = True
        sys.stdout.flush()
        return printed

    def _parts(self, log: RankLog, is_last: bool) -> Iterator[_Part]:
        """Yield the new text of a file in parts, each with the time at which it was there."""
        path = log.path
        # What is new since the last look has the time of the file.
        is_first = path not in self._offsets
        times = log.times() if self._with_times and is_first else []
        decoder = self._decoders.setdefault(path, _DECODER(errors="replace"))
        with log.open() as stream:
            size, start = os.fstat(stream.fileno()).st_size, self._offsets.get(path, 0)
            if size - start > PRINTED_BYTES_MAX:
                warn(f"holdfast: printing the last {PRINTED_BYTES_MAX} of {size - start} bytes")
                warn(f"holdfast: the complete output is in {path}")
                start = size - PRINTED_BYTES_MAX
            # Read up to the current size only: a growing file might never end.
            end = size if is_last else size - self._unfinished(stream, start, size)
            while start < end:
                number = bisect_right(times, start, key=itemgetter(0))
                is_known = bool(times) or not is_first
                late = (end, log.changed_at if is_known else None)
                reached, at = times[number] if number < len(times) else late
                length = min(end - start, READ_BYTES_MAX, reached - start)
                part = read_masked(stream, start, length, self._secrets)
                if not part:
                    break
                start += len(part)
                yield decoder.decode(part), at
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


def _moment(at: float | None) -> str:
    if at is None:
        return "-"
    return datetime.fromtimestamp(at, UTC).astimezone().isoformat("T", "seconds")


def _source(log: RankLog) -> dict[str, object]:
    """Return where a line of the JSON stream comes from."""
    facts = {name: getattr(log, name) for name in ("launch", "rank", "stream")}
    return {"attempt": int(log.below.name), **facts, "path": str(log.path)}


def _masked_tail(log: RankLog, secrets: Sequence[str]) -> str:
    """Return the last `JSON_BYTES_MAX` bytes of a file as text, with its secrets masked."""
    with log.open() as stream:
        start = max(0, os.fstat(stream.fileno()).st_size - JSON_BYTES_MAX)
        return read_masked(stream, start, JSON_BYTES_MAX, secrets).decode(errors="replace")


def _follow(
    paths: RunPaths, attempt: AttemptPaths, rank: int | None, reader: _Reader, *, is_pinned: bool
) -> None:
    """Print new output until the run has ended, or only the attempt if it `is_pinned`."""
    ends_at = time.monotonic() + FOLLOW_S_MAX
    while time.monotonic() < ends_at:
        history = look_at(paths)
        view = next(a for a in history.attempts if a.number == attempt.number)
        is_last = view.state.is_terminal
        reader.print_new(sorted_logs(attempt, rank), is_last=is_last)
        if view.state.is_terminal:
            newer = history.attempts[-1].number > attempt.number
            if is_pinned or not (newer or history.state.is_live):
                return
            if newer:
                attempt = paths.attempt(attempt.number + 1)
                warn(f"--- attempt {attempt.number}")
                continue
        time.sleep(POLL_S)


def _list_other_logs(attempt: AttemptPaths, rank: int | None) -> None:
    """List what there is instead. Raises `NotFoundError` if the attempt has no such rank."""
    request = read_document(Request, attempt.request)
    if rank is not None and request is not None and rank >= request.world_size:
        ranks = counted(request.world_size, "rank")
        raise NotFoundError(f"no rank {rank}: attempt {attempt.number} has {ranks}")
    from holdfast.workers.runs.restarts import job_logs

    places = dict.fromkeys((attempt.logs, job_logs(attempt)))
    others = [path for one in places for path in sorted(one.rglob("*")) if not path.is_dir()]
    listing = "".join(f"\n  {path}" for path in others[:20])
    who = "all ranks" if rank is None else f"rank {rank}"
    warn(
        f"holdfast: attempt {attempt.number}, {who}: no output that matches"
        + (f". Other logs of the attempt:{listing}" if listing else "")
    )
