"""Read the flight records of a node's ranks, and summarise the collectives that did not finish.

    python -m holdfast.trainer.flight_records DIRECTORY [--prefix nccl-rank-] [--json]

Writes `collectives.json` into DIRECTORY, or prints it with `--json`. PyTorch writes a record as a
pickle, or as JSON without code lines. The reader is the one for untrusted pickles, and a record
that it refuses becomes a summary with the reason. The format is that of PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.node import flight
from holdfast.contracts.plain_text import plain_line
from holdfast.trainer.format.plain_pickle import RefusedPickle, read_pickle

PREFIX: Final = "nccl-rank-"
# Above the names and sizes of any collective.
TEXT_BYTES_MAX: Final = 1 << 20
# Objects of JSON take several times as much memory.
JSON_BYTES_MAX: Final = 8 << 20
CHUNK_BYTES: Final = 1 << 20
RECORDS_MAX: Final = 4096
# For the records of a node, or of a whole job.
READ_S_MAX: Final = 240
GROUPS_MAX: Final = 64
TRANSFERS_MAX: Final = 64
RANKS_TEXT_MAX: Final = 1 << 20
ENTRIES_MAX: Final = 100_000
DIMENSIONS_MAX: Final = 64
FRAMES_MAX: Final = 256
SHOWN_CHARACTERS: Final = 400
COMPLETED: Final = "completed"
STARTED: Final = "started"
COALESCED: Final = "coalesced"
GLOO: Final = "gloo:"
_TRANSFER: Final = re.compile(r"(send|recv) (\d{1,6})(?:->|<-)(\d{1,6})")
# Frames of these files call collectives for the program.
_LIBRARIES: Final = ("/torch/", "/holdfast/", "/site-packages/", "/dist-packages/")


_T = TypeVar("_T")
_Entry = dict[str, Any]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.trainer.flight_records", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefix", default=PREFIX)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    ranks = [one.to_json() for one in read_records(given.directory, given.prefix)]
    text = json.dumps({"ranks": ranks})
    if given.json:
        print(text)
    else:
        durable.write_bytes(given.directory / flight.FILE, text.encode())
    return 0


def read_records(directory: Path, prefix: str = PREFIX) -> list[flight.RankFlight]:
    """Return the summaries of the records in `directory`, by rank."""
    ranks = {}
    for path in directory.iterdir():
        number = path.name.removeprefix(prefix)
        if path.name.startswith(prefix) and number.isdecimal() and len(number) <= 6:
            ranks[int(number)] = path
    return [read_record(rank, path) for rank, path in sorted(ranks.items())[:RECORDS_MAX]]


def read_record(rank: int, path: Path) -> flight.RankFlight:
    """Return the summary of one record, with a `problem` if it is not one."""
    try:
        return summarise(rank, _read(path))
    except KeyError as error:
        problem = f"it has no {error}; expected a record of PyTorch 2.5 or newer"
        return flight.RankFlight(rank=rank, problem=problem[:SHOWN_CHARACTERS])
    except Exception as error:
        # A hostile record can raise any exception. Each means that it cannot be used.
        return flight.RankFlight(
            rank=rank, problem=f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
        )


def _read(path: Path) -> Any:
    chunks = _chunks(path)
    first = next(chunks, b"")
    if not first.startswith(b"{"):
        whole = itertools.chain([first], chunks)
        return read_pickle(whole, _refuse, {}, text_max=TEXT_BYTES_MAX)
    content = bytearray(first)
    for piece in chunks:
        content += piece
        if len(content) > JSON_BYTES_MAX:
            raise ForeignFileError(path, f"expected {JSON_BYTES_MAX} bytes of JSON or less")
    record = json.loads(content)
    # Such a record of a rank that has called nothing has no list, and 0 is a time that is unknown.
    entries = _of(dict, record)["entries"] if "pg_status" not in record else record.get("entries")
    for entry in entries or ():
        entry["process_group"] = tuple(entry["process_group"])
        entry["time_discovered_started_ns"] = entry["time_discovered_started_ns"] or None
    return record | {"entries": entries or []}


def _chunks(path: Path) -> Iterator[bytes]:
    """Return the bytes of a record, which has at most `RECORD_BYTES_MAX` of them."""
    with open(reading.open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > flight.RECORD_BYTES_MAX:
            raise ForeignFileError(
                path, f"{size} bytes, expected {flight.RECORD_BYTES_MAX} or less"
            )
        left = flight.RECORD_BYTES_MAX
        while left > 0 and (piece := stream.read(CHUNK_BYTES)):
            left -= len(piece)
            yield piece


def _refuse(module: str, name: str) -> Any:
    raise RefusedPickle(f"it names {module}.{name}, and a flight record names nothing")


def summarise(rank: int, record: Any) -> flight.RankFlight:
    """Return the summary of a record as PyTorch writes it. This function is pure.

    Raises `LookupError`, `TypeError` or `ValueError` for anything else.
    """
    entries = _of(list, _of(dict, record)["entries"])
    if len(entries) > ENTRIES_MAX:
        raise ValueError(f"{len(entries)} entries, expected {ENTRIES_MAX} or less")
    groups: dict[str, list[_Entry]] = {}
    transfers: dict[str, list[_Entry]] = {}
    for entry in _without_finished_parts([_of(dict, entry) for entry in entries]):
        kept = transfers if entry["is_p2p"] else groups
        kept.setdefault(_text(_group_of(entry)[0]), []).append(entry)
    members = _members(_of(dict, record.get("pg_config") or {}))
    found = [_group(name, calls, members.get(name, ())) for name, calls in groups.items()]
    # Groups in which the rank waits say most.
    found.sort(key=lambda group: group.first is None)
    moved = [
        one
        for name, calls in transfers.items()
        for one in _transfers(name, calls, members.get(name, ()))
    ]
    latest = max(entries, key=_order, default=None)
    return flight.RankFlight(
        rank=rank,
        groups=tuple(found[:GROUPS_MAX]),
        transfers=tuple(moved[:TRANSFERS_MAX]),
        latest=_call(latest) if latest else None,
        is_timed=any(
            entry.get("time_discovered_started_ns") is not None or entry["state"] == STARTED
            for entry in entries
        ),
    )


def _without_finished_parts(entries: list[_Entry]) -> list[_Entry]:
    """Return the calls without the parts of finished coalesced calls whose end is left out.

    With `TORCH_INCLUDE_ONLY_ACTIVE`, completed calls are left out, so the numbers of the others
    have gaps. Of a finished coalesced call, the parts remain: PyTorch completes only its end.
    """
    ordered = sorted(entries, key=_order)
    if not ordered or _order(ordered[-1]) - _order(ordered[0]) < len(ordered):
        return ordered
    known = {_order(entry) for entry in ordered}
    runs = [list(run) for _, run in itertools.groupby(ordered, key=_coalesced_by)]

    def lacks_end(run: list[_Entry]) -> bool:
        end = run[-1]
        is_part = _name(end) != COALESCED and (end["is_p2p"] or len(run) > 1)
        return is_part and _order(end) + 1 not in known

    kept = [entry for run in runs[:-1] if not lacks_end(run) for entry in run]
    # The last transfer of a program without batches is open.
    transfers = [run for run in runs[:-1] if run[-1]["is_p2p"]]
    has_batches = any(lacks_end(run) or _name(run[-1]) == COALESCED for run in transfers)
    is_open = not lacks_end(runs[-1]) or not (has_batches or len(runs[-1]) > 1)
    return [*kept, *runs[-1]] if is_open else kept


def _coalesced_by(call: _Entry) -> tuple[str, bool, int]:
    """Return what the parts of a coalesced call have in common."""
    return _text(_group_of(call)[0]), call["is_p2p"] is True, _number(call)


def _members(config: _Entry) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each group, in its order. A record has the text "[0, 1]"."""
    found = {}
    for name, facts in config.items():
        found[_text(name)] = _ranks_in(_of(str, _of(dict, facts)["ranks"])[:RANKS_TEXT_MAX])
    return found


