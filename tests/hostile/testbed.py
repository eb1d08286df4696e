"""A root that several users share: an attacker's folders, a victim's, and the victim's commands.

The attacker is another uid without capabilities. Commands run in forked processes that have all
modules loaded already, so hundreds of them take seconds.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import http.server
import importlib
import io
import json
import os
import pkgutil
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.hostile.folders import CANARY, HOSTILE, Kinds, Victim, make_hostile, plain_run
from tests.support.other_users import become
from typer.testing import CliRunner

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError

ATTACKER: Final = 54_321
COMMAND_S_MAX: Final = 10.0
MEMORY_BYTES_MAX: Final = 6 << 30
VICTIM_RUN: Final = "good"
VICTIM_UID: Final = "f" * 32


@dataclass(frozen=True)
class CommandResult:
    """What one command did: its output, its error, and how long it took."""

    command: str
    seconds: float
    output: str
    error: str = ""
    warnings: str = ""
    trace: str = ""


class HangError(BaseException):
    """A command exceeded its time limit. A `BaseException`, so that no handler catches it."""


class Testbed:
    """The shared root, the victim's files beside it, and a server that must get no request."""

    # Not a test class, despite its name.
    __test__ = False

    def __init__(self, place: Path, url: str, kinds: Kinds) -> None:
        self.place, self.root = place, place / "runs"
        self.victim = Victim(
            home=place / "victim",
            run=self.root / VICTIM_RUN,
            uid=VICTIM_UID,
            mirror=place / "mirror",
            url=url,
            owned=place / "owned",
        )
        for folder, mode in ((self.root, 0o1777), (self.victim.owned, 0o777)):
            folder.mkdir()
            folder.chmod(mode)
        for folder in (self.victim.home, self.victim.mirror):
            folder.mkdir(mode=0o755)
        self.victim.profile.write_text("# the victim's own\n")
        self.victim.secret.write_text(CANARY)
        self.victim.secret.chmod(0o600)
        plain_run(self.root, VICTIM_RUN, VICTIM_UID)
        copy = self.victim.mirror / f"{VICTIM_RUN}.{VICTIM_UID}" / "checkpoints"
        shutil.copytree(self.victim.run / "checkpoints", copy)
        in_child(lambda: _make_hostile(self, kinds))

    def paths(self, name: str) -> RunPaths:
        """The folder of a run under the shared root."""
        return RunPaths(self.root / name)

    def belongings(self) -> dict[str, str]:
        """State of all files that only the victim may change, by path."""
        places = (self.victim.home, self.victim.run, self.victim.mirror, self.victim.owned)
        return {path: facts for place in places for path, facts in contents(place).items()}


@contextlib.contextmanager
def open_testbed(
    kinds: Kinds = HOSTILE,
) -> Iterator[Testbed]:
    """A testbed in a temporary folder that the attacker may enter; removed at the end."""
    asked: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = Path(tempfile.mkdtemp(prefix="holdfast-hostile-"))
    place.chmod(0o711)
    try:
        yield Testbed(place, f"http://127.0.0.1:{server.server_address[1]}", kinds)
        assert asked == []
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
        shutil.rmtree(place, ignore_errors=True)


def load_everything() -> None:
    """Import all modules that commands need, before any process is forked."""
    for package in ("lineage", "workers", "api", "cli", "contracts"):
        module = importlib.import_module(f"holdfast.{package}")
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            if "alembic" not in found.name and not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    for name in ("trainer.export.__main__", "trainer.shape", "flows.start", "flows.parameters"):
        importlib.import_module(f"holdfast.{name}")


def in_child(work: Callable[[], Any]) -> Any:
    """Run `work` in a child process and return its result, which must be JSON."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            # Keeps the garbage collector from scanning the large heap of the test process.
            gc.freeze()
            with os.fdopen(writing, "w") as stream:
                json.dump(work(), stream)
            status = 0
        except BaseException:  # The child ends here, with its reason on standard error.
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    return json.loads(said)


def _make_hostile(testbed: Testbed, kinds: Kinds) -> None:
    become(ATTACKER)
    make_hostile(testbed.root, testbed.victim, kinds)


def contents(place: Path) -> dict[str, str]:
    """Mode, owner, size and digest of everything in a folder; links are not followed."""
    found = {}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = f"{folder}/{name}"
            facts = os.lstat(path)
            digest = ""
            if os.path.isfile(path) and not os.path.islink(path) and facts.st_size < 1 << 20:
                digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            key = os.fsencode(path).decode(errors="backslashreplace")
            found[key] = f"{facts.st_mode:o} {facts.st_uid} {facts.st_size} {digest}"
    return found


def run_commands(commands: Sequence[Sequence[str]], database: Path) -> list[CommandResult]:
    """Run `holdfast` commands one after another in one child, each within its time and memory."""

    def work() -> list[dict[str, Any]]:
        os.environ["HOLDFAST_DATABASE_URL"] = f"sqlite:///{database}"
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        _call_trainer_in_this_process()
        return [asdict(_run(command)) for command in commands]

    return [CommandResult(**one) for one in in_child(work)]


def timed(name: str, work: Callable[[], str]) -> CommandResult:
    """Run `work` with the time limit of a command; time spent waiting for a CPU does not count."""

    began = _own_s()

    def stop(*_: object) -> None:
        if _own_s() - began >= COMMAND_S_MAX:
            raise HangError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, COMMAND_S_MAX, 0.5)
    try:
        output = work()
        return CommandResult(name, _own_s() - began, output)
    except (HoldfastError, OSError) as error:
        return CommandResult(name, _own_s() - began, "", error=str(error))
    except HangError:
        return CommandResult(
            name, COMMAND_S_MAX, "", trace=f"hung\n{traceback.format_exc()[-3000:]}"
        )
    except Exception:  # `holdfast` would print a traceback, which the tests reject.
        return CommandResult(name, _own_s() - began, "", trace=traceback.format_exc()[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _own_s() -> float:
    """Clock time less the time for which this thread waited for a CPU, seconds."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.monotonic() - waited_ns / 1e9


def _run(command: Sequence[str]) -> CommandResult:
    from holdfast.cli.main import app

    def work() -> str:
        outcome = CliRunner().invoke(app, list(command))
        if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
            raise outcome.exception
        warnings.append(outcome.stderr)
        return str(outcome.stdout)

    warnings: list[str] = []
    return replace(timed(" ".join(command), work), warnings="".join(warnings))


def _call_trainer_in_this_process() -> None:
    """Call the trainer's modules in this process: a new Python would take seconds."""
    from holdfast.workers.checkpoints import trainer_call

    def answer(command: list[str], *_: object) -> tuple[int, str, str]:
        python, module, arguments = command[0], command[2], command[3:]
        assert python == sys.executable, f"{python} was to be executed"
        out, err = io.StringIO(), io.StringIO()
        name = module if module.endswith("shape") else f"{module}.__main__"
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = importlib.import_module(name).main(arguments)
        return status, out.getvalue(), err.getvalue()

    trainer_call._run = answer  # type: ignore[assignment]
