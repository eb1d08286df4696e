"""Asks NCCL's RAS what it knows about the ranks, and reads its answer.

Each process with NCCL 2.24 or newer has a RAS thread. All of them know the whole job, and those of
a node listen at one address. So one node asks. The agent of that node stores the answer in the
dump, and node 0 reads it from there. A rank that has no RAS, or has turned it off, is not asked.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import ForeignFileError
from holdfast.workers.agent.watch.stack_text import ranks_text

ADDRESS: Final = "NCCL_RAS_ADDR"
DEFAULT_ADDRESS: Final = "localhost:28028"
FILE: Final = "nccl-ras.txt"
CUT_FILE: Final = "nccl-ras.cut.txt"
# One node asks with each of a suspicion's first samples, until one has an answer.
NODES_MAX: Final = 3
# RAS waits this long for processes that do not answer, and for five seconds more at most.
GATHER_S: Final = 2
ANSWER_S_MAX: Final = 10.0
# Processes that RAS reaches only through a lost one do not answer. It soon finds another way.
AGAIN_AFTER_S: Final = 6.0
# Another job's process may answer, and a stopped one accepts connections. The next may be another.
HELLO_S_MAX: Final = 1.0
TRIES: Final = 40
LINE_BYTES_MAX: Final = 4096
ANSWER_BYTES_MAX: Final = 8 << 20
RECEIVE_BYTES: Final = 1 << 16
READ_S_MAX: Final = 2 * ANSWER_S_MAX + AGAIN_AFTER_S + 10.0
POLL_S: Final = 0.25


def start_asking(pids: Sequence[int], folder: Path, number: int) -> bool:
    """Start to ask the ranks of a node, and return True if this is its turn and they have RAS.

    `folder` is the node's folder of a dump, and `number` counts the dump's samples. Node 0 asks
    with the first one, and node 1 with the second one if there is no answer yet.
    """
    name, _, dump = folder.name.rpartition("-")
    if number > NODES_MAX or name != f"node-{number - 1:04d}":
        return False
    if _answers(folder.parent, dump):
        return False
    address = _find_address(pids)
    if address is None:
        return False
    threading.Thread(
        target=_store, args=(address, pids, folder), name="nccl-ras", daemon=True
    ).start()
    return True


def _find_address(pids: Sequence[int]) -> tuple[str, int] | None:
    """Return where a process listens for RAS clients, or None. No other program is asked."""
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            text = psutil.Process(pid).environ().get(ADDRESS, DEFAULT_ADDRESS)
            host, _, port = text.rpartition(":")
            for one in _connections(pid):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == int(port):
                    return host.strip("[]"), int(port)
    return None


def _connections(pid: int) -> Iterator[Any]:
    with contextlib.suppress(psutil.Error, OSError):
        yield from psutil.Process(pid).net_connections(kind="tcp")


def _store(address: tuple[str, int], pids: Sequence[int], folder: Path) -> None:
    """Ask, and write what comes into the dump. Without an answer, nothing is written."""
    answer, is_whole = _ask(address, pids)
    if is_whole and has_timeouts(answer):
        time.sleep(AGAIN_AFTER_S)
        again, is_again_whole = _ask(address, pids)
        answer = again if is_again_whole else answer
    if answer:
        with contextlib.suppress(OSError):
            durable.write_bytes(folder / (FILE if is_whole else CUT_FILE), answer, mode=0o600)


def _ask(address: tuple[str, int], pids: Sequence[int]) -> tuple[bytes, bool]:
    """Return what a process answers, and whether it came to its end."""
    give_up = time.monotonic() + ANSWER_S_MAX
    for _ in range(TRIES):
        with (
            # `ValueError` is for a host that is not a name.
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(address, timeout=HELLO_S_MAX) as connection,
        ):
            if _greet(connection, pids):
                return _receive(connection, give_up)
        if time.monotonic() > give_up:
            break
    return b"", False


def _greet(connection: socket.socket, pids: Sequence[int]) -> bool:
    """Agree on the form of the answer and request it. Return False if these are not our ranks.

    All processes of a user on a node listen at the same address, those of another job too.
    """
    if not _say(connection, "CLIENT PROTOCOL 2").startswith(b"SERVER PROTOCOL "):
        return False
    own = connection.getsockname()[:2]
    if not any(tuple(one.raddr) == own for pid in pids for one in _connections(pid)):
        return False
    _say(connection, f"TIMEOUT {GATHER_S}")
    # NCCL before 2.28.7 answers that it does not know this command, and then answers in text.
    _say(connection, "SET FORMAT json")
    connection.sendall(b"VERBOSE STATUS\n")
    return True


def _say(connection: socket.socket, command: str) -> bytes:
    """Send a command and return the line that answers it. Raises `OSError` without one."""
    connection.sendall(f"{command}\n".encode())
    line = bytearray()
    give_up = time.monotonic() + HELLO_S_MAX
    while not line.endswith(b"\n"):
        if not _receive_once(connection, line, give_up) or len(line) > LINE_BYTES_MAX:
            raise ConnectionError("no line")
    return bytes(line)


def _receive(connection: socket.socket, give_up: float) -> tuple[bytes, bool]:
    """Return what comes, and whether it came to its end."""
    answer = bytearray()
    with contextlib.suppress(OSError):
        while len(answer) <= ANSWER_BYTES_MAX:
            if not _receive_once(connection, answer, give_up):
                return bytes(answer), bool(answer)
    return bytes(answer[:ANSWER_BYTES_MAX]), False


def _receive_once(connection: socket.socket, into: bytearray, give_up: float) -> bool:
    """Append the next bytes, and return False at the end. Raises `OSError` after `give_up`."""
    left_s = give_up - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    connection.settimeout(left_s)
    received = connection.recv(RECEIVE_BYTES)
    into += received
    return bool(received)


class AnswerReader:
    """Reads the answer of a dump in a thread, once a node has stored it."""

    def __init__(
        self, attempt: AttemptPaths, dump: int, pids: Mapping[int, int], world_size: int
    ) -> None:
        """`pids` has the process of each rank."""
        self.finding = ""
        self._attempt, self._dump = attempt, dump
        self._pids, self._world_size = pids, world_size
        threading.Thread(target=self._run, name="nccl-ras-answer", daemon=True).start()

    def _run(self) -> None:
        give_up = time.monotonic() + READ_S_MAX
        while time.monotonic() < give_up:
            time.sleep(POLL_S)
            for path in _answers(self._attempt.dumps, f"{self._dump:02d}"):
                with contextlib.suppress(OSError):
                    self.finding = self._read(path)
                    return

    def _read(self, path: Path) -> str:
        try:
            content = reading.read_bounded(path, ANSWER_BYTES_MAX)
            if path.name == CUT_FILE:
                raise ValueError("it did not come to its end")
            found = describe(read_answer(content), self._pids, self._world_size)
        except (ForeignFileError, ValueError) as error:
            return f"the answer of NCCL RAS in {path.name} cannot be read: {error}"
        return f"by NCCL RAS, {found}" if found else ""


def _answers(dumps: Path, dump: str) -> list[Path]:
    return [path for name in (FILE, CUT_FILE) for path in dumps.glob(f"node-*-{dump}/{name}")]


# What an answer says: dead processes, and ranks that the others wait for. Pure functions.
#
# NCCL counts each rank's calls of each collective of a communicator. In a hang, the ranks with
# fewer calls are those that the others wait for. From NCCL 2.28.7 on, the answer is JSON with the
# counts of every rank. Before that, it is a text with the counts of the few ranks that differ from
# most.

NAMED_MAX: Final = 4
_NUMBER_MAX: Final = 1 << 64
_HOST: Final = re.compile(r"[0-9A-Za-z.:%_-]{1,64}")
_WORD: Final = re.compile(r"\w{1,32}", re.ASCII)
_HASH: Final = re.compile(r"(?:0x)?([0-9a-f]{1,16})")
_TIMEOUTS: Final = re.compile(rb'"timeouts_count": [1-9]')
TAIL_BYTES: Final = 1000
# The text, as each line of it is printed.
_TITLES: Final = ("Errors\n======\n", "Warnings\n========\n")
_TABLE: Final = "Group     Comms "
_TABLE_COLUMNS: Final = 8
_ABOUT: Final = re.compile(r"#(\d{1,9})-\d{1,9} \(([0-9a-f]{1,16})\) [A-Z]+", re.ASCII)
_LAG: Final = re.compile(r"  Communicator ranks have different (\w{1,32}) operation counts", re.A)
_STATUS: Final = "  Communicator ranks have different status"
_LAUNCHED: Final = r"(?:launched up to operation (\d{1,20})|not launched any operations)"
_SEVERAL: Final = re.compile(rf"  (\d{{1,9}}) ranks have {_LAUNCHED}", re.ASCII)
_ONE: Final = re.compile(rf"  Rank (\d{{1,9}}) has {_LAUNCHED} -- (.*)", re.ASCII)
_MEMBER: Final = re.compile(r"  Rank (\d{1,9}) -- (.*)", re.ASCII)
_MANAGED: Final = re.compile(r"GPU .* managed by process (\d{1,10}) on node (\S{1,64})", re.ASCII)
_PROCESS: Final = re.compile(r"  Process (\d{1,10}) on node (\S{1,64}) managing GPU.*", re.ASCII)


@dataclass(frozen=True)
class RasProcess:
    """A process as NCCL names it. `rank` is its rank in a communicator of `size`, or -1."""

    pid: int
    host: str
    rank: int = -1
    size: int = 0


@dataclass(frozen=True)
class RasGroup:
    """Ranks with equally many calls of an operation. The text names few of the `count`."""

    calls: int
    count: int
    members: tuple[RasProcess, ...] = ()


@dataclass(frozen=True)
class RasLag:
    """Ranks of a communicator that differ in an operation. `groups` has the fewest calls first."""

    communicator: str
    operation: str
    groups: tuple[RasGroup, ...]


@dataclass(frozen=True)
class RasAnswer:
    """What an answer says. `silent` processes did not answer, and may be alive."""

    dead: tuple[RasProcess, ...] = ()
    silent: tuple[RasProcess, ...] = ()
    lags: tuple[RasLag, ...] = ()
    has_communicators: bool = False


def read_answer(content: bytes) -> RasAnswer:
    """Return what an answer says. Raises `ValueError` if it is none of NCCL's."""
    try:
        if content.lstrip().startswith(b"{"):
            return _read_json(json.loads(content))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not as NCCL writes it: {error}") from error
    text = content.decode(errors="replace")
    if not text.startswith("NCCL version ") or any(title not in text for title in _TITLES):
        raise ValueError("it has not the parts of NCCL's text")
    return _TextReader().read(text)


