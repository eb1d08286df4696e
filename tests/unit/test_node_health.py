"""Health checks: their keys, the verdict over all nodes, what follows, and the check `ready`."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.support.histories import NOW, attempt_of, history_of, spec_of
from tests.support.runs import RunFolder

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import CHECK_S_MAX, CHECKS_MAX, Health
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers import health
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.health.checks import HealthChecks, HealthFinding
from holdfast.workers.decisions.causes import UnhealthyNode, unhealthy_ending
from holdfast.workers.decisions.exclusions import EXCLUDE_S, excluded_hosts
from holdfast.workers.decisions.policy import decide


@pytest.mark.parametrize(
    "given",
    [
        {"timeout_s": 0},
        {"timeout_s": CHECK_S_MAX + 1},
        {"before": [""]},
        {"before": ["x" * 5000]},
        {"after": ["true"] * (CHECKS_MAX + 1)},
        {"before": ["a\x1bb"]},
        {"before": "true"},
        {"during": ["true"]},
    ],
)
def test_impossible_checks_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Health.model_validate(given)


def bad(*pairs: tuple[str, str]) -> list[UnhealthyNode]:
    return [UnhealthyNode(host=host, check=check, problem="exit status 1") for host, check in pairs]


@pytest.mark.parametrize(
    ("unhealthy", "nodes", "cause", "hosts"),
    [
        (bad(("n1", "a")), 4, Cause.NODE_FAILURE, ("n1",)),
        (bad(("n1", "a")), 1, Cause.NODE_FAILURE, ("n1",)),
        (bad(("n1", "a"), ("n2", "a")), 3, Cause.NODE_FAILURE, ("n1", "n2")),
        (bad(("n1", "a"), ("n2", "b")), 2, Cause.NODE_FAILURE, ("n1", "n2")),
        (bad(("n1", "a"), ("n2", "a")), 2, Cause.USER_ERROR, ()),
    ],
)
def test_a_check_that_fails_on_all_nodes_is_wrong_itself(
    unhealthy: list[UnhealthyNode], nodes: int, cause: Cause, hosts: tuple[str, ...]
) -> None:
    ending, excluded = unhealthy_ending(unhealthy, nodes)
    assert (ending.cause, excluded) == (cause, hosts)
    assert ("correct the check" in ending.evidence[0]) == (cause is Cause.USER_ERROR)


def ended_by(spec: RunSpec, number: int, host: str) -> AttemptView:
    """An attempt that ended because a check failed on `host`."""
    view = attempt_of(spec, number, Cause.NODE_FAILURE, hosts=("n0", host))
    return replace(view, facts={"lost_hosts": [], "unhealthy_hosts": [host]})


def test_unhealthy_hosts_are_excluded_for_a_while() -> None:
    spec = spec_of()
    attempt = ended_by(spec, 1, "n2")
    assert excluded_hosts([attempt], NOW) == ("n2",)
    assert excluded_hosts([attempt], NOW + EXCLUDE_S) == ()


def test_nodes_that_are_unhealthy_again_and_again_do_not_keep_the_run_going() -> None:
    spec = spec_of()
    attempts = [ended_by(spec, number, f"n{number}") for number in (1, 2, 3)]
    decision = decide(history_of(spec, *attempts), None, now=NOW)
    assert decision.action == "stop"
    assert attempts[0].state is AttemptState.NODE_FAILED


def install_nvidia_smi(folder: Path, rows: str, links: str = "") -> None:
    """A program in place of the driver's, because this machine has no GPU."""
    (folder / "rows").write_text(rows)
    (folder / "links").write_text(links)
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in nvlink) cat {folder}/links;; *) cat {folder}/rows;; esac\n'
    )
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("rows", "links", "problem"),
    [
        ("0, 0\n1, [N/A]\n", "Link 0: 26.5 GB/s\n", "ready"),
        ("0, 0\n", "", "lists 1 GPU, expected 2"),
        ("0, 0\n1, 3\n", "", "GPU 1 has 3 uncorrected"),
        ("0, 0\n1, 0\n", "Link 0: <inactive>\n", "1 NVLinks are inactive"),
    ],
)
def test_ready_looks_at_the_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: str,
    links: str,
    problem: str,
) -> None:
    install_nvidia_smi(tmp_path, rows, links)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = health.main(["--gpus=2", "--free-gb=0", f"--shared={tmp_path}"])
    assert problem in capsys.readouterr().out
    assert code == (0 if problem == "ready" else 1)


