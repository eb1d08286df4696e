"""Fixtures that tests of several folders share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Agents in tests must not query the metadata service of a cloud that this machine may be in.
os.environ.setdefault("HOLDFAST_NOTICES_URL", "http://127.0.0.1:9")
# The threads of torch wait for each other busily, and the tensors of tests are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Appended, so that no folder of ours can shadow an installed package.
sys.path.append(str(Path(__file__).parents[1]))

from tests.support.postgres import PostgresServer, postgres_server

# A shell starts programs in the background with SIGINT ignored, and all processes of the tests
# would inherit that. A worker of Prefect then never ends by itself.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of processes, and each would compile Holdfast again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A killed process leaves its temporary files behind, such as a folder of torchrun. They are all in
# one folder, which is removed at the end. pytest's own folders stay where they are.
SCRATCH: Path | None = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    SCRATCH = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
    # Some tests run a program as another user.
    SCRATCH.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(SCRATCH)

# Folders with the slowest tests first; those of the last folder take seconds.
ORDER = {"slurm": 0, "process": 1, "unit": 3}
# With a time limit, the tests that show most in a minute come first.
LIMITED_ORDER = {"unit": 0, "slurm": 2, "process": 3, "interleavings": 4}

# The duration of an example depends on how busy the machine is, so it has no deadline.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


STARTED_AT = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no test later than this after the start; those left out count as skipped",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out once the time of `--minutes` is over."""
    if time.monotonic() - STARTED_AT > 60 * item.config.getoption("minutes"):
        pytest.skip("the time of --minutes is over")


def pytest_unconfigure() -> None:
    """Remove the temporary files that the tests left."""
    if SCRATCH is not None:
        shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would inspect millions of lasting objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run quick tests last; otherwise a slow file could start when all others have finished.

    With `--minutes`, run them first.
    """
    is_limited = config.getoption("minutes") < float("inf")
    order, other = (LIMITED_ORDER, 1) if is_limited else (ORDER, 2)
    items.sort(key=lambda item: order.get(item.path.parent.name, other))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many schedules the tests of interleavings have played."""
    found: dict[str, list[tuple[int, float]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            is_call = getattr(report, "when", "") == "call"
            for name, value in report.user_properties if is_call else ():
                if name == "interleavings":
                    found.setdefault(report.nodeid.split("[")[0], []).append(value)
    for test, values in sorted(found.items()):
        played, seconds = (sum(column) for column in zip(*values, strict=True))
        terminalreporter.write_line(
            f"{test}: {len(values)} tests, {played} schedules in {seconds:.0f} s"
        )


@pytest.fixture(scope="session", autouse=True)
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home for tests that set none, so that none writes into the home of the account.

    The cluster of the Slurm tests stays up, and then a test of any folder may keep its answers.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test session; each test creates its own database on it."""
    with postgres_server() as server:
        yield server
