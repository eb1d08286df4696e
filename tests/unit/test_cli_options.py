"""Each option of the commands that read or keep: set, with its effect, and with bad values.

The options are those of the command's own parser. One without a row fails the test.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.cli_calls import CliResult
from tests.support.fake_hub import environment_of, fake_hub
from tests.support.runs import T0, RunFolder, build_sample_runs
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from typer.core import TyperOption

from holdfast.cli.main import all_commands, main
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.rank_logs import TIMES, time_line
from holdfast.contracts.records.history import load_events
from holdfast.contracts.states import AttemptState, Cause

OLDEST, NEWEST = "gpt:step-00000050.a0001.l01", "gpt:step-00000200.a0003.l01"
# The covered commands, each with arguments that it needs. Other commands start or order something.
COMMANDS: dict[str, list[str]] = {
    "runs": [],
    "show": ["gpt"],
    "checkpoints": ["gpt"],
    "lineage": ["gpt"],
    "events": ["gpt"],
    "logs": ["gpt"],
    "wait": ["gpt"],
    "verify": [NEWEST],
    "annotate": ["gpt", "--tag", "seen"],
    "pin": [OLDEST],
    "unpin": [OLDEST],
    "metric": [OLDEST, "accuracy=0.5"],
    "export": [NEWEST, "--to", "torch", "--output", "/nonexistent/x"],
    "prune": ["kelp", "--dry-run"],
    "delete": ["kelp", "--dry-run"],
    "reindex": [],
    "db reindex": [],
    "db upgrade": [],
    "db downgrade": ["0001"],
    "db current": [],
}
EXPORT_S_MAX = 240.0
# Values that an option refuses, with the exit status.
BAD: dict[tuple[str, str], tuple[Sequence[str], int]] = {
    ("runs", "--limit"): (["0", "-1", "many"], 2),
    ("runs", "--state"): (["sleeping", ""], 2),
    ("runs", "--tag"): (["a b", "", "x" * 65], 2),
    ("annotate", "--tag"): (["a b", "", "x" * 65], 2),
    ("annotate", "--untag"): (["a b", "", "seen"], 2),
    ("annotate", "--note"): (["a\x07", "a\u202eb", "x" * 4001], 2),
    ("runs", "--since"): (["yesterday", "5", ""], 2),
    ("runs", "--sort"): (["size", ""], 2),
    ("checkpoints", "--best"): (["nothing"], 3),
    ("checkpoints", "--mode"): (["most", "min"], 2),
    ("checkpoints", "--state"): (["broken"], 2),
    ("checkpoints", "--since"): (["yesterday"], 2),
    ("lineage", "--format"): (["pdf"], 2),
    ("events", "--kind"): (["nonsense"], 2),
    ("events", "--since"): (["yesterday"], 2),
    ("events", "--tail"): (["-1", "x"], 2),
    ("logs", "--rank"): (["-1", "x"], 2),
    ("logs", "--attempt"): (["0", "x"], 2),
    ("show", "--attempt"): (["0", "x"], 2),
    ("logs", "--tail"): (["-1"], 2),
    ("logs", "--since"): (["yesterday"], 2),
    ("logs", "--grep"): (["("], 2),
    ("wait", "--timeout"): (["-1", "soon"], 2),
    ("wait", "--for"): (["ever"], 2),
    ("export", "--to"): (["zip"], 2),
    ("export", "--output"): (["/"], 5),
    ("export", "--include"): (["nothing"], 1),
    ("export", "--push"): (["lab/small", "small", ""], 2),
    ("export", "--rename"): (["x"], 2),
    ("export", "--dtype"): (["fp16", "int8"], 2),
    ("prune", "--keep-last"): (["0", "x"], 2),
    ("pin", "--note"): (["x" * 4001, "\x1b[2J"], 2),
}
# Any text is a pattern or a user.
ANY_TEXT = {("runs", "--user"), ("runs", "--name")}


@dataclass(frozen=True)
class World:
    """A home with the sample runs, an ended run `kelp`, and a stock checkpoint."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "runs"

    def __call__(self, *arguments: object, out: io.StringIO | None = None) -> CliResult:
        out, err, status = out or io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    main()
                except SystemExit as ended:
                    status = int(ended.code or 0)
        return CliResult(status, out.getvalue(), err.getvalue())

    def json(self, *arguments: object) -> Any:
        done = self(*arguments, "--json")
        assert done.status == 0, done
        return done.json

    def runs(self, *arguments: object) -> list[str]:
        return [one["run"] for one in self.json("runs", *arguments)]

    def steps(self, *arguments: object) -> list[int]:
        return [one["step"] for one in self.json("checkpoints", "gpt", *arguments)]

    def kelp(self) -> RunPaths:
        """The run `kelp`, made again: three checkpoints, of which its rules keep two."""
        shutil.rmtree(self.root / "kelp", ignore_errors=True)
        fields = {"checkpoint": {"keep": {"last": 2}}}
        run = RunFolder(self.root, "kelp", "c" * 32, fields, created_at=T0 - 1000)
        run.submit(1, 2, T0)
        for step in (10, 20, 30):
            run.commit(step, 1, at=T0 + step)
        end(run)
        return run.paths

    def seen_until_the_end(self, *arguments: object) -> str:
        """What a command prints while the run `brief` ends."""
        shutil.rmtree(self.root / "brief", ignore_errors=True)
        run = RunFolder(self.root, "brief", "d" * 32, created_at=T0 - 2000)
        run.submit(1, 2, T0)
        run.claim(1, T0 + 1)
        shown = io.StringIO()

        def end_when_shown() -> None:
            ends_at = time.monotonic() + 30
            while "brief" not in shown.getvalue() and time.monotonic() < ends_at:
                time.sleep(0.05)
            end(run)

        ending = threading.Thread(target=end_when_shown)
        ending.start()
        try:
            done = self(*arguments, out=shown)
        finally:
            ending.join()
            shutil.rmtree(self.root / "brief")
        assert done.status == 0, done
        return done.out


