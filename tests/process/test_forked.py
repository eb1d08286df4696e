"""Programs that tests fork behave like new processes of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.process.local_runs import LocalRun
from tests.support import forked

from holdfast.contracts.states import AttemptState

PROGRAM = """
import json, os, random, sys
places = [f"/proc/self/fd/{number}" for number in range(64)]
print(json.dumps({
    "argv": sys.argv[1:], "folder": os.getcwd(), "name": __name__, "session": os.getsid(0),
    "pid": os.getpid(), "given": os.environ["GIVEN"], "inherited": "PATH" in os.environ,
    "drawn": random.random(), "path": sys.path[0],
    "open": [os.readlink(place) for place in places if os.path.exists(place)],
}))
print("told", file=sys.stderr)
sys.exit(3)
"""
WAIT_S = 60.0


def test_a_forked_program_is_like_a_new_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = []
    for _ in range(2):
        command = (sys.executable, program, "a", "b")
        done = forked.run(command, env={"GIVEN": "one"}, cwd=tmp_path, timeout=WAIT_S)
        assert (done.returncode, done.stderr) == (3, "told\n")
        found.append(json.loads(done.stdout))
    first, second = found
    assert (first["argv"], first["folder"]) == (["a", "b"], str(tmp_path))
    assert (first["name"], first["path"]) == ("__main__", str(tmp_path))
    assert (first["given"], first["inherited"]) == ("one", False)
    assert first["session"] == first["pid"] != second["pid"]
    assert first["drawn"] != second["drawn"]
    assert not [place for place in first["open"] if place.startswith("socket:")]


def test_an_endless_program_is_killed_at_its_time_limit(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run((sys.executable, program), timeout=0.5)
    here = [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(program) in (one.info["cmdline"] or [])
    ]
    # On a busy machine, a killed process takes a moment to end.
    _, alive = psutil.wait_procs(here, timeout=10)
    assert not alive


@pytest.mark.more
def test_torchrun_of_an_agent_forks_its_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, psutil, sys, torch\n"
        "assert 'torch._dynamo' in sys.modules\n"
        "me = psutil.Process()\n"
        "assert me.environ()['RANK'] == os.environ['RANK']\n"
        "assert me.cmdline()[1:4] == ['-u', '-m', 'holdfast.trainer.rank_start']\n"
        "loader = torch.utils.data.DataLoader([1.0] * 8, num_workers=1)\n"
        "assert sum(batch.item() for batch in loader) == 8.0\n"
    )
    run = LocalRun(tmp_path / "root", program=program)
    run.submit()
    assert run.wait_for_end().state is AttemptState.COMPLETED