def has_timeouts(content: bytes) -> bool:
    """Return True if processes did not answer RAS, so that a later answer may have more."""
    return b"\nTIMEOUT\n" in content or _TIMEOUTS.search(content[-TAIL_BYTES:]) is not None


# --- JSON ---------------------------------------------------------------------------------------


def _read_json(data: Any) -> RasAnswer:
    dead: dict[RasProcess, None] = {}
    silent: dict[RasProcess, None] = {}
    lags: list[RasLag] = []
    for one in data["communicators"]:
        size, name = _number(one["size"]), _matched(_HASH, one["hash"])
        for missing in one["missing_ranks"]:
            status = missing["status"]
            # A process that answers may have left the communicator.
            if status["considered_dead"] is True:
                dead[_json_process(missing, size)] = None
            elif status["unresponsive"] is True:
                silent[_json_process(missing, size)] = None
        by_count: dict[str, dict[int, list[RasProcess]]] = defaultdict(lambda: defaultdict(list))
        for rank in one["ranks"]:
            process = _json_process(rank, size)
            for operation, launched in rank["collective_counts"].items():
                by_count[_matched(_WORD, operation)][_number(launched)].append(process)
        for operation, found in by_count.items():
            groups = [RasGroup(n, len(members), (*members,)) for n, members in found.items()]
            lags += _lag(name, operation, groups)
    return RasAnswer((*dead,), (*silent,), (*lags,), bool(data["communicators"]))


