"""Each option of the commands that start or order something: its effect, and bad values.

The options are those of the command's own parser. One without a row fails the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.support.rank_programs import ROOT
from tests.unit.test_cli_options import COMMANDS as READING
from tests.unit.test_cli_options import OLDEST, World, options_of, world
from tests.unit.test_simulation import SPEC

from holdfast.api.tokens import Role, TokenStore
from holdfast.cli.main import all_commands
from holdfast.contracts.disk.file_locks import locked
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import load_events

__all__ = ["world"]
HOLDFAST: Final = str(Path(sys.executable).with_name("holdfast"))
LIMIT_S: Final = 60.0
DAY_S: Final = 24 * 3600.0
# Options whose effect needs a training, a service or a cluster, and the tests that observe it.
ELSEWHERE: Final = {
    ("bench", "--directory"): "tests/process/test_bench.py",
    ("bench", "--megabytes"): "tests/process/test_bench.py",
    ("bench", "--pairs"): "tests/process/test_bench.py",
    ("bench", "--ranks"): "tests/process/test_bench.py",
    ("bench", "--quick"): "tests/process/test_bench.py",
    ("bench", "--plot"): "tests/process/test_bench.py",
    ("deploy", "--pool"): "tests/process/test_worker.py",
    ("deploy", "--type"): "tests/process/test_worker.py",
    ("deploy", "--automations"): "tests/prefect/test_automations.py",
    ("deploy", "--notify"): "tests/prefect/test_automations.py",
    ("doctor fit", "--gpus"): "tests/process/test_shape.py",
    ("doctor fit", "--checkpoint"): "tests/process/test_shape.py",
    ("drill", "--count"): "tests/process/test_drill.py",
    ("drill", "--seed"): "tests/process/test_drill.py",
    ("drill", "--kinds"): "tests/process/test_drill.py",
    ("drill", "--within"): "tests/process/test_drill.py",
    ("drill", "--at-once"): "tests/process/test_drill.py",
    ("drill", "--report"): "tests/process/test_drill.py",
    ("drill", "--calibrate"): "tests/process/test_drill.py",
    ("drill", "--after"): "tests/process/test_drill.py",
    ("drill", "--directory"): "tests/process/test_drill.py",
    ("fork", "--wait"): "tests/process/test_cli_local.py",
    ("init", "--partition"): "tests/slurm/test_submission.py",
    ("mcp", "--url"): "tests/api/test_mcp.py",
    ("mcp", "--token-file"): "tests/api/test_mcp.py",
    ("mcp", "--allow-orders"): "tests/api/test_mcp.py",
    ("pause", "--until-capacity"): "tests/prefect/test_automations.py",
    ("serve", "--certificate"): "tests/api/test_team.py",
    ("serve", "--key"): "tests/api/test_team.py",
    ("simulate", "--costs-of"): "tests/process/test_cli_local.py",
    ("simulate", "--history-days"): "tests/slurm/test_history.py",
    ("submit", "--wait"): "tests/process/test_cli_local.py",
    ("submit", "--skip-preflight"): "tests/process/test_flow_prefect.py",
    ("submit", "--no-preflight"): "tests/process/test_cli_local.py",
    ("supervise", "--all"): "tests/process/test_cli_local.py",
    ("supervise", "--stay"): "tests/process/test_supervisor_service.py",
}
# Values that an option refuses, with the exit status and a part of the error.
BAD: Final[dict[tuple[str, str], tuple[list[str], int, str]]] = {
    ("bench", "--directory"): (["/proc/none"], 2, ""),
    ("bench", "--megabytes"): (["0", "-1", "x"], 2, "megabytes"),
    ("bench", "--pairs"): (["0", "-1", "x"], 2, "pair"),
    ("bench", "--ranks"): (["0", "1", "x"], 2, "rank"),
    ("bench", "--plot"): (["x.xyz"], 2, "--plot"),
    ("bundle", "--out"): (["/none/x.tar.gz"], 3, "/none"),
    ("deploy", "--type"): (["kubernetes", ""], 2, "--type"),
    ("doctor fit", "--gpus"): (["0", "-1", "x"], 2, "--gpus"),
    ("doctor fit", "--checkpoint"): (["nothing"], 3, "nothing"),
    ("drill", "--count"): (["0", "x", "10001"], 2, "--count"),
    ("drill", "--seed"): (["x", "1.5"], 2, "--seed"),
    ("drill", "--kinds"): (["nothing"], 2, "nothing"),
    ("drill", "--within"): (["0", "x"], 2, "--within"),
    ("drill", "--at-once"): (["0", "65"], 2, "--at-once"),
    ("drill", "--report"): (["/none/x.md"], 3, "--report"),
    ("drill", "--after"): (["/none/x.json"], 3, "--after"),
    ("drill", "--directory"): (["/none"], 3, "--directory"),
    ("fork", "--name"): (["", "a/b", "x" * 300], 2, "name"),
    ("fork", "--spec"): (["/none.toml"], 3, "/none.toml"),
    ("fork", "--set"): (["x", "resources.nodse=1", "resources.nodes=1.5"], 2, ""),
    ("import", "--name"): (["", "a/b"], 2, "name"),
    ("import", "--form"): (["zip", ""], 2, "--form"),
    ("import", "--rename"): (["x", "=y"], 2, "--rename"),
    ("import", "--exclude"): (["nothing"], 1, "nothing"),
    ("import", "--python"): (["/none/python"], 5, "/none/python"),
    ("init", "--name"): (["a/b", ""], 2, "--name"),
    ("init", "--partition"): (["x"], 2, "--partition"),
    ("init", "--executor"): (["kubernetes", ""], 2, "--executor"),
    ("mcp", "--url"): (["nonsense", "ftp://a", ""], 2, "--url"),
    ("mcp", "--token-file"): (["/none"], 3, "/none"),
    ("relaunch", "--gpus"): (["0", "-1", "x"], 2, "--gpus"),
    ("serve", "--host"): (["256.1.1.1", "nowhere.invalid"], 2, "listen"),
    ("serve", "--port"): (["-1", "65536", "x"], 2, "--port"),
    ("serve", "--name"): (["a b", ""], 2, "--name"),
    ("serve", "--trusted-proxy"): (["nonsense", ""], 2, "--trusted-proxy"),
    ("serve", "--prefix"): (["holdfast", "/a/", "/a/../b", ""], 2, "--prefix"),
    ("serve", "--certificate"): (["/none.pem"], 3, "--certificate"),
    ("serve", "--key"): (["/none.pem"], 2, "--key"),
    ("simulate", "--trace"): (["/none.json"], 3, "/none.json"),
    ("simulate", "--history-days"): (["0", "-1", "x"], 2, "--history-days"),
    ("simulate", "--fallback-trace"): (["/none.json"], 2, "the spec has 0"),
    ("simulate", "--set"): (["x", "nonsense=1"], 2, ""),
    ("simulate", "--steps"): (["0", "x"], 2, "--steps"),
    ("simulate", "--gpus"): (["0", "x", "12"], 2, "--gpus"),
    ("simulate", "--interval"): (["soon", "0"], 2, "interval"),
    ("simulate", "--costs-of"): (["nobody"], 3, "nobody"),
    ("simulate", "--cost"): (["step_s", "step_s=x", "step_s=-1", "x=1"], 2, "--cost"),
    ("simulate", "--instance-gpus"): (["0", "x", "3"], 2, ""),
    ("simulate", "--seed"): (["x", "1.5"], 2, "--seed"),
    ("simulate", "--plot"): (["x.xyz"], 2, "--plot"),
    ("submit", "--set"): (["x", "resources.nodse=1", "name=a/b"], 2, ""),
    ("token add", "--role"): (["owner", ""], 2, "--role"),
    ("token add", "--days"): (["0", "-1", "1.5", "x", "99999"], 2, "--days"),
}
# Prefect takes any name for a pool and a block, and refuses one that it does not know itself.
ANY_TEXT: Final = {("deploy", "--pool"), ("deploy", "--notify")}


def write_spec(w: World, **more: Any) -> Path:
    (w.home / "train.py").write_text("print('hello')\n")
    path = w.home / "spec.json.toml"
    fields = {"name": "rows", "command": ["train.py"], **more}
    path.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in fields.items()))
    return path


def arguments_of(w: World, command: str) -> list[str]:
    """What the command needs besides the tried option."""
    big, trace = w.home / "big.toml", w.home / "trace.json"
    big.write_text(SPEC)
    document = {"metadata": {"gap_seconds": 300}, "data": [4, 4, 4, 2, 4, 4]}
    trace.write_text(json.dumps(document))
    torch.save({"a.x": torch.zeros(2), "b.x": torch.ones(2)}, w.home / "weights.pt")
    needed = {
        "bench": ["--directory", str(w.home)],
        "bundle": ["gpt-b"],
        "trace": ["gpt-b"],
        "doctor fit": ["gpt", "--gpus", "2"],
        "drill": ["--report", str(w.home / "drill.md")],
        "fork": [OLDEST, "--name", "other", "--dry-run"],
        "import": [str(w.home / "weights.pt"), "--name", "again"],
        "init": [str(w.home / "project"), "--executor", "local"],
        "simulate": [str(big), "--trace", str(trace), "--cost", "step_s=1"],
        "serve": ["--port", "0"],
        "submit": [str(write_spec(w)), "--dry-run"],
        "supervise": ["gpt-b"],
        "token add": ["ann"],
        "token revoke": ["nobody"],
    }
    if command in {"cancel", "pause", "relaunch", "resume", "stop"}:
        return ["gpt-b"]
    return needed.get(command, [])


def bundle_rows(w: World) -> dict[str, bool]:
    out = w.home / "told.tar.gz"
    told = w("bundle", "gpt-b", "--out", out)
    return {"--out": told.status == 0 and out.is_file()}


def submit_rows(w: World) -> dict[str, bool]:
    spec = str(write_spec(w))
    plain = w.json("submit", spec, "--dry-run")
    told = w.json("submit", spec, "--dry-run", "--set", "resources.nodes=1", "--allow-early-exit")
    return {
        "--set": told["settings"]["resources.nodes"]["source"] == "--set",
        "--allow-early-exit": (
            plain["supervision"]["allow_early_exit"],
            told["supervision"]["allow_early_exit"],
        )
        == (False, True),
        "--dry-run": plain["run"] == "rows" and not (w.root / "rows").exists(),
    }


def fork_rows(w: World) -> dict[str, bool]:
    before = load_events(RunPaths(w.root / "gpt"))
    call = ["fork", OLDEST, "--dry-run"]
    told = w.json(*call, "--name", "other", "--set", "supervision.grace_s=77")
    spec = str(write_spec(w, name="second"))
    return {
        "--name": told["run"] == "other",
        "--set": told["settings"]["supervision.grace_s"] == {"value": 77, "source": "--set"},
        "--spec": w.json(*call, "--spec", spec)["run"] == "second",
        "--dry-run": told["forked_from"] == OLDEST
        and not (w.root / "other").exists()
        and load_events(RunPaths(w.root / "gpt")) == before,
    }


def order_rows(w: World) -> dict[str, dict[str, bool]]:
    """Orders to a run that has a supervisor, which this test never lets act."""
    paths = RunPaths(w.root / "gpt-b")
    with locked(paths.flow_lock, 0.0, owner_only=True):
        given = [w.json("relaunch", "gpt-b", "--gpus", 1), w.json("cancel", "gpt-b", "--now")]
    asked = [one for one in load_events(paths) if one.kind is EventKind.OPERATOR_REQUEST]
    assert [one["action"] for one in given] == ["relaunch", "cancel"]
    return {
        "relaunch": {"--gpus": asked[-2].data["gpus"] == 1},
        "cancel": {"--now": asked[-1].data["now"] is True},
    }


def simulate_rows(w: World) -> dict[str, bool]:
    call = ["simulate", *arguments_of(w, "simulate")]
    plain = w.json(*call)
    picture = w.home / "plot.svg"
    fallback = w.home / "fallback.toml"
    fallback.write_text(SPEC + "[[resources.fallbacks]]\npartition = 'b'\nafter_min = 5\n")
    both = ["--fallback-trace", call[3], "--cost", "step_s=1"]
    many = w.json(*call, "--cost", "mean_failure_s=50", "--seed", 1)
    return {
        "--trace": plain["trace_s"] == 1800,
        "--fallback-trace": w("simulate", fallback, "--trace", call[3], *both).status == 0
        and w(*call, "--fallback-trace", call[3]).status == 2,
        "--set": w.json(*call, "--set", "config.steps=10")["steps"] == 10,
        "--steps": w.json(*call, "--steps", 20)["steps"] == 20,
        "--gpus": [one["gpus"] for one in w.json(*call, "--gpus", "16,32")["rows"]] == [16, 32],
        "--interval": w.json(*call, "--interval", "5m")["rows"][0]["interval"] == "5m",
        "--cost": plain["costs"]["step_s"] == 1,
        "--instance-gpus": w.json(*call, "--instance-gpus", 16)["rows"] != plain["rows"],
        "--seed": w.json(*call, "--cost", "mean_failure_s=50", "--seed", 2)["rows"] != many["rows"],
        "--plot": w(*call, "--plot", picture).status == 0 and picture.is_file(),
    }


def import_rows(w: World) -> dict[str, bool]:
    call = ["import", w.home / "weights.pt", "--name", "imported", "--form", "torch"]
    arguments_of(w, "import")
    python, used = w.home / "python", w.home / "used"
    python.write_text(f'#!/bin/sh\ntouch {used}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    told = w.json(*call, "--rename", "a.*=c.*", "--exclude", "b.x", "--python", python)
    weights = w.home / "imported.safetensors"
    assert w("export", told["checkpoint"], "--to", "safetensors", "-o", weights).status == 0
    from safetensors.torch import load_file

    refused = w("import", w.home / "weights.pt", "--name", "other", "--form", "safetensors")
    return {
        "--name": told["checkpoint"].startswith("imported:"),
        "--form": told["format"] == "torch" and refused.status != 0,
        "--rename": any(name.endswith("c.x") for name in load_file(weights)),
        "--exclude": told["tensors"] == 1,
        "--python": used.exists(),
    }


def init_rows(w: World) -> dict[str, bool]:
    w("init", w.home / "made", "--executor", "local", "--name", "mine")
    spec = tomllib.loads((w.home / "made" / "run.toml").read_text())
    return {
        "--name": spec["name"] == "mine",
        "--executor": spec["resources"]["executor"] == "local",
    }


def token_rows(w: World) -> dict[str, bool]:
    told = w.json("token", "add", "ann", "--role", "operator", "--days", 2)
    stored = TokenStore(w.home / "tokens.json").check(told["token"])
    listed = w("token", "list").out
    assert w("token", "revoke", "ann").status == 0
    assert stored is not None
    return {
        "--role": stored.role == "operator",
        "--days": abs((stored.expires_at or 0) - told["created_at"] - 2 * DAY_S) < 60
        and "never" not in listed,
    }


def serve_rows(w: World) -> dict[str, bool]:
    """One server with every option that needs no certificate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["holdfast"])
        token = w.json("token", "add", "ann", "--role", "operator")["token"]
    options = ["--host", "127.0.0.2", "--port", "0", "--name", "runs.example"]
    options += ["--trusted-proxy", "127.0.0.1", "--root", str(w.root), "--prefix", "/team"]
    with subprocess.Popen(
        [HOLDFAST, "serve", *options], stderr=subprocess.PIPE, text=True, env=os.environ
    ) as server:
        try:
            assert server.stderr is not None
            line = next(one for one in server.stderr if "serving http" in one)
            found = re.search(r"http://([0-9.]+):([0-9]+)(/team)?/", line)
            assert found is not None
            port = int(found[2])

            def ask(host: str, *more: tuple[str, str], body: str | None = None) -> tuple[int, str]:
                link = HTTPConnection("127.0.0.2", port, timeout=LIMIT_S)
                given = {"Host": host, "Authorization": f"Bearer {token}", **dict(more)}
                method, path = (
                    ("GET", "/api/v1/runs") if body is None else ("POST", "/api/v1/session")
                )
                link.request(method, path, body, given)
                answer = link.getresponse()
                text = answer.read().decode() + str(answer.getheader("Set-Cookie"))
                link.close()
                return answer.status, text

            named, other = ask("runs.example"), ask("other.example")
            # The first round over the runs may still be under way.
            ends_at = time.monotonic() + LIMIT_S
            while "gpt" not in named[1] and time.monotonic() < ends_at:
                named = ask("runs.example")
            words = ("Content-Type", "application/json"), ("X-Forwarded-Proto", "https")
            session = ask("runs.example", *words, body=json.dumps({"token": token}))
        finally:
            server.terminate()
            server.wait(LIMIT_S)
            w("token", "revoke", "ann")
    return {
        "--host": found[1] == "127.0.0.2",
        "--port": port > 0,
        "--name": (named[0], other[0]) == (200, 421),
        "--prefix": found[3] == "/team" and "Path=/team;" in session[1],
        "--trusted-proxy": "Secure" in session[1],
        "--root": "gpt" in named[1],
    }


