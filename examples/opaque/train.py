"""A training program that knows nothing of Holdfast: it saves and resumes by itself.

It fits a line to points, in plain Python. `run.toml` describes it to Holdfast, and
docs/opaque-programs.md explains the spec.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--step-s", type=float, default=0.05, help="seconds to sleep in each step")
arguments = parser.parse_args()

told_to_end = []
signal.signal(signal.SIGTERM, lambda number, frame: told_to_end.append(number))

# Resume from the newest complete checkpoint, if there is one.
state = {"step": 0, "slope": 0.0, "shift": 0.0}
saved = [json.loads(path.read_text()) for path in arguments.out.glob("checkpoint-*/state.json")]
state = max([state, *saved], key=lambda one: one["step"])

while state["step"] < arguments.steps:
    state["step"] += 1
    x = random.Random(state["step"]).uniform(-1, 1)
    error = state["slope"] * x + state["shift"] - (3 * x + 1)
    state["slope"] -= 0.1 * error * x
    state["shift"] -= 0.1 * error
    print(f"step {state['step']}: loss {error * error:.6f}", flush=True)
    time.sleep(arguments.step_s)
    is_due = state["step"] % arguments.save_every == 0 or state["step"] == arguments.steps
    if is_due or told_to_end:
        folder = arguments.out / f"checkpoint-{state['step']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json.tmp").write_text(json.dumps(state))
        # The file that makes the checkpoint complete gets its name last.
        (folder / "state.json.tmp").rename(folder / "state.json")
    if told_to_end:
        sys.exit(0)

print(f"y = {state['slope']:.3f} x + {state['shift']:.3f}")