def _json_process(one: Any, size: int) -> RasProcess:
    # NCCL writes -1 and "unknown" for a process that it cannot find.
    pid = -1 if one["pid"] == -1 else _number(one["pid"])
    return RasProcess(pid, _matched(_HOST, one["host"]), _number(one["rank"]), size)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _NUMBER_MAX:
        raise ValueError("a number is none")
    return value


def _matched(pattern: re.Pattern[str], text: Any) -> str:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError("a name is none of NCCL's")
    return match[match.lastindex or 0]


def _lag(communicator: str, operation: str, groups: Iterable[RasGroup]) -> Iterator[RasLag]:
    ordered = sorted(groups, key=lambda group: group.calls)
    if len(ordered) > 1:
        yield RasLag(communicator, operation, (*ordered,))


# --- text ---------------------------------------------------------------------------------------


@dataclass
class _TextReader:
    """Reads the text line by line. Lines that it does not know end the part before them."""

    sizes: dict[str, int] = field(default_factory=dict)
    found: dict[str, list[RasProcess]] = field(default_factory=lambda: defaultdict(list))
    lags: list[RasLag] = field(default_factory=list)
    # The part of the text that is being read.
    part: str = ""
    about: tuple[str, int] = ("", 0)
    operation: str = ""
    # Of each group: the calls, how many ranks, and those that the text names.
    groups: list[tuple[int, int, list[RasProcess]]] = field(default_factory=list)

    def read(self, text: str) -> RasAnswer:
        for line in text.splitlines():
            self._line(line)
        self._end_lag()
        dead, silent = self.found["DEAD"], self.found["INCOMPLETE"]
        return RasAnswer((*dead,), (*silent,), (*self.lags,), bool(self.sizes))

    def _line(self, line: str) -> None:
        if not line.startswith("  "):
            self._end_lag()
            self.part = self.part if line else ""
        if line.startswith(_TABLE):
            self.part = _TABLE
        elif line in {"INCOMPLETE", "DEAD"}:
            self.part = line
        elif match := _ABOUT.fullmatch(line):
            self.part, self.about = "", (match[2].lstrip("0"), self.sizes.get(match[1], 0))
        elif self.part == _TABLE:
            self._row(line.split())
        elif self.part and (match := _PROCESS.fullmatch(line)):
            self.found[self.part].append(_text_process(match, -1, 0))
        elif line == _STATUS or (match := _LAG.fullmatch(line)):
            self._end_lag()
            self.operation = match[1] if match else ""
        elif self.operation:
            self._counts(line)

    def _row(self, columns: Sequence[str]) -> None:
        if len(columns) == _TABLE_COLUMNS and columns[4].isdecimal() and len(columns[4]) < 10:
            self.sizes[columns[0]] = int(columns[4])

    def _counts(self, line: str) -> None:
        if match := _SEVERAL.fullmatch(line):
            self.groups.append((int(match[2] or 0), int(match[1]), []))
        elif match := _ONE.fullmatch(line):
            self.groups.append((int(match[2] or 0), 1, [self._member(match[1], match[3])]))
        elif self.groups and (match := _MEMBER.fullmatch(line)):
            self.groups[-1][2].append(self._member(match[1], match[2]))

    def _member(self, rank: str, managed: str) -> RasProcess:
        match = _MANAGED.fullmatch(managed)
        if match is None:
            return RasProcess(-1, "unknown", int(rank), self.about[1])
        return _text_process(match, int(rank), self.about[1])

    def _end_lag(self) -> None:
        groups = [RasGroup(calls, count, (*members,)) for calls, count, members in self.groups]
        self.lags += _lag(self.about[0], self.operation, groups)
        self.operation, self.groups = "", []


