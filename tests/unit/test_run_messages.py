"""Messages of the page on troubleshooting about runs, the index and the server: with their advice.

The files, locks, processes and ports are real.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.histories import spec_of
from tests.unit.test_cli import add_checkpoint, ended_run
from tests.unit.test_orders import Cluster
from tests.unit.test_workers_runs import submit

from holdfast.cli import serve
from holdfast.cli.shared import follow
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.paths import MANIFEST, RunPaths
from holdfast.contracts.errors import (
    RequestConflictError,
    RunConflictError,
    ServiceError,
    SpecError,
)
from holdfast.contracts.records import orders
from holdfast.contracts.records.documents import Outcome, write_document
from holdfast.contracts.states import AttemptState, RunState
from holdfast.flows.start import Started
from holdfast.workers import schedulers
from holdfast.workers.runs import operator
from holdfast.workers.runs.reconcile import reconcile
from holdfast.workers.runs.run_folders import create_run

__all__ = ["ended_run"]


@pytest.fixture
def live_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run with a queued job of a fake scheduler, and without a supervisor."""
    cluster = Cluster()
    monkeypatch.setitem(schedulers._KINDS, "slurm", lambda: cluster)
    spec = spec_of(resources={"executor": "slurm", "gpus_per_node": 4})
    paths = create_run(spec, root, created_by="tester")
    submit(paths, spec)
    return paths


def test_a_second_request_waits_until_the_first_is_done(live_run: RunPaths) -> None:
    operator.request(live_run, "stop", by="ann")
    with pytest.raises(
        RequestConflictError, match="s ago, and that request is still pending; wait until it is"
    ):
        operator.request(live_run, "relaunch", by="bob", alone=True)
    outcome = Outcome(
        state=AttemptState.CANCELLED, job_id="1", world_size=4, started_at=1, ended_at=2
    )
    write_document(live_run.attempt(1).outcome, outcome)
    assert reconcile(live_run).state is RunState.CANCELLED
    assert "continues" in operator.request(live_run, "relaunch", by="bob", alone=True)


def test_only_a_relaunch_takes_a_gpu_count(live_run: RunPaths) -> None:
    with pytest.raises(SpecError, match="stop takes no GPU count; use `holdfast relaunch r --gpus"):
        operator.request(live_run, "stop", by="ann", gpus=4)
    assert "attempt 1" in operator.request(live_run, "relaunch", by="ann", gpus=4)


def test_a_lock_that_another_process_keeps_is_named(
    live_run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "TURN_S", 0.2)
    with locked(live_run.orders_lock, 1.0) as is_locked:
        assert is_locked
        with pytest.raises(RunConflictError, match=r"another process has kept .* locked for") as no:
            operator.request(live_run, "stop", by="ann")
    assert f"`fuser {live_run.orders_lock}`" in str(no.value)
    assert "attempt 1" in operator.request(live_run, "stop", by="ann")


def test_a_supervisor_that_ends_while_submit_waits_is_reported(
    live_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ORPHAN_S", "POLL_S"):
        monkeypatch.setattr(follow, name, 0.05)
    log = tmp_path / "log"
    log.write_text("no space left\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait(30)
    with pytest.raises(ServiceError, match="r is live, but its supervisor has ended") as ended:
        follow.follow_run(live_run, Started(process=process, log=log), show=False)
    assert "exit status 3\nno space left" in str(ended.value)
    assert "Submit the same spec again" in str(ended.value)


def test_logs_of_a_run_that_was_never_submitted(call: Call, root: Path) -> None:
    create_run(spec_of(), root, created_by="tester")
    missing = call("logs", "r")
    assert (missing.status, "r has no attempt yet; `holdfast show r`" in missing.err) == (3, True)
    assert call("show", "r", "--json").json["state"] == "queued"


def test_a_checkpoint_that_was_never_committed_cannot_be_forked(
    call: Call, ended_run: RunPaths
) -> None:
    name = add_checkpoint(ended_run, 30)
    (ended_run.checkpoints / name / MANIFEST).unlink()
    refused = call("fork", f"kelp:{name}", "--name", "other")
    assert refused.status == 1
    assert "was never committed (no manifest.json); choose one" in refused.err
    listed = call("checkpoints", "kelp", "--json").json
    committed = [one["id"] for one in listed if one["state"] == "committed"]
    assert f"kelp:{name}" not in committed
    # The program is missing here, so no supervisor starts. The checkpoint itself is accepted.
    other = call("fork", committed[-1], "--name", "other")
    assert "never committed" not in other.err
    assert "run other cannot start" in other.err


# --- The index --------------------------------------------------------------------------------


@pytest.mark.more
def test_a_copied_folder_is_named_and_moved_out_of_the_root(
    call: Call, ended_run: RunPaths, root: Path, tmp_path: Path
) -> None:
    """A copy in the same root has another name than its run; one in another root has the same."""
    assert call("reindex", root).status == 0
    shutil.copytree(ended_run.directory, root / "copy", symlinks=True)
    copied = call("reindex", root)
    assert copied.status == 1
    assert "copy/spec.json: the spec of run 'kelp' is in the folder 'copy'; rename" in copied.err
    (root / "copy").rename(tmp_path / "copy")
    assert call("reindex", root).status == 0

    other = tmp_path / "other"
    shutil.copytree(tmp_path / "copy", other / "kelp", symlinks=True)
    copied = call("reindex", other)
    assert copied.status == 1
    assert f"kelp: has the same uid as the run in {ended_run.directory}" in copied.err
    (other / "kelp").rename(tmp_path / "kelp")
    assert call("reindex", other).status == 0


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("spec.json", {"spec": {"command": 7}}, "kelp: cannot be read as a run: ValidationError: "),
        (
            "spec.json",
            {"created_at": "soon"},
            "not a valid RunRecord: created_at: .*; restore the file, or move the run's folder",
        ),
        (
            "attempts/0001/outcome.json",
            {"ended_at": 1e300},
            "not a valid Outcome: ended_at: .*; restore the file, or save the run's checkpoints",
        ),
    ],
)
def test_a_run_with_a_damaged_file_is_named_and_restored(
    name: str, damage: dict[str, Any], words: str, call: Call, ended_run: RunPaths, root: Path
) -> None:
    path = ended_run.directory / name
    good = path.read_text()
    path.write_text(json.dumps({**json.loads(good), **damage}))
    for command in (["show", ended_run.directory], ["reindex", root]):
        damaged = call(*command)
        assert damaged.status == 1
        assert re.search(words, damaged.err), damaged.err
    path.write_text(good)
    for command in (["show", ended_run.directory], ["reindex", root]):
        assert call(*command).status == 0


# --- The server -------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_and_another_one_works(call: Call, root: Path) -> None:
    root.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = call("serve", "--port", port)
        assert taken.status == 2
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in taken.err
        serve._listen("127.0.0.1", 0).close()
    # An address of a network for documentation, which no machine has.
    assert call("token", "add", "ann").status == 0
    elsewhere = call("serve", "--host", "192.0.2.1", "--port", 0, "--name", "runs.lab")
    assert elsewhere.status == 2
    assert "Choose another --host, an address of this machine" in elsewhere.err


def test_a_response_is_sent_at_once() -> None:
    """With the kernel's default, its body waits for the client's delayed acknowledgement."""
    with (
        serve._listen("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
