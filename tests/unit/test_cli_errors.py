"""`holdfast show --errors`: the error timeline of the web UI, as text and as JSON."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.cli_calls import Call
from tests.support.crashed_runs import SECRET, crashed_run, write_crash
from tests.support.runs import T0, RunFolder

from holdfast.contracts.states import AttemptState, Cause


def test_the_first_cause_comes_first_and_equal_errors_are_one(call: Call, root: Path) -> None:
    crashed_run(root)
    shown = call("show", "crashed", "--errors")
    assert shown.status == 0, shown
    assert SECRET not in shown.out
    lines = shown.out.splitlines()
    assert lines[0] == "run crashed, attempt 2: failed, cause infrastructure"
    assert lines[1].endswith("first cause: rank 3 on node-b: killed by signal 9 (SIGKILL)")
    (peers,) = [line for line in lines if "ranks 0-2" in line]
    assert "Connection closed by peer" in peers
    assert peers.endswith(", after rank 3 was killed")
    assert "Traceback" not in shown.out, "an error that only reports the first one has no traceback"
    text = " ".join(shown.out.split())
    assert "the last that worked is attempt 1, launch 1" in text
    assert "hosts node-a node-b" in text


def test_an_earlier_attempt_can_be_chosen_and_the_output_names_it(call: Call, root: Path) -> None:
    run = crashed_run(root)
    run.submit(3, 4, T0 + 700)
    run.claim(3, T0 + 701, "node-b")
    run.launch(3, 1, 50, None, 4)
    write_crash(run, 3)
    run.finish(3, AttemptState.FAILED, Cause.USER_ERROR, 50, T0 + 800)
    newest, earlier, healthy = (
        call("show", "crashed", "--errors", *chosen).out.splitlines()
        for chosen in ([], ["--attempt", "2"], ["--attempt", "1"])
    )
    assert newest[0] == "run crashed, attempt 3: failed, cause user_error"
    assert newest[1] == "with errors too: attempt 2; `--attempt N` shows another one"
    assert earlier[0] == "run crashed, attempt 2: failed, cause infrastructure"
    assert earlier[1] == "with errors too: attempt 3; `--attempt N` shows another one"
    assert healthy[0] == "run crashed, attempt 1: no launch of it crashed or hung"
    unknown = call("show", "crashed", "--errors", "--attempt", "9")
    assert unknown.status != 0
    assert "has no attempt 9; the last one is 3" in unknown.err
    alone = call("show", "crashed", "--attempt", "2")
    assert alone.status == 2
    assert "--attempt: expected it with --errors" in " ".join(alone.err.split())


def test_json_has_the_whole_timeline(call: Call, root: Path) -> None:
    crashed_run(root)
    healthy = RunFolder(root, "healthy", "b" * 32)
    healthy.submit(1, 2, T0)
    healthy.claim(1, T0 + 1)
    printed = call("show", "crashed", "healthy", "--errors", "--json")
    crashed, fine = printed.json
    assert crashed["first"]["ranks"] == "3"
    assert crashed["first"]["signal"] == "signal 9 (SIGKILL)"
    first, peers, *_ = crashed["entries"]
    assert first == crashed["first"]
    assert (peers["ranks_count"], peers["is_secondary"]) == (3, True)
    assert peers["traceback"].splitlines()[-1].startswith("ConnectionError")
    assert SECRET not in printed.out
    assert (fine["attempt"], fine["entries"]) == (None, [])
    assert call("show", "healthy", "--errors").out == "run healthy: no attempt has errors\n"


def test_a_run_without_its_folder_is_explained_by_the_index(call: Call, root: Path) -> None:
    run = crashed_run(root)
    before = call("show", "crashed", "--errors", "--json").json
    shutil.rmtree(run.paths.directory)
    after = call("show", "crashed", "--errors", "--json")
    assert after.status == 0, after
    assert "no longer exists" in after.err
    assert (after.json["attempt"], after.json["first"]["ranks"]) == (2, before["first"]["ranks"])


def test_other_views_cannot_be_combined_with_errors(call: Call, root: Path) -> None:
    crashed_run(root)
    for other in ("--watch", "--spec", "--diff"):
        refused = call("show", "crashed", "--errors", other)
        assert refused.status == 2
        assert f"--errors and {other}" in " ".join(refused.err.split())
