"""The command line: exit statuses, refusals with reasons, and the shape of each JSON answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import RunFolder, file_checksum

from holdfast.cli.logs import sorted_logs
from holdfast.contracts.account.goodput import PARTS
from holdfast.contracts.disk.durable import to_json
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.leases import reading
from holdfast.contracts.disk.manifest import FileEntry, Manifest, read_manifest
from holdfast.contracts.disk.mirrors import MirrorRecord, write_record
from holdfast.contracts.disk.paths import MANIFEST, AttemptPaths, CheckpointName, RunPaths
from holdfast.contracts.records.documents import Claim, Outcome, Submission, write_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.nodes.heartbeats import HeartbeatWriter
from holdfast.workers.runs.attempts import reserve
from holdfast.workers.runs.request import build_request
from holdfast.workers.runs.run_folders import ForkPoint, create_run


def write_spec(folder: Path, **more: Any) -> Path:
    """A spec whose program exists, in `folder`."""
    (folder / "train.py").write_text("print('hello')\n")
    path = folder / "spec.yaml"
    spec = {"name": "kelp", "command": ["train.py"], "resources": {"gpus_per_node": 2}}
    path.write_text(json.dumps({**spec, **more}))
    return path


def add_checkpoint(paths: RunPaths, step: int, parent: str | None = None) -> str:
    """Add a committed checkpoint of one file; return its directory's name."""
    name = CheckpointName(step, 1, 1)
    directory = paths.checkpoint(name)
    directory.mkdir(parents=True)
    data = directory / "__0_0.distcp"
    data.write_bytes(bytes(range(256)) * 4)
    manifest = Manifest(
        run_uid=load_history(paths).record.uid,
        run=paths.name,
        name=str(name),
        step=step,
        attempt=1,
        launch=1,
        world_size=2,
        parent=parent,
        files=(FileEntry(path=data.name, bytes=1024, checksum=file_checksum(data)),),
        blocked_s=0.01,
        flush_s=0.2,
        committed_at=time.time(),
    )
    (directory / MANIFEST).write_bytes(to_json(manifest.model_dump(mode="json")))
    return str(name)


@pytest.fixture
def ended_run(root: Path, home: Path) -> RunPaths:
    """A run whose one attempt was preempted after two commits; it has no live process."""
    spec = RunSpec.model_validate(
        {
            "name": "kelp",
            "command": ["train.py"],
            "resources": {"gpus_per_node": 2},
            "launch": {"working_directory": str(home)},
            "checkpoint": {"keep": {"last": 1}},
        }
    )
    paths = create_run(spec, root, created_by="tester")
    record = load_history(paths).record
    attempt = reserve(paths, 1)
    assert attempt is not None
    request = build_request(record, spec, attempt=1, gpus=2, reason="first")
    write_document(attempt.request, request)
    now = time.time()
    host = socket.gethostname()
    job = Submission(job_id="77", executor="local", submitted_at=now, pid=2**22 + 1)
    write_document(attempt.submission, job)
    claim = Claim(
        job_id="77", pid=2**22 + 1, process_start_s=1.0, boot_id="x", host=host, claimed_at=now
    )
    write_document(attempt.claim, claim)
    outcome = Outcome(
        state=AttemptState.PREEMPTED,
        cause=Cause.PREEMPTION,
        job_id="77",
        hosts=(host,),
        world_size=2,
        command_digest=request.command_digest,
        first_step=1,
        last_step=20,
        committed_step=20,
        started_at=now,
        stop_requested_at=now,
        stop_committed_at=now + 1,
        ended_at=now + 2,
    )
    write_document(attempt.outcome, outcome)
    with JournalWriter(attempt.journal / "rank0.jsonl") as journal:
        journal.append(EventKind.RESUMED, attempt=1, launch=1, checkpoint=None, step=0)
    first = add_checkpoint(paths, 10)
    add_checkpoint(paths, 20, parent=f"kelp:{first}")
    return paths


