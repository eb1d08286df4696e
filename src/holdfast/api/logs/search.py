"""Search in a run's log files: bounded by time and bytes, continued by a cursor.

Secrets are masked before a line counts as a match. Otherwise a search for the beginnings of a
secret would reveal it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from holdfast.api.logs.files import SUPERVISOR, LogName, list_names
from holdfast.api.schemas import LogKind, LogMatch, LogSearch
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import ForeignFileError, QueryError
from holdfast.contracts.redaction import read_masked

SEARCH_S: Final = 0.5
SEARCH_BYTES_MAX: Final = 256 * 1024 * 1024
MATCHES_MAX: Final = 500
TEXT_CHARACTERS_MAX: Final = 200
BLOCK_BYTES: Final = 1024 * 1024
# A mask costs far more than a search, so it covers only what surrounds a candidate.
MASKED_BYTES: Final = 16 * 1024
LINE_BYTES_MAX: Final = 2048
# Texts of which a line with an error has one. They are found fast, and `_ERROR` then decides.
_ERROR_TEXTS: Final = (
    b"Traceback (most",
    b"Error",
    b"Exception",
    b"ERROR",
    b"FATAL",
    b"CRITICAL",
    b"egmentation fault",
    b"core dumped",
    b"out of memory",
    b"oom-kill",
    b"Fatal Python",
)
_ERROR: Final = re.compile(
    rb"Traceback \(most recent call last\)|Fatal Python error|[Ss]egmentation fault|core dumped"
    rb"|out of memory|oom-kill|\b(?:ERROR|FATAL|CRITICAL)\b"
    rb"|(?:^|[\s:\[(])[A-Za-z_][\w.]{0,99}(?:Error|Exception)\b|(?:^|: )Error:",
    re.MULTILINE,
)
_CURSOR: Final = re.compile(r"([0-9]{1,19}):(.{1,200})")


@dataclass(frozen=True)
class LineTest:
    """What a line must have: a text, in upper or lower case, or an error if `text` is empty."""

    text: str

    def candidates(self, block: bytes) -> Iterator[int]:
        """Yield the places in a block where a wanted line may be, in order."""
        if self.text:
            return _places(block.lower(), self.text.encode().lower())
        return heapq.merge(*(_places(block, one) for one in _ERROR_TEXTS))

    def is_in(self, line: bytes) -> bool:
        """Return True if the line, with its secrets masked, has what is wanted."""
        if self.text:
            return self.text.encode().lower() in line.lower()
        return _ERROR.search(line) is not None


def _places(block: bytes, text: bytes) -> Iterator[int]:
    at = block.find(text)
    while at >= 0:
        yield at
        at = block.find(text, at + len(text))


@dataclass(frozen=True)
class Where:
    """The files to search: of one attempt or all, of one kind or all, or only `file`."""

    attempt: int | None = None
    kinds: tuple[LogKind, ...] = ()
    rank: int | None = None
    file: str | None = None


@dataclass
class _Budget:
    """What a request may still do."""

    matches: int
    bytes: int = field(default_factory=lambda: SEARCH_BYTES_MAX)
    ends_at: float = field(default_factory=lambda: time.monotonic() + SEARCH_S)

    def is_spent(self) -> bool:
        return self.matches <= 0 or self.bytes <= 0 or time.monotonic() >= self.ends_at


def search_logs(
    paths: RunPaths,
    wanted: LineTest,
    where: Where,
    *,
    after: str | None,
    limit: int,
    secrets: Sequence[str],
) -> LogSearch:
    """Search the files in order until a bound is reached. `next` continues after it.

    The newest attempt comes first. Raises `QueryError` for a cursor that no search returned.
    """
    offset, resumed = _read_cursor(after)
    budget = _Budget(limit)
    result = LogSearch(matches=[], next=None, searched_bytes=0, searched_files=0)
    for name in _names(paths, where, resumed):
        start = offset if resumed is not None and name.name == resumed.name else 0
        if budget.is_spent():
            result.next = f"{start}:{name.name}"
            break
        result.searched_files += 1
        with contextlib.suppress(OSError, ForeignFileError), name.open(paths) as file:
            until = _search_file(file, start, wanted, budget, secrets, _adder(result, name))
            result.searched_bytes += until - start
            if until < os.fstat(file.fileno()).st_size and budget.is_spent():
                result.next = f"{until}:{name.name}"
                break
    return result


def _adder(result: LogSearch, name: LogName) -> Callable[[int, bytes], None]:
    def add(offset: int, line: bytes) -> None:
        result.matches.append(
            LogMatch(
                file=name.name,
                kind=name.kind,
                attempt=name.attempt,
                node=name.node,
                launch=name.launch,
                rank=name.rank,
                stream=name.stream,
                offset=offset,
                text=line.decode(errors="replace"),
            )
        )

    return add


def _names(paths: RunPaths, where: Where, resumed: LogName | None) -> Iterator[LogName]:
    """Yield the files to search in order, from `resumed` on."""
    if where.file is not None:
        only = LogName.parse(where.file)
        yield from () if only is None else (only,)
        return
    is_there = resumed is None
    for name in _all_names(paths, where, resumed):
        if where.kinds and name.kind not in where.kinds:
            continue
        if where.rank is not None and name.rank != where.rank:
            continue
        is_there = is_there or _is_from(name, resumed)
        if is_there:
            yield name


def _is_from(name: LogName, resumed: LogName | None) -> bool:
    """Return True for the file of a cursor, and for those after it if it was deleted."""
    if resumed is None or name.name == resumed.name:
        return True
    if name.attempt is None or resumed.attempt is None:
        return False
    return (-name.attempt, name.order) > (-resumed.attempt, resumed.order)


def _all_names(paths: RunPaths, where: Where, resumed: LogName | None) -> Iterator[LogName]:
    """Yield the files of the attempts, newest first, and last the supervisor's."""
    numbers = [n for n in paths.attempt_numbers() if where.attempt in {None, n}]
    if resumed is not None and resumed.kind is LogKind.SUPERVISOR:
        numbers = []
    elif resumed is not None and resumed.attempt is not None:
        # The earlier ones were searched, and need not be listed again.
        numbers = [n for n in numbers if n <= resumed.attempt]
    for number in reversed(numbers):
        yield from list_names(paths, paths.attempt(number))
    if where.attempt is None:
        supervisor = LogName.parse(SUPERVISOR)
        assert supervisor is not None
        yield supervisor