def end(run: RunFolder) -> None:
    run.tell("flow", EventKind.DECISION, after_attempt=1, action="stop", gpus=2, reason="x")
    run.record_attempt_end(1, AttemptState.FAILED, Cause.USER_ERROR, 30, T0 + 40)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(home))
        for name in ("HOLDFAST_ROOT", "HOLDFAST_DATABASE_URL", "PREFECT_API_URL"):
            patch.delenv(name, raising=False)
        one = World(home)
        one.root.mkdir()
        for _ in build_sample_runs(one.root):
            pass
        for attempt in (1, 3):
            for rank in (0, 1):
                path = RunPaths(one.root / "gpt").attempt(attempt).rank_log(0, 1, rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"attempt {attempt}\nrank {rank}\nlast line\n")
        state = {"model": {"a.x": torch.zeros(2), "b.x": torch.ones(2)}, "lr": 0.5}
        save_with_dcp(state, checkpoint_id=home / "stock", no_dist=True)
        one.kelp()
        yield one


def runs_rows(w: World) -> dict[str, bool]:
    by = ("created", "name", "step", "state", "ended")
    w.json("annotate", "gpt", "--tag", "odd")
    found = {
        "--limit": w.runs("--limit", 1) == ["gpt-b"],
        "--state": w.runs("--state", "completed") == ["gpt"],
        "--user": (w.runs("--user", "nobody"), len(w.runs("--user", "tester"))) == ([], 3),
        "--name": w.runs("--name", "*-b", "--name", "x") == ["gpt-b"],
        "--tag": (w.runs("--tag", "odd"), w.runs("--tag", "odd", "--tag", "Odd")) == (["gpt"], []),
        "--since": (w.runs("--since", "1h"), w.runs("--since", "2023-11-14T22:20:00+00:00"))
        == ([], ["gpt-b"]),
        "--sort": [w.runs("--sort", one)[0] for one in by] == ["gpt-b", "gpt", "gpt", "gpt", "gpt"]
        and w.runs("--sort", "name")[1:] == ["gpt-b", "kelp"]
        and w.runs("--sort", "step")[1:] == ["gpt-b", "kelp"],
    }
    # The index still lists the run when its folder is gone.
    watched = w.seen_until_the_end("runs", "--name", "brief", "--watch")
    return {**found, "--watch": "running" in watched and "failed" in watched}


