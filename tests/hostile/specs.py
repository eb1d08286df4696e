"""Hostile spec files, each of which must be refused with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

GOOD: Final = 'name = "run"\ncommand = ["train.py"]\n'
NINES: Final = "9" * 40
ESCAPE: Final = "\\u001b]0;owned\\u0007"


def resources(line: str) -> str:
    """A spec of a Slurm job with one more line in `[resources]`."""
    return f'{GOOD}[resources]\nexecutor = "slurm"\n{line}\n'


def bomb(levels: int = 30) -> str:
    """YAML whose aliases double with every level."""
    lines = ["name: run", "command: [train.py]", "config:", "  a0: &a0 [x, x]"]
    lines += [f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int = 30) -> str:
    """YAML whose nested tables double with every level."""
    lines = ["name: run", "command: [train.py]", "config:", "  a0: &a0 {x: 1, y: 2}"]
    lines += [f"  a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, levels)]
    return "\n".join(lines)


# File name → its text; the suffix selects the parser.
REFUSED: Final[Mapping[str, str | bytes]] = {
    "bomb.yaml": bomb(),
    "merges.yaml": merges(),
    "cycle.yaml": "name: run\ncommand: [train.py]\nconfig: &c\n  again: *c\n",
    "deep.yaml": "name: run\ncommand: [train.py]\nconfig: " + "[" * 5000 + "]" * 5000,
    "deep.toml": f"{GOOD}[config]\nx = " + "[" * 5000 + "]" * 5000,
    "deep-table.toml": GOOD + "[config." + ".".join("a" * 3000) + "]\nx = 1\n",
    "object.yaml": "name: !!python/object/apply:os.system ['touch owned']\ncommand: [a]\n",
    "tag.yaml": "name: !!python/name:os.system\ncommand: [a]\n",
    "date.yaml": "name: run\ncommand: [train.py]\nconfig: {when: 2026-99-99}\n",
    "key.yaml": "name: run\ncommand: [train.py]\n? [a, b]\n: c\n",
    "number-key.yaml": "name: run\ncommand: [train.py]\n1: 2\n",
    "null.yaml": "~",
    "list.yaml": "- a\n- b\n",
    "scalar.toml": "name",
    "empty.toml": "",
    "bytes.toml": b"\xff\xfe\x00name",
    "nul.toml": 'name = "run"\ncommand = ["a\\u0000b"]\n',
    "nul-environment.toml": GOOD + '[environment]\nA = "x\\u0000y"\n',
    "environment-name.toml": GOOD + '[environment]\n"A\\nB" = "x"\n',
    "name-escape.toml": f'name = "{ESCAPE}"\ncommand = ["a"]\n',
    "name-path.toml": 'name = "../../etc"\ncommand = ["a"]\n',
    "name-long.toml": f'name = "{"a" * 5000}"\ncommand = ["a"]\n',
    "partition-line.toml": resources('partition = "a\\n#SBATCH --wrap=evil"'),
    "account-line.toml": resources('account = "a\\nsrun evil"'),
    "qos-return.toml": resources('qos = "a\\rsrun evil"'),
    "gres-line.toml": resources('gres = "gpu:1\\ntouch /tmp/owned"'),
    "constraint-separator.toml": resources('constraint = "a\\u2028b"'),
    "extra-value-line.toml": resources('extra = {reservation = "a\\nsrun evil"}'),
    "extra-key-line.toml": resources('extra = {"comment\\nsrun" = "x"}'),
    "nodes-huge.toml": resources(f"nodes = {NINES}"),
    "time-huge.toml": resources(f"time_limit_min = {NINES}"),
    "memory-infinite.toml": resources("memory_gb_per_node = inf"),
    "memory-nan.toml": resources("memory_gb_per_node = nan"),
    "heartbeat-huge.toml": GOOD + "[supervision]\nheartbeat_s = 1e300\n",
    "attempts-huge.toml": GOOD + f"[supervision]\nattempts_max = {NINES}\n",
    "budget-huge.toml": GOOD + f'[checkpoint]\nbudget = "{"9" * 400}PB"\n',
    "interval-huge.toml": GOOD + f'[checkpoint]\ninterval = "{"9" * 400}d"\n',
    "mirror-secret.toml": GOOD + '[checkpoint]\nmirror = "s3://key:secret@bucket/x"\n',
    "mirror-line.toml": GOOD + '[checkpoint]\nmirror = "file:///a\\nb"\n',
    "python-line.toml": GOOD + '[launch]\npython = "/bin/python\\nevil"\n',
    "container-escape.toml": GOOD + f'[launch]\ncontainer = ["{ESCAPE}"]\n',
    "currency-escape.toml": GOOD + f'[cost]\ncurrency = "{ESCAPE}"\n',
    "config-number.toml": GOOD + f"[config]\nx = {NINES}\n",
    "notices.toml": GOOD + '[supervision]\nnotices_url = "file:///etc/passwd"\n',
}


def non_files(folder: Path) -> list[Path]:
    """Paths that are not regular files of a sensible size."""
    made: Mapping[str, Callable[[Path], object]] = {
        "pipe.toml": os.mkfifo,
        "folder.toml": Path.mkdir,
        "loop.toml": lambda path: path.symlink_to(path.name),
        "zero.toml": lambda path: path.symlink_to("/dev/zero"),
        "sparse.toml": lambda path: _truncate(path, 20 << 30),
        "gone.toml": lambda path: None,
    }
    for name, make in made.items():
        make(folder / name)
    return [folder / name for name in made]


def _truncate(path: Path, size: int) -> None:
    with open(path, "wb") as stream:
        stream.truncate(size)
