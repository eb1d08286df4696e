"""A rank of a warm standby runs the program exactly as Python itself would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.contracts import environment
from holdfast.trainer.process.program import program_argv
from holdfast.trainer.process.standby import AGENT_STORE, changed_variables
from holdfast.trainer.rank_start import set_up_interpreter
from holdfast.workers.agent.launch.command import place_environment
from holdfast.workers.agent.launch.warm_standby import StandbyPlan, free_port

# Preload a small module instead of the large libraries, to save time.
STANDBY = """
import sys
from holdfast.trainer import rank_start
from holdfast.trainer.process import standby
standby.PRELOADED = ("decimal",)
rank_start.main(sys.argv[1:])
"""
# Prints everything that depends on how a program was started, then fails with its own error.
PROGRAM = """
import json, os, sys
def view():
    return None
main = sys.modules["__main__"]
facts = dict(
    argv=sys.argv, orig_argv=sys.orig_argv, path=sys.path, name=__name__, file=__file__,
    spec=getattr(__spec__, "name", None), package=__package__, loader=type(__loader__).__name__,
    code=view.__code__.co_filename, names=sorted(vars(main)), is_main=main.view is view,
    builtins=type(__builtins__).__name__, cwd=os.getcwd(), environ=dict(os.environ),
    future=view.__code__.co_flags, flags=list(sys.flags),
)
print(json.dumps(facts))
raise LookupError("the program's own")
"""


def run(folder: Path, words: tuple[str, ...], standby_pipe: bytes | None) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a program, in a warm standby with a
    `standby_pipe`."""
    inherited = dict(os.environ)
    command = [sys.executable, "-u", *(("-c", STANDBY) if standby_pipe is not None else ()), *words]
    read, write = os.pipe()
    if standby_pipe is not None:
        inherited[environment.STANDBY_PIPE] = f"/proc/{os.getpid()}/fd/{read}"
        os.write(write, standby_pipe)
        if not standby_pipe:
            os.close(write)
    done = subprocess.run(
        command, cwd=folder, env=inherited, capture_output=True, text=True, timeout=120
    )
    os.close(read)
    if standby_pipe != b"":
        os.close(write)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [("sub/kelp.py", "--steps", "3"), ("-m", "sub.kelp", "-x")])
def test_a_program_in_a_warm_standby_sees_a_normal_start(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kelp.py").write_text(PROGRAM)
    plain, ahead = run(tmp_path, words, None), run(tmp_path, words, b"\0")
    assert plain[0] == 1
    assert json.loads(ahead[1]) == json.loads(plain[1])
    assert ahead[0] == plain[0]
    own = f'  File "{tmp_path}/sub/kelp.py"'
    assert ahead[2][ahead[2].index(own) :] == plain[2][plain[2].index(own) :]
    assert "LookupError: the program's own" in ahead[2]


def test_an_unused_standby_rank_exits_without_running_the_program(tmp_path: Path) -> None:
    (tmp_path / "kelp.py").write_text("print('trained')")
    code, said, _ = run(tmp_path, ("kelp.py",), b"")
    assert (code, said) == (75, "")


def test_a_standby_sets_the_command_line_of_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = ["python", "-u", "-m", "holdfast.trainer.rank_start", "train.py", "--lr", "1"]
    monkeypatch.setattr(sys, "orig_argv", [*started])
    monkeypatch.setattr(sys, "argv", [*started[3:]])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    set_up_interpreter(started[4:])
    assert program_argv() == ["train.py", "--lr", "1"]
    assert sys.argv == ["train.py", "--lr", "1"]
    assert sys.path[0] == str(tmp_path)


def test_a_rank_of_a_torchrun_without_others_takes_its_place_from_the_agent(
    tmp_path: Path,
) -> None:
    request = SimpleNamespace(nodes=4, ranks_per_node=2)
    context: Any = SimpleNamespace(request=request, node=3, nodes=4)
    place = tmp_path / "place"
    place.write_text(json.dumps(place_environment(context, "n0", 4000)))
    alone = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    variables = {**os.environ, **alone, AGENT_STORE: "True", environment.PLACE: str(place)}
    program = tmp_path / "program.py"
    program.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    command = [sys.executable, "-m", "holdfast.trainer.rank_start", str(program)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ("RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [found[name] for name in names] == ["7", "7", "8", "1", "3", "4"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n0", "4000")
    assert (found[environment.NODE], found[environment.NODES]) == ("3", "4")
    # Rank 0 has the store, not a torchrun, and no library reads this variable when it is loaded.
    assert found[AGENT_STORE] == "False"
    assert environment.PLACE not in found
    assert changed_variables(found, {**found, AGENT_STORE: "True"}) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"OMP_NUM_THREADS": "1", "HOME": "/root"}, []),
        ({"OMP_NUM_THREADS": "4", "HOME": "/root"}, ["OMP_NUM_THREADS"]),
        ({"HOME": "/root"}, ["OMP_NUM_THREADS"]),
        (
            {"OMP_NUM_THREADS": "1", "HOME": "/", "CUDA_VISIBLE_DEVICES": "0", "WANDB_MODE": "off"},
            ["CUDA_VISIBLE_DEVICES"],
        ),
        ({"OMP_NUM_THREADS": "1", "HOME": "/root", "TORCHINDUCTOR_CACHE_DIR": "/tmp"}, []),
    ],
)
def test_variables_that_the_standby_must_have_at_its_start_are_compared(
    now: dict[str, str], expected: list[str]
) -> None:
    assert changed_variables(now, {"OMP_NUM_THREADS": "1", "HOME": "/root"}) == expected


def test_without_a_free_port_there_is_no_standby_and_training_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        supervision = SimpleNamespace(
            standby_after_s=0.0, restarts_in_place=3, port_range=range(port, port + 1)
        )
        request = SimpleNamespace(supervision=supervision)
        context: Any = SimpleNamespace(request=request, nodes_of_job=1)
        plan = StandbyPlan(context, lambda: "127.0.0.1", notes.append)
        monkeypatch.setattr(plan, "_may_load_ahead", lambda: True)
        trained: Any = SimpleNamespace(completed=5, resumed=0)
        plan.look([], [], [trained], 0)
        plan.look([], [], [trained], 0)
    (note,) = notes
    assert note.startswith(f"no warm standby: no port of {port}-{port} is free for torchrun")


def test_a_port_whose_last_connection_has_just_ended_is_free() -> None:
    """The kernel keeps the connection for a minute, on the side that closes first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    assert free_port(range(port, port + 1)) == port