def show_rows(w: World) -> dict[str, bool]:
    watched = w.seen_until_the_end("show", "brief", "--watch")
    spec = w("show", "gpt", "--spec").out
    differing = w.json("show", "gpt", "kelp", "--diff")["keys"]
    errors = w("show", "gpt", "--errors").out
    assert w("show", "gpt", "--diff").status == 2
    return {
        "--diff": [one["value"] for one in differing["checkpoint.keep.last"]] == [None, 2]
        and "resources.nodes" not in differing
        and "have the same values" in w("show", "gpt", "gpt", "--diff").out,
        "--errors": "first cause: " in errors and "first cause: " not in w("show", "gpt").out,
        "--attempt": "attempt 1" in w("show", "gpt", "--errors", "--attempt", "1").out,
        "--watch": watched.count("folder") >= 2 and "failed" in watched,
        "--spec": "resources.gpus_per_node" in spec
        and "resources.gpus_per_node" not in w("show", "gpt").out,
    }


def checkpoints_rows(w: World) -> dict[str, bool]:
    saved = w.steps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(w.home / "other"))
        scored = RunFolder(w.home / "scored", "scored", "e" * 32)
        scored.submit(1, 2, T0)
        for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
            scored.commit(step, 1, metrics={"loss": loss})
        folder = scored.paths.directory

        def best(*more: str) -> list[int]:
            found = w.json("checkpoints", folder, "--best", "loss", *more)
            return [one["step"] for one in found]

        ordered = best(), best("--mode", "max")
    return {
        "--best": ordered[0] == [20, 30, 10],
        "--mode": ordered[1] == [10, 30, 20],
        "--state": w.steps("--state", "deleted") == [120] and 120 in saved,
        "--pinned": w.steps("--pinned") == [50],
        "--since": w.steps("--since", "2023-11-14T22:16:30+00:00") == [150, 200],
    }


def lineage_rows(w: World) -> dict[str, bool]:
    shown = {one: w("lineage", "gpt", "--format", one).out for one in ("mermaid", "dot")}
    sent = json.loads(w("lineage", "gpt", "--format", "openlineage").out)
    graph = json.loads(w("lineage", "gpt", "--format", "json").out)
    drawn = "-->" in shown["mermaid"] and shown["dot"].startswith("digraph")
    return {"--format": drawn and "eventType" in sent[0] and graph.keys() == {"nodes", "edges"}}


def events_rows(w: World) -> dict[str, bool]:
    every = w.json("events", "gpt")
    lines = w("events", "gpt", "--follow", "--json").out.splitlines()
    return {
        "--kind": [one["kind"] for one in w.json("events", "gpt", "--kind", "forked")]
        == ["forked"],
        "--since": w.json("events", "gpt", "--since", "2999-01-01T00:00") == [],
        "--tail": w.json("events", "gpt", "--tail", 2) == every[-2:],
        "--follow": [json.loads(line) for line in lines] == every,
        "--publish": "PREFECT_API_URL" in w("events", "gpt", "--publish").err,
    }


