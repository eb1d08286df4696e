"""Options that would do nothing in a call are refused, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import RunFolder

SPEC = 'name = "kelp"\ncommand = ["train.py"]\nconfig.steps = 50\n'


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("submit SPEC --dry-run --wait", ["--wait", "--dry-run queues nothing"]),
        ("submit SPEC --dry-run --no-preflight", ["--no-preflight", "--dry-run queues nothing"]),
        ("submit SPEC --dry-run --skip-preflight", ["--skip-preflight", "queues nothing"]),
        ("submit SPEC --skip-preflight", ["--skip-preflight", "no Prefect API is configured"]),
        ("submit SPEC --skip-preflight --no-preflight", ["--skip-preflight and --no-preflight"]),
        ("simulate SPEC --history-days 3 --instance-gpus 8", ["--instance-gpus", "--trace"]),
        ("simulate SPEC --trace x.json --root x", ["--root", "--costs-of"]),
        ("drill kelp --at-once 2", ["--at-once", "a drill of a run needs no temporary runs"]),
        ("drill kelp --directory FOLDER", ["--directory", "temporary runs"]),
        ("drill kelp --report x.md --no-calibrate", ["--calibrate", "temporary runs"]),
        ("drill --root x", ["--root", "temporary runs have a root of their own"]),
        ("drill --after x.json", ["--after", "no --report"]),
        ("drill --no-calibrate", ["--calibrate", "no --report"]),
        ("pause kelp --until-capacity", ["--until-capacity", "resume/holdfast", "PREFECT_API_URL"]),
    ],
)
def test_an_option_without_an_effect_is_refused(
    words: str, parts: list[str], call: Call, root: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "kelp.toml"
    spec.write_text(SPEC)
    run = RunFolder(root, "kelp", "a" * 32)
    known = {"SPEC": spec, "FOLDER": tmp_path}
    done = call(*(known.get(word, word) for word in words.split()))
    assert done.status not in {0, 1}
    assert all(part in done.err for part in parts), done.err
    assert not list(run.paths.directory.glob("journal/*.jsonl")), "no order was given"
    assert [path.name for path in root.iterdir() if not path.name.startswith(".")] == ["kelp"]
