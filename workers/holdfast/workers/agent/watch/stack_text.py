"""Parse stacks from the output of py-spy and faulthandler, and compare them. Pure functions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar

TOP_FRAMES: Final = 3
GROUPS_MAX: Final = 8
RANKS_NAMED_MAX: Final = 8
_FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
# The text that `read_py_spy` returns.
_THREAD: Final = re.compile(r"^thread \S+ \((?P<name>.*), \w+\), innermost first:$")
_TEXT_FRAME: Final = re.compile(r"^    (?P<name>.+) \((?P<file>.+):(?P<line>\d{1,9})\)$")
NO_STACKS: Final = "no stacks: "
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
# The code in which a rank waits for its peers: collectives and stores, the backward pass that runs
# them, and waits for a GPU that runs them.
_WAIT_FILES: Final = ("torch/distributed/", "torch/autograd/graph.py", "torch/cuda/streams.py")
_WAIT_CALLS: Final = ("torch/cuda/__init__.py:synchronize",)
# Here a rank looks again and again whether its peers have come. Where in that loop it is found
# shows nothing.
_POLL_FILES: Final = tuple(f"holdfast/trainer/ranks/{name}.py" for name in ("meeting", "rank_tree"))

T = TypeVar("T")


@dataclass(frozen=True)
class Frame:
    """One frame of a stack. `is_wait` is True for code in which ranks wait for each other."""

    name: str
    file: str
    line: int

    @property
    def is_wait(self) -> bool:
        inside = any(part in self.file for part in _WAIT_FILES)
        called = any(f"{self.file}:{self.name}".endswith(call) for call in _WAIT_CALLS)
        return inside or called or self.file.endswith(_POLL_FILES)

    def __str__(self) -> str:
        return f"{self.name} ({'/'.join(self.file.split('/')[-2:])}:{self.line})"


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """A summary of a rank's stacks.

    `functions` is a digest of the functions in them, and `digest` also of lines and local
    variables. The latter change in a rank that waits as well: a wait with a time limit has a
    deadline. Without `functions`, the digest alone counts. `computed_s` is the CPU time of the main
    thread. `top` has its innermost frames, and `place` the innermost one outside torch. `waits` is
    True if it waits for its peers. `problem` says why there are no stacks. `on_storage` is True if
    a thread of the rank, or of a process below it, waits for storage. `helpers_cpu_s` and
    `helpers_io_bytes` count the CPU time and the I/O of the processes below it. `has_record` is
    True if the dump has the rank's flight record.
    """

    rank: int
    digest: str = ""
    functions: str = ""
    computed_s: float = 0.0
    top: tuple[str, ...] = ()
    place: str = ""
    waits: bool = False
    source: str = ""
    problem: str = ""
    on_storage: bool = False
    helpers_cpu_s: float = 0.0
    helpers_io_bytes: int = 0
    has_record: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankStack:
        return cls(**{**data, "top": tuple(data["top"])})


def read_py_spy(rank: int, pid: int, output: bytes) -> tuple[RankStack, str]:
    """Return (summary, text) of the output of `py-spy dump --json --locals`.

    Local variables only enter the digest, because they may contain secrets. Raises `ValueError` for
    anything but py-spy's output.
    """
    threads = json.loads(output)
    if not isinstance(threads, list) or not threads:
        raise ValueError("no threads")
    main = next((t for t in threads if t.get("os_thread_id") == pid), threads[-1])
    # Helper threads that wake now and then prove nothing. One that computes is at work.
    active = [thread for thread in threads if thread is not main and thread.get("active")]
    helpers = [_traces(thread, with_locals=False) for thread in active]
    digest = _digest([_traces(main, with_locals=True), helpers])
    frames = _frames(main)
    functions = _digest([_functions(frames), helpers])
    text = "\n\n".join(_thread_text(thread, is_main=thread is main) for thread in threads)
    return _summary(rank, frames, digest, functions, "py-spy"), text + "\n"


def read_faulthandler(rank: int, output: str) -> tuple[RankStack, str]:
    """Return (summary, text) of `faulthandler` output, in which the main thread comes last."""
    if not _FAULT_THREAD.search(output):
        raise ValueError("no threads")
    frames = _fault_frames(output)
    digest = _digest([(frame.file, frame.line, frame.name) for frame in _outside_polls(frames)])
    return _summary(rank, frames, digest, _digest(_functions(frames)), "faulthandler"), output


def read_dump(rank: int, text: str) -> tuple[RankStack, list[Frame]]:
    """Return the summary of a rank in a dump, by its text, and the frames of its main thread.

    The text is one that `read_py_spy` or `read_faulthandler` returned, or says why there is none.
    """
    if text.startswith(NO_STACKS):
        return RankStack(rank=rank, problem=text.removeprefix(NO_STACKS).strip()), []
    frames: list[Frame] = []
    is_main, source = False, "py-spy"
    for line in text.splitlines():
        if head := _THREAD.match(line):
            is_main = head["name"] == "main"
        elif is_main and (match := _TEXT_FRAME.match(line)):
            frames.append(Frame(match["name"], match["file"], int(match["line"])))
    if not frames:
        frames, source = _fault_frames(text), "faulthandler"
    if not frames:
        return RankStack(rank=rank, problem="the text has no stack"), []
    functions = _digest(_functions(frames))
    return _summary(rank, frames, functions, functions, source), frames


def find_blame(stacks: Sequence[RankStack], steps: Mapping[int, int]) -> str:
    """Return which ranks wait, and which one they wait for.

    The missing rank is one that is behind the others, otherwise one outside any collective,
    otherwise those in another collective than most.
    """
    known = [stack for stack in stacks if stack.top]
    unknown = [stack.rank for stack in stacks if not stack.top]
    if not known:
        return "stack capture failed on every rank"
    behind = _behind(known, steps)
    working = behind or [stack for stack in known if not stack.waits]
    waiting = [stack for stack in known if stack not in working]
    parts = []
    if working and waiting:
        parts = [_describe("missing", group) for group in _groups(working)]
        parts += [_describe("waiting", group) for group in _groups(waiting)]
    else:
        groups = _groups(known)
        kind = "waiting" if waiting else "not waiting for each other"
        parts = [_describe(kind, group) for group in groups]
        if len(groups) > 1 and waiting:
            parts.insert(0, "the ranks are in different collectives")
    if unknown:
        parts.append(f"no stacks of {ranks_text(unknown)}")
    return "; ".join(parts[: GROUPS_MAX + 1])


def _fault_frames(output: str) -> list[Frame]:
    """Return the frames of the last thread in `faulthandler` output."""
    starts = [match.end() for match in _FAULT_THREAD.finditer(output)]
    frames = []
    for line in output[starts[-1] :].splitlines() if starts else ():
        match = _FAULT_FRAME.match(line)
        if match:
            number = int(match["line"]) if match["line"].isdecimal() else 0
            frames.append(Frame(match["name"], match["file"], number))
    return frames


def _behind(stacks: Sequence[RankStack], steps: Mapping[int, int]) -> list[RankStack]:
    """Return the ranks that have finished fewer steps than others."""
    newest = max((steps.get(stack.rank, -1) for stack in stacks), default=-1)
    behind = [stack for stack in stacks if steps.get(stack.rank, -1) < newest]
    return behind if len(behind) < len(stacks) else []


def _groups(stacks: Sequence[RankStack]) -> list[list[RankStack]]:
    """Return the ranks grouped by place, the largest group last."""
    found: dict[tuple[str, str], list[RankStack]] = {}
    for stack in stacks:
        found.setdefault((stack.place, stack.top[0]), []).append(stack)
    return sorted(found.values(), key=len)


def _describe(kind: str, group: Sequence[RankStack]) -> str:
    first = group[0]
    inside = "" if first.place == first.top[0] else f", in {first.top[0]}"
    return f"{kind}: {ranks_text([s.rank for s in group])} at {first.place}{inside}"


def ranks_text(ranks: Sequence[int]) -> str:
    named = ", ".join(str(rank) for rank in sorted(ranks)[:RANKS_NAMED_MAX])
    more = len(ranks) - RANKS_NAMED_MAX
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (
        f" and {more} more" if more > 0 else ""
    )


def _digest(traces: Any) -> str:
    return hashlib.sha256(json.dumps(traces).encode()).hexdigest()


def _functions(frames: Sequence[Frame]) -> list[tuple[str, str]]:
    return [(frame.file, frame.name) for frame in _outside_polls(frames)]


def _summary(
    rank: int, frames: Sequence[Frame], digest: str, functions: str, source: str
) -> RankStack:
    outside = _outside_polls(frames)
    own = next((f for f in outside if "/torch/" not in f.file and not f.file.startswith("<")), None)
    # Only the frames below the program's innermost one show what it waits for.
    inner = frames[: frames.index(own)] if own else frames
    return RankStack(
        rank=rank,
        digest=digest,
        functions=functions,
        top=tuple(str(frame) for frame in frames[:TOP_FRAMES]),
        place=str(own or frames[0]) if frames else "",
        waits=any(frame.is_wait for frame in inner),
        source=source,
    )


def _outside_polls(
    frames: Sequence[T], file_of: Callable[[T], str] = attrgetter("file")
) -> Sequence[T]:
    """Return the frames, innermost first, outside a loop in which the rank polls for its peers."""
    polls = [number for number, one in enumerate(frames, 1) if file_of(one).endswith(_POLL_FILES)]
    return frames[polls[-1] :] if polls else frames


def _frames(thread: Mapping[str, Any]) -> list[Frame]:
    return [
        Frame(str(f["name"]), str(f["filename"]), int(f["line"] or 0)) for f in thread["frames"]
    ]


def _traces(thread: Mapping[str, Any], *, with_locals: bool) -> list[Any]:
    traces = []
    for frame in _outside_polls(thread["frames"], lambda frame: str(frame["filename"])):
        found = frame.get("locals") or [] if with_locals else []
        values = [(v["name"], v["addr"], v.get("repr")) for v in found]
        traces.append((frame["name"], frame["filename"], frame["line"], values))
    return traces


def _thread_text(thread: Mapping[str, Any], *, is_main: bool) -> str:
    name = "main" if is_main else thread.get("thread_name") or "unnamed"
    state = "active" if thread.get("active") else "idle"
    head = f"thread {thread.get('os_thread_id')} ({name}, {state}), innermost first:"
    return "\n".join([head, *(f"    {frame.name} ({f_at(frame)})" for frame in _frames(thread))])


def f_at(frame: Frame) -> str:
    """Return a frame's full location."""
    return f"{frame.file}:{frame.line}"