ROWS: dict[str, Callable[[World], dict[str, bool]]] = {
    "bundle": bundle_rows,
    "submit": submit_rows,
    "fork": fork_rows,
    "relaunch": lambda w: order_rows(w)["relaunch"],
    "cancel": lambda w: order_rows(w)["cancel"],
    "simulate": simulate_rows,
    "import": import_rows,
    "init": init_rows,
    "token add": token_rows,
    "serve": serve_rows,
}


def commands() -> Iterator[str]:
    """Every command that has no row in the test of reading commands."""

    def walk(found: Any, name: str) -> Iterator[str]:
        inner = getattr(found, "commands", None)
        if inner is None:
            yield name
        for word, one in (inner or {}).items():
            yield from walk(one, f"{name} {word}".strip())

    yield from (one for one in walk(all_commands(), "") if one not in READING)


COMMANDS: Final = sorted(commands())


@pytest.mark.more
@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_has_its_effect(world: World, command: str) -> None:
    seen = ROWS[command](world) if command in ROWS else {}
    common = {"--root", "--json"}
    elsewhere = {option for one, option in ELSEWHERE if one == command}
    assert seen.keys() - common | elsewhere == options_of(command).keys() - common
    assert [name for name, has_effect in seen.items() if not has_effect] == []
    for option in elsewhere:
        # A flag may be used as `--no-…`.
        name = option.removeprefix("--")
        assert name in (ROOT / ELSEWHERE[command, option]).read_text(), option


@contextlib.contextmanager
def reader_token(w: World) -> Iterator[None]:
    """A token, without which a server on another address is refused first."""
    store = TokenStore(w.home / "tokens.json")
    store.add("bad", Role.READER)
    try:
        yield
    finally:
        store.revoke("bad")


@pytest.mark.more
@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_refuses_bad_values(world: World, command: str) -> None:
    silent: list[str] = []
    with reader_token(world):
        for name, option in options_of(command).items():
            if option.is_flag or name in {"--root", "--json"} or (command, name) in ANY_TEXT:
                continue
            values, status, part = BAD[command, name]
            for value in values:
                refused = world(*command.split(), *arguments_of(world, command), name, value)
                if refused.status != status or part not in refused.err:
                    silent.append(f"{command} {name} {value!r}: {refused}")
    assert not silent, "\n".join(silent)
