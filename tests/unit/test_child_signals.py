"""Ranks survive the signals that end a job, and what they start has the default actions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.trainer.process.child_signals import AGENT_SIGNALS

RANK = [sys.executable, "-u", "-m", "holdfast.trainer.rank_start"]
EXIT_S = 120.0
# A program without a session. It ends its helpers as usual.
ENDS_HELPERS = """
import json, multiprocessing, os, signal, subprocess, sys, time

def wait(is_up):
    is_up.set()
    time.sleep(1000)

if __name__ == "__main__":
    ended = {}
    command = subprocess.Popen(["sleep", "1000"])
    command.terminate()
    ended["command"] = command.wait(30)
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    os.kill(child, signal.SIGTERM)
    ended["own fork"] = -os.WTERMSIG(os.waitpid(child, 0)[1])
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        is_up = context.Event()
        helper = context.Process(target=wait, args=(is_up,))
        helper.start()
        assert is_up.wait(30)
        helper.terminate()
        helper.join(30)
        ended[method] = helper.exitcode is not None
        helper.kill()
    for number in (1, 2, 10, 12, 15):
        os.kill(os.getpid(), number)
    text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    ignored = next(line.split()[1] for line in text.splitlines() if line.startswith("SigIgn"))
    ended["ignored in a command"] = int(ignored, 16) & sum(1 << n - 1 for n in (1, 2, 10, 12, 15))
    print(json.dumps(ended))
"""
# A signal comes in the first moment of a child, before anything of `multiprocessing` runs in it.
STARTS_HELPERS = """
import multiprocessing, os, signal

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
helper = multiprocessing.get_context("fork").Process(target=os.write, args=(1, b"helped\\n"))
helper.start()
helper.join(30)
child = os.fork()
if child == 0:
    os._exit(0)
print(helper.exitcode, os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
# A job's signal goes to all processes while the rank reads its data, and it leaves the loader open.
READS = """
import multiprocessing, os, signal, sys, time
import psutil
from torch.utils.data import DataLoader

class Rows:
    def __len__(self):
        return 400
    def __getitem__(self, row):
        return row

if __name__ == "__main__":
    context = sys.argv[1]
    loader = DataLoader(
        Rows(), batch_size=4, num_workers=2, prefetch_factor=2, multiprocessing_context=context
    )
    batches = iter(loader)
    batches.itself = batches
    seen = [next(batches).tolist() for _ in range(3)]
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    for _ in range(90):
        seen.append(next(batches).tolist())
    assert sum(seen, []) == list(range(4 * 93))
    print("read", flush=True)
"""


def run(folder: Path, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a rank that torchrun starts under an agent."""
    (folder / "program.py").write_text(program)
    before: dict[int, Any] = {n: signal.getsignal(n) for n in AGENT_SIGNALS}
    for number in AGENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [*RANK, "program.py", *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        for kept, handler in before.items():
            signal.signal(kept, handler)
    try:
        output, errors = process.communicate(timeout=EXIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def test_a_rank_survives_and_ends_its_helpers(tmp_path: Path) -> None:
    done = run(tmp_path, ENDS_HELPERS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "command": -signal.SIGTERM,
        "own fork": -signal.SIGTERM,
        "fork": True,
        "spawn": True,
        "forkserver": True,
        "ignored in a command": 0,
    }


def test_a_helper_survives_a_signal_in_its_first_moment(tmp_path: Path) -> None:
    done = run(tmp_path, STARTS_HELPERS)
    assert (done.returncode, done.stdout) == (0, f"helped\n0 {signal.SIGTERM.value}\n"), done.stderr


@pytest.mark.more
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_of_a_loader_survive_a_signal_to_all_processes(
    tmp_path: Path, context: str
) -> None:
    done = run(tmp_path, READS, context)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
    assert "Error" not in done.stderr