def logs_rows(w: World) -> dict[str, bool]:
    def out(*more: object) -> str:
        return w("logs", "gpt", *more).out

    lines = [json.loads(line) for line in out("--follow", "--json").splitlines()]
    log = RunPaths(w.root / "gpt").attempt(3).rank_log(0, 1, 0)
    # Between the two heartbeats, rank 0 printed the end of its second line and its third.
    (log.parent / TIMES).write_text(
        time_line(T0, log.name, len("attempt 3\nran")) + time_line(T0 + 60, log.name, 99)
    )
    stamped = [line.split(" ", 1) for line in out("--timestamps").splitlines()]
    timed = [
        json.loads(one)["at"] for one in out("--timestamps", "--follow", "--json").splitlines()
    ]
    (log.parent / TIMES).unlink()
    assert w("logs", "gpt", "--timestamps", "--json").status == 2
    return {
        "--timestamps": [(datetime.fromisoformat(at).timestamp(), text) for at, text in stamped]
        == [(T0, "attempt 3"), (T0, "rank 0"), (T0 + 60, "last line")]
        and timed == [T0, T0, T0 + 60]
        and out("--timestamps").startswith("- attempt 3\n"),
        "--rank": out("--rank", 1) == "attempt 3\nrank 1\nlast line\n",
        "--all-ranks": {"0: rank 0", "1: rank 1"} <= {*out("--all-ranks").splitlines()},
        "--attempt": out("--attempt", 1).startswith("attempt 1\n"),
        "--all-attempts": out("--all-attempts") == out("--attempt", 1) + out("--attempt", 3)
        and [one["attempt"] for one in w.json("logs", "gpt", "--all-attempts")["logs"]] == [1, 3],
        "--tail": out("--tail", 1) == "last line\n",
        "--since": out("--since", "2999-01-01T00:00") == "" and out("--since", "1h") != "",
        "--grep": out("--grep", "^rank") == "rank 0\n",
        "--follow": [one["text"] for one in lines] == ["attempt 3\n", "rank 0\n", "last line\n"],
    }


def wait_rows(w: World) -> dict[str, bool]:
    began = time.monotonic()
    late = w("wait", "gpt-b", "--timeout", "0.1").status
    running = w("wait", "gpt-b", "--for", "running")
    return {
        "--timeout": late == 1 and time.monotonic() - began < 30,
        "--for": running.status == 0 and running.out.endswith("running: its ranks train\n"),
        "--any": w("wait", "gpt", "gpt-b", "--any").status == 0,
    }


def export_rows(w: World) -> dict[str, bool]:
    output = w.home / "weights"
    call = ["export", w.home / "stock", "--to", "safetensors", "--output", output]
    call += ["--include", "model.a", "--rename", "model.a.*=model.c.*", "--dtype", "float16"]
    assert w(*call).status == 0
    found = load_file(output)
    is_file = output.is_file()
    push = [w.home / "stock", "--to", "hf", "--push", "lab/stock", "--private"]
    with fake_hub() as hub:
        # The client reads its address when it is imported.
        subprocess.run(
            [str(Path(sys.executable).with_name("holdfast")), "export", *map(str, push)],
            env={**os.environ, **environment_of(hub, w.home)},
            capture_output=True,
            timeout=EXPORT_S_MAX,
            check=True,
        )
    return {
        "--push": "model.safetensors" in hub.files("lab/stock"),
        "--private": hub.private == {"lab/stock"},
        "--to": is_file,
        "--output": is_file,
        "--include": len(found) == 1,
        "--rename": [*found] == ["c.x"],
        "--dtype": {value.dtype for value in found.values()} == {torch.float16},
    }


def annotate_rows(w: World) -> dict[str, bool]:
    first = w.json("annotate", "gpt-b", "--tag", "a", "--tag", "b", "--note", "slow")
    second = w.json("annotate", "gpt-b", "--untag", "a")
    return {
        "--tag": first["tags"] == ["a", "b"],
        "--untag": (second["tags"], second["note"]) == (["b"], "slow"),
        "--note": w.json("annotate", "gpt-b", "--note", "")["note"] is None
        and first["note"] == "slow",
    }


def pin_rows(w: World) -> dict[str, bool]:
    assert w("pin", NEWEST, "--note", "for the paper").status == 0
    lines = load_events(RunPaths(w.root / "gpt"))
    assert w("unpin", NEWEST).status == 0
    notes = [one.data.get("note") for one in lines if one.kind is EventKind.PINNED]
    return {"--note": notes[-1] == "for the paper"}