def _read_cursor(after: str | None) -> tuple[int, LogName | None]:
    if after is None:
        return 0, None
    match = _CURSOR.fullmatch(after)
    name = LogName.parse(match[2]) if match else None
    if match is None or name is None:
        raise QueryError("after is not a cursor of this search; expected `next` of the last answer")
    return int(match[1]), name


def _search_file(
    file: BinaryIO,
    start: int,
    wanted: LineTest,
    budget: _Budget,
    secrets: Sequence[str],
    add: Callable[[int, bytes], None],
) -> int:
    """Search a file from `start`, and return where the next search of it begins."""
    at = start
    while not budget.is_spent():
        file.seek(at)
        block = file.read(BLOCK_BYTES)
        if not block:
            break
        if len(block) == BLOCK_BYTES:
            # Complete lines only. A longer line is searched in parts that overlap.
            block = block[: block.rfind(b"\n") + 1] or block[:-LINE_BYTES_MAX]
        masked = _Masked(file, secrets)
        budget.bytes -= len(block)
        reached = 0
        for place in wanted.candidates(block):
            if place < reached:
                continue
            if budget.is_spent():
                return at + reached
            first, last = _line_around(block, place)
            line = masked.read(at + first, last - first)
            if wanted.is_in(line):
                add(at + first, line)
                budget.matches -= 1
            end = block.find(b"\n", place)
            # Of a long line, each part counts.
            reached = min(last, len(block)) if end < 0 or end >= last else end + 1
        at += len(block)
    return at


def _line_around(block: bytes, place: int) -> tuple[int, int]:
    """Return the (start, end) of the line at `place`, or of a part of a long one."""
    first = max(block.rfind(b"\n", 0, place) + 1, place - LINE_BYTES_MAX // 2)
    end = block.find(b"\n", place)
    return first, min(len(block) if end < 0 else end, first + LINE_BYTES_MAX)


class _Masked:
    """Masked bytes of a file, kept for the lines that follow."""

    def __init__(self, file: BinaryIO, secrets: Sequence[str]) -> None:
        self._file, self._secrets = file, secrets
        self._start, self._content = 0, b""

    def read(self, start: int, limit: int) -> bytes:
        end = start + limit
        if not self._start <= start <= end <= self._start + len(self._content):
            self._start = start
            self._content = read_masked(self._file, start, max(limit, MASKED_BYTES), self._secrets)
        return self._content[start - self._start : end - self._start]