@lru_cache(maxsize=64)
def _ranks_in(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(number) for number in re.findall(r"\d{1,6}", text)))


@lru_cache(maxsize=64)
def _members_text(members: tuple[int, ...]) -> str:
    return flight.span_text(sorted(members))


def _group(name: str, calls: Sequence[_Entry], members: tuple[int, ...]) -> flight.GroupFlight:
    """Return what the rank did in a group. A group's collectives finish in order.

    The parts of a coalesced call are recorded without a state that changes. So what precedes a
    finished collective counts as finished.
    """
    done = max((_sequence(call) for call in calls if _is_done(call)), default=-1)
    newest = max(calls, key=_sequence)
    open_ = [call for call in calls if _sequence(call) > done and not _is_done(call)]
    first = min(open_, key=_sequence, default=None)
    state = _state_of_whole(first, calls) if first else None
    return flight.GroupFlight(
        name=name,
        about=_text(_group_of(newest)[1]),
        members=_members_text(members),
        newest=_call(newest),
        first=_call(first, state) if first else None,
    )


def _state_of_whole(part: _Entry, calls: Sequence[_Entry]) -> str | None:
    """Return the state of the coalesced call that a call is part of, or None if there is none."""
    number = _number(part)
    wholes = (one for one in calls if _name(one) == COALESCED and _number(one) == number)
    return next((_text(one["state"]) for one in wholes), None)