def _text_process(match: re.Match[str], rank: int, size: int) -> RasProcess:
    host = match[2] if _HOST.fullmatch(match[2]) else "unknown"
    return RasProcess(int(match[1]), host, rank, size)


# --- findings -----------------------------------------------------------------------------------


def describe(answer: RasAnswer, pids: Mapping[int, int], world_size: int) -> str:
    """Return what the answer shows, or an empty text. `pids` has the process of each rank."""
    names = _Names(pids, world_size)
    parts = [
        f"{names.text(processes)} on {host} {one if len(names.all(processes)) == 1 else several}"
        for one, several, found in (
            ("counts as dead", "count as dead", answer.dead),
            ("does not answer", "do not answer", answer.silent),
        )
        for host, processes in _by_host(found)
    ]
    parts += _behind(answer.lags, names)
    if not parts and answer.has_communicators:
        return "every process answers, and all ranks have launched the same collectives"
    more = len(parts) - NAMED_MAX
    return ", ".join(parts[:NAMED_MAX] + ([f"{more} more like these"] if more > 0 else []))


class _Names:
    """The job's rank of a process: by its pid, or by its place in a communicator of all ranks."""

    def __init__(self, pids: Mapping[int, int], world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[int, list[int]] = defaultdict(list)
        for rank, pid in pids.items():
            self._ranks[pid].append(rank)

    def of(self, process: RasProcess) -> int | str:
        """Return the rank, or a text that names the process."""
        ranks = self._ranks.get(process.pid, [])
        if len(ranks) == 1:
            return ranks[0]
        if process.size == self._world_size and 0 <= process.rank < self._world_size:
            return process.rank
        return f"process {process.pid}"

    def all(self, processes: Iterable[RasProcess]) -> set[int | str]:
        return {self.of(one) for one in processes}

    def text(self, processes: Iterable[RasProcess]) -> str:
        names = self.all(processes)
        ranks = [name for name in names if isinstance(name, int)]
        others = sorted(name for name in names if isinstance(name, str))
        more = [f"{len(others) - NAMED_MAX} more"] if len(others) > NAMED_MAX else []
        return " and ".join([*([ranks_text(ranks)] if ranks else []), *others[:NAMED_MAX], *more])


def _by_host(processes: Iterable[RasProcess]) -> Iterator[tuple[str, list[RasProcess]]]:
    found: dict[str, list[RasProcess]] = defaultdict(list)
    for one in processes:
        found[one.host].append(one)
    yield from sorted(found.items())


def _behind(lags: Sequence[RasLag], names: _Names) -> Iterator[str]:
    """Return who is behind. A rank that waits for another one elsewhere is only a consequence."""
    behind = {name for lag in lags for name in names.all(lag.groups[0].members)}
    ahead = {name for lag in lags for group in lag.groups[1:] for name in names.all(group.members)}
    causes = behind - ahead or behind
    for lag in lags:
        fewest, others = lag.groups[0], lag.groups[1:]
        blamed = [one for one in fewest.members if names.of(one) in causes]
        if causes and not blamed:
            continue
        # The text names only the few. If those are ahead, most are behind.
        who = names.text(blamed) if blamed else f"{fewest.count} ranks"
        count = sum(group.count for group in others)
        leaders = f"{count} other{'' if count == 1 else 's'}"
        if not blamed:
            leaders = names.text(one for group in others for one in group.members) or leaders
        # NCCL before 2.26 counts the collectives together.
        operation = "the collectives" if lag.operation == "collective" else lag.operation
        calls = " to ".join(map(str, sorted({others[0].calls, others[-1].calls})))
        yield (
            f"{who} {'is' if len(blamed) == 1 else 'are'} behind in {operation} of "
            f"communicator {lag.communicator} ({fewest.calls} calls, {calls} by {leaders})"
        )