def test_ready_without_a_driver_fails_only_if_gpus_are_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert health.main(["--free-gb=0"]) == 0
    assert health.main(["--gpus=1", "--free-gb=0"]) == 1
    assert "nvidia-smi failed" in capsys.readouterr().out


def test_ready_finds_a_full_disk_and_a_wrong_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_gb = shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    assert health.main([f"--free-gb={free_gb + 1000}", f"--free-in={tmp_path}"]) == 1
    assert "of free space, expected at least" in capsys.readouterr().out
    wrong = time.time() + 600
    monkeypatch.setattr(time, "time", lambda: wrong)
    assert health.main(["--free-gb=0", f"--shared={tmp_path}"]) == 1
    assert "clock differs by 600 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "command"),
    [
        ("ready", ["holdfast.workers.health", "--gpus=0", "--shared=ATTEMPT"]),
        (
            "ready --free-gb 5 --free-in '/a b'",
            [
                *("holdfast.workers.health", "--gpus=0", "--shared=ATTEMPT"),
                *("--free-gb", "5", "--free-in", "/a b"),
            ],
        ),
        (
            "nvrx --optional /var/run/nvhcd.sock --group gpu",
            [
                *("holdfast.workers.health_nvrx", "--timeout-s=48"),
                *("--optional", "/var/run/nvhcd.sock", "--group", "gpu"),
            ],
        ),
        ("readylink -q", ["bash", "-c", "readylink -q"]),
        ("nvidia-smi", ["bash", "-c", "nvidia-smi"]),
    ],
)
def test_the_name_of_a_check_of_holdfast_may_have_options(
    tmp_path: Path, check: str, command: list[str]
) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    checks = HealthChecks(load_context(attempt.request))
    expected = [word.replace("ATTEMPT", str(attempt.directory)) for word in command]
    if command[0] != "bash":
        expected = [sys.executable, "-m", *expected]
    assert checks._command(check) == expected


def finding_of(attempt: AttemptPaths, check: str) -> HealthFinding:
    checks = HealthChecks(load_context(attempt.request))
    checks.start([check], 1)
    give_up = time.monotonic() + 30
    while checks.finding is None and time.monotonic() < give_up:
        time.sleep(0.02)
    assert checks.finding is not None
    return checks.finding


def test_a_check_with_an_open_quote_is_a_problem_of_the_check(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    problem = finding_of(attempt, "nvrx '/a").problem
    assert "could not be started: No closing quotation" in problem


def test_checks_see_what_the_program_will_see(tmp_path: Path) -> None:
    """Before, a check ran without `node_setup` and on another network interface than the ranks."""
    launch = {"node_setup": ["export FABRIC='two words'"], "network_interface": "ib7"}
    folder = RunFolder(tmp_path, "quick", "1" * 32, {"launch": launch})
    attempt = folder.submit(1, 1, 0.0)
    check = '[ "$FABRIC $GLOO_SOCKET_IFNAME" = "two words ib7" ]'
    assert finding_of(attempt, check).problem == ""
    failing = {"node_setup": ["echo no fabric", "false"]}
    folder = RunFolder(tmp_path, "other", "2" * 32, {"launch": failing})
    problem = finding_of(folder.submit(1, 1, 0.0), "true").problem
    line = "launch.node_setup line 2 failed with exit status 1: false"
    assert problem.startswith(f"the check ended with exit status 1: no fabric holdfast: {line} -- ")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Take all descriptors up to 1023, as a process with many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1023:
        taken.append(os.dup(taken[0]))
    yield
    for handle in taken:
        os.close(handle)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_check_ends_in_a_process_with_many_open_files(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path, "quick", "1" * 32).submit(1, 1, 0.0)
    assert finding_of(attempt, "true").problem == ""