WRONG_CALLS: list[tuple[Sequence[str], int, str]] = [
    (["show"], 2, "Missing argument"),
    (["show", "nobody"], 3, "no run 'nobody'"),
    (["nonsense"], 2, "No such command"),
    (["submit", "/nonexistent/spec.toml"], 3, "no such file"),
    (["relaunch", "x", "--gpus", "0"], 2, "Invalid value"),
    (["pin", "not-a-checkpoint"], 3, "not a checkpoint"),
    (["verify", "kelp:step-00000001.a0001.l01"], 3, "no run 'kelp'"),
    (["reindex", "/nonexistent/root"], 3, "no such directory"),
    (["fork", "nonsense", "--name", "x"], 3, "not a checkpoint"),
    (["logs", "nobody"], 3, "no run 'nobody'"),
    (["deploy"], 4, "PREFECT_API_URL is not set"),
]


@pytest.mark.parametrize(("arguments", "status", "reason"), WRONG_CALLS)
def test_a_wrong_call_has_its_own_exit_status_and_reports_the_reason(
    call: Call, arguments: Sequence[str], status: int, reason: str
) -> None:
    answer = call(*arguments)
    assert answer.status == status
    assert reason in answer.err
    assert answer.out == ""
    as_json = call(*arguments, "--json")
    assert as_json.status == status
    assert as_json.out == ""
    facts = json.loads(as_json.err)
    assert facts["exit_status"] == status
    assert reason in facts["message"]


def test_help_and_version_exit_with_0(call: Call) -> None:
    assert call("--version").status == 0
    for command in ("submit", "show", "runs", "logs", "relaunch", "prune", "db", "doctor"):
        answer = call(command, "--help")
        assert answer.status == 0, command
        assert "Usage" in answer.out


def test_a_wrong_spec_lists_every_problem_and_queues_nothing(
    call: Call, tmp_path: Path, root: Path
) -> None:
    spec = write_spec(tmp_path, nam="x", resources={"gpus_per_nod": 2})
    answer = call("submit", spec)
    assert answer.status == 2
    assert "did you mean name?" in answer.err
    assert "did you mean resources.gpus_per_node?" in answer.err
    assert not root.exists()


def test_a_missing_program_is_refused_before_anything_is_queued(
    call: Call, tmp_path: Path, root: Path
) -> None:
    spec = write_spec(tmp_path, command=["tarin.py"])
    answer = call("submit", spec)
    assert answer.status == 5
    assert "tarin.py is not a file under" in answer.err
    assert not (root / "kelp").exists()


def test_a_root_that_cannot_be_written_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answer = call("submit", write_spec(tmp_path), "--root", tmp_path / "file" / "runs")
    assert answer.status == 5
    assert "cannot write there" in answer.err


@pytest.mark.more
def test_an_unreachable_prefect_is_refused_before_anything_is_queued(
    home: Path, tmp_path: Path, root: Path
) -> None:
    # In a separate process: Prefect reads its settings once, when it is imported.
    command = [sys.executable, "-m", "holdfast.cli.main", "submit", str(write_spec(tmp_path))]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
        environment = {**os.environ, "PREFECT_API_URL": url}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 4
    assert url in done.stderr
    assert "prefect server start" in done.stderr
    assert not (root / "kelp").exists()


