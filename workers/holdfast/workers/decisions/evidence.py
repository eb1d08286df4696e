"""Find the cause of a failure in tracebacks and standard error, without side effects.

Rules are tried in order. The first rule that matches an exception's message decides, and the
matching line is the evidence. In a chained traceback the first exception is the root, unless it is
a secondary error. In an exception group, the group's own message precedes those of its members.
Source lines of a traceback and warnings are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.contracts.disk.bounds import TIME_MAX
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.states import Cause

# torchrun logs this about every other rank that it ends after a failure. The ranks ignore its
# signal, and torchrun would wait half a minute before it kills them.
_ENDING: Final = re.compile(r"Sending process (\d+) closing signal")
# torchrun's report of its failed workers, which is the same in versions 1.9 to 2.13.
_FAILURE: Final = re.compile(
    r"^\[\d+\]:\n\s*time\s*: .*\n\s*host\s*: .*\n\s*rank\s*: (?P<rank>\d+) "
    r"\(local_rank: (?P<local>\d+)\)\n\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class ReportedFailure:
    """A rank in torchrun's report. `local` counts the ranks of a node, `code` is its exit code."""

    local: int
    code: int
    pid: int


def read_report(log: str) -> list[ReportedFailure]:
    """Return the failed ranks in torchrun's log."""
    return [
        ReportedFailure(local=int(match["local"]), code=int(match["code"]), pid=int(match["pid"]))
        for match in _FAILURE.finditer(log)
    ]


def ended_peers(log: str) -> set[int]:
    """Return the process ids of the ranks that torchrun ended because another rank had failed."""
    return {int(number) for number in _ENDING.findall(log)}


def read_error_file(content: bytes) -> tuple[str, float]:
    """Return the traceback and the time (Unix seconds) in a rank's error file, or ('', 0)."""
    try:
        found: dict[str, Any] = json.loads(content)
        message = found.get("message", "")
        if not isinstance(message, dict):
            return str(message), _time(found.get("timestamp", 0))
        extra = message.get("extraInfo", {})
        text = str(extra.get("py_callstack") or message.get("message", ""))
        return text, _time(extra.get("timestamp", 0))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        # A program may write any content there.
        return "", 0.0


def _time(value: Any) -> float:
    """Return Unix seconds, or 0 for a number that is not a time."""
    seconds = float(value)
    return seconds if 0 <= seconds <= TIME_MAX else 0.0


# Whether the failures of several attempts are one failure, by their tracebacks.

MESSAGE_CHARACTERS_MAX: Final = 200
# Addresses, process ids and sizes differ between two processes that fail in the same way.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
_FRAME_LINE: Final = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen")


def fingerprint(traceback: str) -> str:
    """Return the root exception without numbers, and the program's innermost line; '' if unknown.

    Frames in installed packages count only if the traceback has no others.
    """
    if TRACEBACK not in traceback:
        return ""
    found = messages(traceback)
    first_line = found[0].strip().partition("\n")[0] if found else ""
    if not first_line:
        return ""
    root = traceback.split(TRACEBACK)[1]
    frames = _FRAME_LINE.findall(root)
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    place = ":".join((own or frames)[-1]) if frames else ""
    return f"{_NUMBER.sub('#', first_line)[:MESSAGE_CHARACTERS_MAX]} at {place}"


def same_failure_elsewhere(
    attempts: Sequence[AttemptView], last: AttemptView
) -> AttemptView | None:
    """Return an attempt that failed as `last` did, after the same step, on another host.

    A failure before an attempt's first step does not count: unreachable storage or a network
    that is down fails every attempt there.
    """
    print_of_last = fingerprint(last.traceback or "")
    # Without a traceback and a host there is no proof that two attempts failed alike.
    if not print_of_last or not _has_trained(last) or not failed_host(last):
        return None
    for attempt in attempts:
        if (
            attempt.number < last.number
            and _has_trained(attempt)
            and attempt.last_step == last.last_step
            and failed_host(attempt) not in {None, failed_host(last)}
            and fingerprint(attempt.traceback or "") == print_of_last
        ):
            return attempt
    return None


def failed_host(attempt: AttemptView) -> str | None:
    """Return the host of the rank that failed first, if it is known."""
    named = attempt.outcome.failed_host if attempt.outcome else None
    return named or attempt.facts.get("failed_host")


def _has_trained(attempt: AttemptView) -> bool:
    first, last = attempt.first_step, attempt.last_step
    return last is not None and last >= (first or 1)