def prune_rows(w: World) -> dict[str, bool]:
    paths = w.kelp()
    planned = w.json("prune", "kelp", "--dry-run", "--keep-last", 1)
    still = len(paths.list_checkpoints())
    assert w("prune", "kelp").status == 2
    w.json("prune", "kelp", "--yes")
    return {
        "--dry-run": still == 3,
        "--keep-last": len(planned["deleted"]) == 2,
        "--yes": len(paths.list_checkpoints()) == 2,
    }


def delete_rows(w: World) -> dict[str, bool]:
    paths = w.kelp()
    w.json("delete", "kelp", "--dry-run")
    still = paths.spec.exists()
    assert w("delete", "kelp").status == 2
    w.json("delete", "kelp", "--yes")
    is_gone = not paths.directory.exists()
    w.kelp()
    return {"--dry-run": still, "--yes": is_gone}


def downgrade_rows(w: World) -> dict[str, bool]:
    assert w("db", "downgrade", "base").status == 2
    gone = w.json("db", "downgrade", "base", "--yes")["revision"] is None
    assert w("db", "upgrade").status == 0
    return {"--yes": gone}


ROWS: dict[str, Callable[[World], dict[str, bool]]] = {
    "runs": runs_rows,
    "show": show_rows,
    "checkpoints": checkpoints_rows,
    "lineage": lineage_rows,
    "events": events_rows,
    "logs": logs_rows,
    "wait": wait_rows,
    "export": export_rows,
    "annotate": annotate_rows,
    "pin": pin_rows,
    "prune": prune_rows,
    "delete": delete_rows,
    "db downgrade": downgrade_rows,
}


def options_of(command: str) -> dict[str, TyperOption]:
    """The options of a command by their long names, from its parser."""
    found: Any = all_commands()
    for word in command.split():
        found = found.commands[word]
    options = [one for one in found.params if isinstance(one, TyperOption)]
    return {max(one.opts, key=len): one for one in options}


@pytest.mark.more
@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_its_effect(world: World, command: str) -> None:
    common = {"--root", "--json"}
    seen = ROWS[command](world) if command in ROWS else {}
    assert seen.keys() == options_of(command).keys() - common
    assert [name for name, has_effect in seen.items() if not has_effect] == []


@pytest.mark.more
@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_refuses_bad_values(world: World, command: str) -> None:
    arguments = COMMANDS[command]
    if command == "export":
        arguments = [str(world.home / "stock"), *arguments[1:-1], str(world.home / "bad")]
    for name, option in options_of(command).items():
        if option.is_flag or name in {"--root", "--json"} or (command, name) in ANY_TEXT:
            continue
        values, status = BAD[command, name]
        for value in values:
            refused = world(*command.split(), *arguments, name, value)
            assert refused.status == status, (command, name, value, refused)
            assert refused.err


@pytest.mark.more
@pytest.mark.parametrize("command", COMMANDS)
def test_root_and_json_have_their_effect_everywhere(world: World, command: str) -> None:
    words, arguments, own = command.split(), COMMANDS[command], options_of(command)
    if "--root" in own:
        other = world.home / "empty"
        other.mkdir(exist_ok=True)
        done = world(*words, *arguments, "--root", other, "--json")
        listed = command in {"runs", "reindex", "db reindex"}
        assert (done.status, listed) in {(0, True), (3, False)}, done
        assert not listed or "gpt" not in done.out
        assert world(*words, *arguments, "--root", world.home / "none").status == 3
    if "--json" in own:
        if command == "unpin":
            world("pin", OLDEST)
        done = world(*words, *arguments, "--json")
        is_export = command == "export"
        json.loads(done.err if is_export else done.out)
    if command == "unpin":
        world("pin", OLDEST)


def test_ids_are_completed(world: World) -> None:
    from click import Context

    from holdfast.cli.shared.arguments import complete_checkpoint

    command: Any = all_commands()
    context: Any = Context(command.commands["verify"])
    context.params["root"] = str(world.root)
    assert complete_checkpoint(context, "gp") == ["gpt:", "gpt-b:"]
    assert complete_checkpoint(context, "gpt:step-000000") == [OLDEST]
    assert complete_checkpoint(context, "gpt:l") == ["gpt:latest"]