def _transfers(
    name: str, calls: Sequence[_Entry], members: Sequence[int]
) -> Iterator[flight.Transfer]:
    """Return the first open transfer of each direction and peer."""
    done: dict[str, int] = {}
    for call in calls:
        if _is_done(call):
            done[_name(call)] = max(done.get(_name(call), -1), _order(call))
    seen = set()
    for call in sorted(calls, key=_order):
        what = _name(call)
        match = _TRANSFER.fullmatch(what)
        after = max(done.get(what, -1), done.get(COALESCED, -1))
        if match is None or what in seen or _is_done(call) or call["record_id"] <= after:
            continue
        seen.add(what)
        peer = int(match[3])
        # The name has the ranks of the group.
        peer = members[peer] if peer < len(members) else peer
        described = _call(call, _state_of_whole(call, calls))
        yield flight.Transfer(group=name, sends=match[1] == "send", peer=peer, call=described)


def _is_done(call: _Entry) -> bool:
    """Return True for a call that has finished. gloo only retires it, and NCCL also does so late.

    NCCL's entry is retired without being completed if the call has timed out.
    """
    is_retired = call.get("retired") is True and _text(call["profiling_name"]).startswith(GLOO)
    return is_retired or call["state"] == COMPLETED


def _order(call: _Entry) -> int:
    return _whole(call["record_id"])


def _sequence(call: _Entry) -> int:
    return _whole(call["collective_seq_id"])


def _number(call: _Entry) -> int:
    """Return the number of a call in its group, among the collectives or among the transfers."""
    return _whole(call["p2p_seq_id"]) if call["is_p2p"] else _sequence(call)


def _group_of(call: _Entry) -> tuple[Any, ...]:
    return _of(tuple, call["process_group"])


def _name(call: _Entry) -> str:
    """Return the collective's name without that of the library, such as "all_reduce"."""
    name = _text(call["profiling_name"])
    return name.partition(":")[2] or name


def _call(entry: _Entry, state: str | None = None) -> flight.CollectiveCall:
    """Return the call, with another `state` than that of the entry if one is given."""
    return flight.CollectiveCall(
        sequence=_number(entry),
        order=_order(entry),
        name=_name(entry),
        state=state or _text(entry["state"]),
        sizes=_sizes(entry.get("input_sizes") or []),
        dtypes=", ".join(map(_text, _of(list, entry.get("input_dtypes") or [])[:DIMENSIONS_MAX])),
        place=_place(_of(list, entry.get("frames") or [])),
    )


def _sizes(tensors: Any) -> str:
    """Return sizes such as "4096x5120, 16". The number of dimensions is limited."""
    shown = [
        "x".join(str(_whole(size)) for size in _of(list, tensor)[:DIMENSIONS_MAX])
        for tensor in _of(list, tensors)[:DIMENSIONS_MAX]
    ]
    return ", ".join(shown)[:SHOWN_CHARACTERS]


def _place(frames: Sequence[Any]) -> str:
    """Return the innermost frame of the program, or the innermost one. The first is innermost."""
    known = [_of(dict, frame) for frame in frames[:FRAMES_MAX]]
    own = (one for one in known if not any(part in one["filename"] for part in _LIBRARIES))
    frame = next(own, known[0] if known else None)
    if frame is None:
        return ""
    file = "/".join(_of(str, frame["filename"]).split("/")[-2:])
    return _text(f"{_text(frame['name'])} ({_text(file)}:{_whole(frame['line'])})")


def _of(kind: type[_T], value: Any) -> _T:
    """Return the value if it is of exactly this type. Other values can be costly to use."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return plain_line(_of(str, value))[:SHOWN_CHARACTERS]


def _whole(value: Any) -> int:
    return _of(int, value)


if __name__ == "__main__":
    # Records that take longer are not PyTorch's.
    signal.alarm(READ_S_MAX)
    sys.exit(main(sys.argv[1:]))