@pytest.mark.parametrize("command", ["submit", "runs", "show", "checkpoints", "lineage"])
def test_an_unreachable_database_is_reported(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    url = "postgresql://nobody@127.0.0.1:1/none?connect_timeout=2"
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", url)
    spec = write_spec(tmp_path, name="other")
    arguments = {"submit": [spec], "runs": []}.get(command, ["kelp"])
    answer = call(command, *arguments)
    assert answer.status == 4
    assert "127.0.0.1:1" in answer.err
    assert not (ended_run.directory.parent / "other").exists()


def test_an_early_exit_is_allowed_by_an_option(call: Call, tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    for options, allowed in (([], False), (["--allow-early-exit"], True)):
        request = call("submit", spec, "--dry-run", *options).json
        assert request["supervision"]["allow_early_exit"] is allowed


def test_a_dry_run_prints_the_request_and_touches_nothing(
    call: Call, tmp_path: Path, root: Path
) -> None:
    answer = call("submit", write_spec(tmp_path), "--dry-run", "--set", "resources.gpus_per_node=3")
    assert answer.status == 0
    request = answer.json
    assert (request["run"], request["attempt"], request["gpus_per_node"]) == ("kelp", 1, 3)
    assert request["command"] == ["train.py"]
    assert len(request["command_digest"]) == 64
    assert not root.exists()


def test_show_records_an_ended_attempt_without_a_live_flow(call: Call, ended_run: RunPaths) -> None:
    answer = call("show", "kelp", "--json")
    assert answer.status == 0, answer.err
    run = answer.json
    wanted = {"run", "name", "state", "spec_digest", "command_digest", "step", "goodput"}
    assert wanted <= set(run)
    (attempt,) = run["attempts"]
    assert (attempt["state"], attempt["cause"]) == ("preempted", "preemption")
    assert (attempt["first_step"], attempt["last_step"], attempt["world_size"]) == (1, 20, 2)
    assert attempt["signal_to_commit_s"] == pytest.approx(1.0)
    assert run["state"] == "waiting"


def test_the_end_of_an_attempt_journals_its_goodput(call: Call, ended_run: RunPaths) -> None:
    shown = call("show", "kelp", "--json").json["goodput"]
    (reported,) = [e for e in load_history(ended_run).events if e.kind is EventKind.GOODPUT]
    assert reported.data.keys() == {*shown, "attempt"}
    assert reported.data["total_s"] == pytest.approx(
        sum(reported.data[f"{part}_s"] for part in PARTS)
    )


def test_show_warns_when_the_grace_is_shorter_than_the_measured_flush(
    call: Call, ended_run: RunPaths
) -> None:
    assert call("show", "kelp", "--json").json["warnings"] == []
    with JournalWriter(ended_run.attempt(1).rank_journal) as journal:
        journal.append(EventKind.STAGED, attempt=1, checkpoint="c", blocked_s=0.0)
        journal.append(EventKind.COMMITTED, attempt=1, checkpoint="c", flush_s=60.0)
    (warning,) = call("show", "kelp", "--json").json["warnings"]
    assert "a grace of 30 s is too short" in warning
    assert "75.0 s" in warning
    assert warning in call("show", "kelp").out


@pytest.mark.parametrize("command", ["show", "checkpoints", "lineage", "runs"])
def test_every_read_command_has_text_output(call: Call, ended_run: RunPaths, command: str) -> None:
    answer = call(command, *([] if command == "runs" else ["kelp"]))
    assert answer.status == 0, answer.err
    assert "kelp" in answer.out


def test_a_run_is_found_by_folder_path_and_uid(call: Call, ended_run: RunPaths) -> None:
    uid = load_history(ended_run).record.uid
    for name in ("kelp", uid, str(ended_run.directory)):
        assert call("show", name, "--json").json["uid"] == uid


def test_checkpoints_are_listed_oldest_first(call: Call, ended_run: RunPaths) -> None:
    found = call("checkpoints", "kelp", "--json").json
    assert [each["step"] for each in found] == [10, 20]
    wanted = {"id", "step", "path", "state", "reason", "parent", "attempt", "world_size", "bytes"}
    wanted |= {"checksum", "blocked_s", "flush_s", "committed_at", "pinned", "mirror"}
    assert wanted <= set(found[0])
    assert found[1]["parent"] == found[0]["id"]
    url = "s3://bucket/kelp.0"
    write_record(
        ended_run.list_checkpoints()[0],
        MirrorRecord(url=url, bytes=1, seconds=0.1, mirrored_at=1.0),
    )
    again = call("checkpoints", "kelp", "--json").json
    assert [each["mirror"] for each in again] == [url, None]
    assert call("verify", again[0]["id"], "--json").json["mirror"] == url


def test_lineage_has_nodes_and_edges(call: Call, ended_run: RunPaths) -> None:
    graph = call("lineage", "kelp", "--json").json
    kinds = {node["kind"] for node in graph["nodes"]}
    assert {"checkpoint", "attempt"} <= kinds
    assert {"from", "to", "kind"} == set(graph["edges"][0])
    assert any(edge["kind"] == "parent" for edge in graph["edges"])


def test_runs_are_listed_newest_first(
    call: Call, ended_run: RunPaths, root: Path, home: Path
) -> None:
    time.sleep(0.01)
    spec = RunSpec.model_validate({"name": "wrack", "command": ["train.py"]})
    create_run(spec, root, created_by="tester")
    assert [row["run"] for row in call("runs", "--json").json] == ["wrack", "kelp"]
    assert [row["run"] for row in call("runs", "--limit", 1, "--json").json] == ["wrack"]


def test_pin_and_prune(call: Call, ended_run: RunPaths) -> None:
    first, second = (path.name for path in ended_run.list_checkpoints())
    assert call("pin", f"kelp:{first}", "--note", "best", "--json").json["pinned"] is True
    plan = call("prune", "kelp", "--dry-run", "--json").json
    assert (plan["deleted"], [each["reason"] for each in plan["kept"]]) == (
        [],
        ["pinned", "the newest, last 1"],
    )
    assert call("unpin", ended_run.checkpoint(first), "--json").json["pinned"] is False
    plan = call("prune", "kelp", "--dry-run", "--json").json
    assert [each["checkpoint"] for each in plan["deleted"]] == [first]
    assert ended_run.checkpoint(first).is_dir()
    refused = call("prune", "kelp")
    assert refused.status == 2
    assert "would delete 1 checkpoint of kelp" in refused.err
    assert ended_run.checkpoint(first).exists(), "without a terminal, only --yes deletes"
    done = call("prune", "kelp", "--yes", "--json").json
    assert [each["checkpoint"] for each in done["deleted"]] == [first]
    assert [(each["checkpoint"], each["reason"]) for each in done["kept"]] == [
        (second, "the newest, last 1")
    ]
    assert done["bytes_deleted"] > 0
    assert not ended_run.checkpoint(first).exists()
    gone, kept = call("checkpoints", "kelp", "--json").json
    assert (gone["state"], kept["state"]) == ("deleted", "committed")
    assert call("verify", f"kelp:{first}").status == 3


def test_verify_distinguishes_intact_from_damaged(call: Call, ended_run: RunPaths) -> None:
    first, second = ended_run.list_checkpoints()
    whole = call("verify", f"kelp:{first.name}", "--json")
    assert whole.status == 0
    assert whole.json["ok"] is True
    assert whole.json["files"] == 1
    data = second / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[500] ^= 1
    data.write_bytes(content)
    damaged = call("verify", second, "--json")
    assert damaged.status == 1
    assert damaged.json["ok"] is False
    assert "__0_0.distcp: checksum" in damaged.json["damaged"][0]
    (second / MANIFEST).unlink()
    assert call("verify", second).status == 1
    manifest = read_manifest(first)
    assert manifest is not None
    strange = manifest.model_copy(update={"run_uid": "9" * 32, "run": "kombu"})
    (first / MANIFEST).write_text(strange.model_dump_json())
    found = call("verify", first, "--json").json["damaged"]
    assert found == ["manifest.json: belongs to run kombu; this run is kelp"]


def test_an_invalid_operator_request_is_refused(call: Call, ended_run: RunPaths) -> None:
    assert call("cancel", "kelp", "--json").json["state"] == "cancelled"
    answer = call("pause", "kelp")
    assert answer.status == 5
    assert "is cancelled, so there is nothing to pause" in answer.err
    assert call("relaunch", "kelp", "--gpus", 64).status == 2


def test_standard_output_comes_before_standard_error(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path / "0001")
    names = ("l01/rank-00000.stdout.log", "l01/rank-00000.stderr.log", "l02/rank-00000.stdout.log")
    for name in reversed(names):
        path = attempt.logs / "node-0000" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    logs = [one.path for one in sorted_logs(attempt, 0)]
    found = [str(path.relative_to(attempt.logs / "node-0000")) for path in logs]
    assert found == list(names)


def test_logs_shows_the_requested_rank(call: Call, ended_run: RunPaths) -> None:
    attempt = ended_run.attempt(1)
    for rank in (0, 1):
        path = attempt.rank_log(0, 1, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"hello from {rank}\n")
    assert call("logs", "kelp").out == "hello from 0\n"
    assert call("logs", "kelp", "--rank", 1).out == "hello from 1\n"
    reported = call("logs", "kelp", "--rank", 1, "--json").json
    assert reported["logs"][0]["text"] == "hello from 1\n"
    missing = call("logs", "kelp", "--rank", 9)
    assert (missing.status, "no rank 9: attempt 1 has 2 ranks" in missing.err) == (3, True)
    assert call("logs", "kelp", "--attempt", 3).status == 3


def test_reindex_fails_when_a_run_cannot_be_read(call: Call, ended_run: RunPaths) -> None:
    root = ended_run.directory.parent
    broken = RunPaths(root / "broken")
    broken.directory.mkdir()
    broken.spec.write_text("{}")
    answer = call("reindex", root, "--json")
    assert answer.status == 1
    assert "broken: cannot be read" in answer.err
    assert ended_run.name in answer.json["runs"]
    assert list(answer.json["failed"]) == ["broken"]


def test_reindex_rebuilds_the_same_rows(call: Call, ended_run: RunPaths, root: Path) -> None:
    with JournalWriter(ended_run.journal_of("flow")) as journal:
        journal.append(EventKind.NOTE, text="seen")
    before = call("show", "kelp", "--json").json
    report = call("reindex", root, "--json")
    assert report.status == 0
    assert report.json["runs"] == ["kelp"]
    after = call("show", "kelp", "--json").json
    assert {k: v for k, v in after.items() if k != "goodput"} == {
        k: v for k, v in before.items() if k != "goodput"
    }


def test_db_upgrades_and_downgrades(call: Call, home: Path) -> None:
    (home / "home" / "holdfast.db").unlink()
    assert call("db", "current").status == 1
    head = call("db", "upgrade", "--json").json["revision"]
    now = call("db", "current", "--json").json
    assert now == {"revision": head, "head": head, "ok": True, "problem": None}
    assert call("db", "downgrade", "base", "--yes", "--json").json["revision"] is None
    assert call("db", "downgrade", "nonsense").status == 2


def test_doctor_checks_everything(call: Call, tmp_path: Path) -> None:
    found = call("doctor", "--json")
    levels = {check["name"]: check["level"] for check in found.json["checks"]}
    assert {"python", "root", "database", "prefect", "slurm", "disk space"} <= set(levels)
    assert levels["database"] == "ok"
    (tmp_path / "file").write_text("")
    bad = call("doctor", "--root", tmp_path / "file" / "x")
    assert bad.status == 1
    assert "next: give a writable directory" in bad.out


def test_show_reports_the_newest_step_of_a_live_run(call: Call, root: Path) -> None:
    run = RunFolder(root, "gpt", "a" * 32, created_at=time.time())
    run.submit(1, 2, time.time())
    run.claim(1, time.time())
    run.launch(1, 1, 0, None)
    run.commit(40, 1, at=time.time())
    rank = {"rank": 0, "step": 57, "phase": "train", "age_s": 0.1, "step_time_s": 1.0, "pid": 1}
    beat = {"node": 0, "host": "a", "time": time.time(), "attempt": 1, "launch": 1}
    writer = HeartbeatWriter(run.paths.attempt(1))
    writer.write([{**beat, "agent_pid": 1, "ranks": [rank]}])
    writer.close()
    shown = call("show", "gpt", "--json").json
    assert (shown["state"], shown["step"], shown["live_step"]) == ("running", 40, 57)
    (waited,) = call("wait", "gpt", "--timeout", "0", "--json").json
    (listed,) = call("runs", "--json").json
    assert shown["step"] == waited["step"] == listed["step"] == 40
    for one in (shown, waited):
        assert (one["committed_step"], one["trained_step"]) == (40, 57)


def test_delete_removes_an_ended_run_and_nothing_that_somebody_needs(
    call: Call, ended_run: RunPaths
) -> None:
    first = ended_run.list_checkpoints()[0].name
    call("cancel", "kelp")
    call("pin", f"kelp:{first}")
    refused = call("delete", "kelp", "--yes")
    assert refused.status == 5
    assert f"{first} is pinned. Remove the pin" in refused.err
    call("unpin", f"kelp:{first}")
    with reading(ended_run.checkpoint(first)):
        assert "is being read by" in call("delete", "kelp", "--yes").err
    refused = call("delete", "kelp")
    assert refused.status == 2
    assert "would delete run kelp with 2 checkpoints" in refused.err
    facts = call("delete", "kelp", "--dry-run", "--json").json
    assert (facts["checkpoints"], facts["dry_run"]) == (2, True)
    assert ended_run.spec.exists()
    # A process that was killed while it deleted left this one.
    left = ended_run.directory.with_name(".deleted-wrack-" + "1" * 32)
    (left / "checkpoints").mkdir(parents=True)
    (left / "spec.json").touch()
    assert call("delete", "kelp", "--yes", "--json").json["uid"] == facts["uid"]
    assert not ended_run.directory.exists()
    assert not left.exists()
    assert call("runs", "--json").json == []
    assert call("show", "kelp").status == 3


def test_a_run_that_lives_or_is_supervised_or_forked_is_not_deleted(
    call: Call, ended_run: RunPaths
) -> None:
    root = ended_run.directory.parent
    call("cancel", "kelp")
    with locked(ended_run.flow_lock, 0.0, owner_only=True):
        assert "kelp still has a supervisor" in call("delete", "kelp", "--yes").err
    live = create_run(RunSpec(name="wrack", command=("t.py",)), root, created_by="tester")
    refused = call("delete", "wrack", "--yes")
    assert refused.status == 5
    assert "wrack is queued" in refused.err
    assert "holdfast cancel wrack" in refused.err
    name = ended_run.list_checkpoints()[0]
    uid = load_history(ended_run).record.uid
    point = ForkPoint(checkpoint_id=f"kelp:{name.name}", path=name, run_uid=uid)
    spec = RunSpec(name="fork", command=("t.py",))
    create_run(spec, root, created_by="tester", forked=point)
    assert "fork is a fork of kelp" in call("delete", "kelp", "--yes").err
    assert live.spec.exists()
    assert ended_run.spec.exists()


def test_deleting_a_run_deletes_its_own_checkpoint_directory_and_no_other(
    call: Call, root: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    spec = RunSpec(name="kelp", command=("t.py",), checkpoint={"directory": str(elsewhere)})
    paths = create_run(spec, root, created_by="tester")
    (elsewhere / "mine").mkdir()
    add_checkpoint(paths, 10)
    call("cancel", "kelp")
    assert call("delete", "kelp", "--yes").status == 0
    assert [one.name for one in elsewhere.iterdir()] == ["mine"]
    assert list(root.glob("*kelp*")) == []