QUOTE_CHARACTERS_MAX: Final = 400
TRACEBACK: Final = "Traceback (most recent call last)"
_PREFIX: Final = re.compile(r"^\[rank\d+\]:\s?", re.M)
_CHAIN: Final = re.compile(
    r"\n(?:The above exception was the direct cause of|During handling of the above exception)"
    r"[^\n]*\n\s*\Z"
)
_FRAME: Final = re.compile(r"^\s+")
# The margin that Python prints beside the members of an exception group, and the group's heading.
_GROUP: Final = re.compile(r"^(?:\[rank\d+\]:\s?)?  \+ Exception Group Traceback", re.M)
_MARGIN: Final = re.compile(r"^ +[|+](?:[-+]*-{8,}.*| )?", re.M)
_MEMBER: Final = re.compile(r"(?:\[rank\d+\]:\s?)? +[|+] ")
_WARNING: Final = re.compile(r"^\[?W\d{3,}|\bWARNING\b|Warning: ")
# Lines of a log that report no error. NCCL explains its errors in such lines.
_ORDINARY: Final = re.compile(rf"{_WARNING.pattern}|^\[?I\d{{3,}}|(?<!NCCL )\b(INFO|DEBUG)\b")
# Types that only a mistake in a program raises. No system or library reports its state by them, so
# the words of such an exception prove nothing: a key can have any name.
_OF_MISTAKES: Final = re.compile(
    r"(builtins\.)?(KeyError|IndexError|AttributeError|TypeError|NameError|UnboundLocalError"
    r"|NotImplementedError|SyntaxError|IndentationError|ZeroDivisionError)\b"
)
# Types of an exception whose words about storage are those of a program.
_OF_VALUES: Final = re.compile(r"(builtins\.)?(ValueError|AssertionError)\b")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Messages that match `pattern` mean `cause`.

    A `secondary_error` reports the failure of another rank. A `hardware` fault belongs to the
    node, which is then excluded from later attempts. The words of an exception whose type matches
    `unless` do not count.
    """

    cause: Cause
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None = None
    secondary_error: bool = False
    hardware: bool = False


@dataclass(frozen=True, kw_only=True)
class EvidenceMatch:
    """A rule that matched, and the line it matched."""

    rule: Rule
    quote: str


def _rule(
    cause: Cause,
    *patterns: str,
    secondary_error: bool = False,
    hardware: bool = False,
    unless: re.Pattern[str] | None = None,
) -> Rule:
    return Rule(
        cause=cause,
        pattern=re.compile("|".join(patterns), re.M),
        unless=unless,
        secondary_error=secondary_error,
        hardware=hardware,
    )


# A helper process of the program ended. The processes that waited for it do not know why.
ABRUPT_END: Final = (
    r"^(\w+\.)*(Broken(ProcessPool|Executor)|TerminatedWorkerError|Worker(Lost|Crashed)Error)\b"
    r"|(?i:\b(worker|sub-?process|process)\b.{0,60}\b(terminated|died|crashed|exited|ended) "
    r"(abruptly|unexpectedly))"
)
# A command that the program ran failed. Only the command's own output can say why.
_OF_COMMAND: Final = re.compile(r"^(\w+\.)*(CalledProcessError|ProcessExecutionError)\b", re.M)
# The order matters: specific causes first, then errors that any lost peer can cause. For example, a
# NCCL error after an ECC error must count as the ECC error.
RULES: Final[tuple[Rule, ...]] = (
    _rule(
        Cause.INFRASTRUCTURE,
        r"uncorrectable ECC error|double-bit ECC|fallen off the bus|NVRM: Xid|GPU is lost",
        r"CUDA error: (hardware stack error|an illegal instruction was encountered by hardware)",
        r"uncorrectable NVLink error|Invalid access of peer GPU memory over nvlink",
        hardware=True,
    ),
    _rule(
        Cause.GPU_OOM,
        r"(CUDA|HIP|XPU) out of memory|torch\.(cuda\.)?OutOfMemoryError",
        r"CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED",
        r"Cuda failure \d* ?'?out of memory",
    ),
    _rule(
        Cause.HOST_OOM,
        r"^(\w+\.)*(_Array)?MemoryError\b|DefaultCPUAllocator: (can't|not enough)",
        r"Cannot allocate memory|Errno 12\]|std::bad_alloc|out of shared memory",
        r"Unable to allocate [\d.]+ [KMGT]iB for an array|shared memory .*: No space left",
        r"unable to (open|resize|mmap) .*/torch_.*(No space left|Cannot allocate)",
    ),
    _rule(
        Cause.STORAGE_FULL,
        r"No space left on device|Errno 28\] (?!inotify)|\bENOSPC\b",
        r"Disk quota exceeded|Errno 122\]|\bEDQUOT\b|Errno 27\] File too large",
        r"^(\w+\.)*\w*(Dis[ck]Full|StorageFull|OutOfSpace|NoSpaceLeft|InsufficientStorage)\w*\b",
    ),
    _rule(
        Cause.STORAGE_FULL,
        r"(?i:\b(dis[ck]|device|volume|file ?system|storage|quota) (is |was )?full\b)",
        # A file accepts fewer bytes than requested only when storage is full.
        r"(?i:\b(short|partial|incomplete) write\b)|\b\d+ (\w+ )?requested and \d+ written\b",
        unless=_OF_VALUES,
    ),
    _rule(
        Cause.NUMERICS,
        r"^(\w+\.)*(FloatingPointError|NumericsError)\b",
        r"(?i:\b(loss|gradients?|grad[_ ]norm|norm|activations?|logits|weights?)\b.{0,60}?"
        r"\b(is|was|are|were|became|become|turned|contains?|has|have|=|:)\s*(a |an )?"
        r"(nan|inf|infinite|not finite|non-?finite)\b)",
        r"(?i:(nan|inf|non-?finite) (value )?(loss|gradients?|detected in))",
        r"returned nan values in its \d+th output",
    ),
    _rule(
        Cause.USER_ERROR,
        r"device-side assert triggered|ncclInvalid(Usage|Argument)|Duplicate GPU detected",
        r"[Dd]etected mismatch between collectives|op\.preamble\.length <= op\.nbytes",
    ),
    _rule(
        Cause.HANG,
        r"Timed out waiting \d+ ?ms for (recv|send) operation|monitoredBarrier",
        r"collective operation timeout|HeartbeatMonitor|Timeout at NCCL work",
        secondary_error=True,
    ),
    _rule(
        Cause.INFRASTRUCTURE,
        r"Timed out after \d+ seconds waiting for clients|client socket has timed out",
        r"EADDRINUSE|Errno 98\]|Address already in use|failed to listen on any local",
        r"Errno (5|30|101|107|110|112|113|116|121)\]|Stale file handle|Input/output error",
        r"Temporary failure in name resolution|Name or service not known|Read timed out",
        r"Max retries exceeded|Server Error|Service Unavailable|ConnectTimeout",
        r"CUDA error: (all CUDA-capable devices are busy|no CUDA-capable device|initialization)",
        r"CUDA driver (initialization failed|version is insufficient)|No CUDA GPUs are available",
        r"unhandled system error|ncclSystemError|Unable to connect to the NVML",
        r"basic_ios::clear: iostream error|PytorchStreamWriter failed writing",
        r"^(\w+\.)*KeyboardInterrupt|SignalException: Process \d+ got signal",
        r"worker \(pid(\(s\))? [\d, ]+\) is killed by signal: (Killed|Terminated)",
    ),
    _rule(
        Cause.HOST_OOM,
        r"worker \(pid(\(s\))? [\d, ]+\) is killed by signal: Bus error",
    ),
    _rule(
        Cause.UNKNOWN,
        r"worker \(pid(\(s\))? [\d, ]+\) (is killed by signal|exited unexpectedly)",
        ABRUPT_END,
        r"CUDA error: (an illegal memory access|unspecified launch failure|misaligned address)",
        r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|CUBLAS_STATUS_EXECUTION_FAILED",
    ),
    _rule(
        Cause.INFRASTRUCTURE,
        r"Connection (was )?(closed|reset) by (remote )?peer|Connection refused|Broken pipe",
        r"Dist(Network|Backend|Store)Error|connectFullMesh|Socket Timeout|Gloo connect",
        r"NCCL error|ncclRemoteError|NCCL communicator was aborted|recvValue failed",
        r"sendBytes failed|failed to recv, got 0 bytes|AgreementError|wait timeout after",
        # Connection errors of any peer: libraries derive their own classes from these.
        r"^(\w+\.)*\w*Connection\w*(Error|Exception|Closed|Lost|Timeout)\w*\b",
        r"^(\w+\.)*(\w*Disconnected\w*|BrokenPipeError|\w*ProtocolError|IncompleteRead\w*)\b",
        r"^(\w+\.)*\w*(Connect(or)?Error|HostUnreachable\w*|Timeout(Error|Exception)?)\b",
        secondary_error=True,
    ),
)
# Frames of a process that receives an object from its own helper, such as a data loader's worker.
_FROM_HELPER: Final = re.compile(r'File "[^"]*multiprocessing/resource_sharer\.py"')
HELPER_LOST: Final = Rule(cause=Cause.UNKNOWN, pattern=_FROM_HELPER)
# `multiprocessing` prints this line before the error that ended a helper.
_HELPER_FAILED: Final = re.compile(r"^Process [^\n]+:\n\Z", re.M)
# A worker killed because memory ran out ends by the same signal as any other killed worker.
KILLED_WORKER: Final = re.compile(
    rf"worker \(pid.*(is killed by signal: Killed|exited unexpect)|{ABRUPT_END}", re.M
)


def find_cause(text: str) -> EvidenceMatch | None:
    """Return what a traceback or standard error reveals, or None for the program's own error.

    A secondary error counts only if no other exception in the chain says more. A process that
    loses a connection to a helper may find out next how the helper ended. If it does not, nobody
    knows why the helper ended, but no other rank is to blame.
    """
    secondary_error = None
    for found in filter(None, map(_first_match, messages(text))):
        if not found.rule.secondary_error:
            return found
        secondary_error = secondary_error or found
    if secondary_error is not None and _FROM_HELPER.search(text):
        quote = f"{secondary_error.quote} (a process that this one had started has ended)"
        return EvidenceMatch(rule=HELPER_LOST, quote=quote)
    return secondary_error


def _first_match(message: str) -> EvidenceMatch | None:
    if _OF_MISTAKES.match(message):
        return None
    for rule in RULES:
        if rule.unless is not None and rule.unless.match(message):
            continue
        if match := rule.pattern.search(message):
            return EvidenceMatch(rule=rule, quote=_line_at(message, match.start()))
    return None


def is_of_command(text: str) -> bool:
    """Return True if the root of a traceback is the failure of a command that the program ran."""
    return any(_OF_COMMAND.search(message) for message in messages(text)[:1])


def find_before_traceback(text: str) -> EvidenceMatch | None:
    """Return what the text before the last traceback reveals, or None."""
    whole = last_traceback(text)
    return find_cause(text.removesuffix(whole)) if whole else None


def find_in_helper(text: str) -> EvidenceMatch | None:
    """Return what ended the helper process whose traceback is the last but one, or None.

    Secondary errors do not count: a helper may lose its connection because the parent ends.
    """
    before = text.removesuffix(last_traceback(text))
    helper = last_traceback(before)
    if not helper or not _HELPER_FAILED.search(before.removesuffix(helper)):
        return None
    found = find_cause(helper)
    return None if found is None or found.rule.secondary_error else found


def last_message(text: str) -> str:
    """Return the first line of the last exception, or the last non-empty line; may be empty."""
    found = messages(text)
    lines = [line.strip() for line in (found[-1] if found else "").splitlines() if line.strip()]
    if not lines:
        return ""
    return (lines[0] if TRACEBACK in text else lines[-1])[:QUOTE_CHARACTERS_MAX]


def messages(text: str) -> list[str]:
    """Return the messages of all exceptions in `text`, root first; without one, its lines.

    Stack frames, source lines and the text before the first traceback are left out.
    """
    has_groups = _GROUP.search(text)
    text = _PREFIX.sub("", text)
    if has_groups:
        text = _MARGIN.sub("", text)
    if TRACEBACK not in text:
        kept = [line for line in text.splitlines() if not _ORDINARY.search(line)]
        return ["\n".join(kept)] if kept else []
    found = []
    for block in text.split(TRACEBACK)[1:]:
        lines = block.splitlines()[1:]
        first = next((i for i, line in enumerate(lines) if line and not _FRAME.match(line)), None)
        if first is not None:
            kept = [line for line in lines[first:] if not _WARNING.search(line)]
            found.append("\n".join(kept))
    return found


def last_traceback(text: str) -> str:
    """Return the last traceback in `text` with every exception it is chained to, or ''.

    The traceback of a group's member comes with the whole group.
    """
    start = _head_of_group(text, text.rfind(TRACEBACK))
    while start > 0:
        before = _PREFIX.sub("", text[:start])
        before = before.removesuffix(before.rpartition("\n")[2])
        if not _CHAIN.search(before):
            break
        earlier = text.rfind(TRACEBACK, 0, start)
        if earlier < 0:
            break
        start = _head_of_group(text, earlier)
    return text[start:] if start >= 0 else ""


def _head_of_group(text: str, start: int) -> int:
    """Return where the group of the traceback at `start` begins, or `start` without a group."""
    line = text.rfind("\n", 0, max(0, start)) + 1
    if start < 0 or not _MEMBER.match(text, line):
        return start
    heads = [found.start() for found in _GROUP.finditer(text, 0, start + len(TRACEBACK))]
    return max(heads, default=start)


def names_hardware(lines: tuple[str, ...]) -> bool:
    """Return True if the evidence names a hardware fault of a node."""
    return any(rule.hardware and rule.pattern.search(line) for rule in RULES for line in lines)


def _line_at(text: str, position: int) -> str:
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    line = text[begin : end if end >= 0 else len(text)].strip()
    if len(line) <= QUOTE_CHARACTERS_MAX:
        return line
    # Keep the text that matched.
    offset = max(0, min(position - begin, len(line) - QUOTE_CHARACTERS_MAX // 2))
    return line[offset : offset + QUOTE_CHARACTERS_MAX]
