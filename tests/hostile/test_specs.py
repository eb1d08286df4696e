"""`submit --dry-run` of hostile specs: refused with a reason, never a traceback or a hang."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from tests.hostile.specs import GOOD, REFUSED, non_files
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.contracts.errors import HoldfastError

SECONDS_MAX = 5.0
MEMORY_KB_MAX = 512 * 1024


def dry_run(path: Path, root: Path) -> str:
    """Dry-run a spec and return the output; raises its error.

    The CLI prints a traceback unless the error is a `HoldfastError`.
    """
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = CliRunner().invoke(app, ["submit", str(path), "--dry-run", "--root", str(root)])
    assert time.monotonic() - began < SECONDS_MAX
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KB_MAX
    if outcome.exception is not None:
        raise outcome.exception
    assert "\x1b" not in outcome.output
    return outcome.output


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_specs_are_refused_with_a_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = REFUSED[name]
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(HoldfastError) as raised:
        dry_run(tmp_path / name, tmp_path / "runs")
    assert name in str(raised.value)
    assert len(str(raised.value)) < 4000
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "owned").exists()


def test_paths_that_are_not_regular_files_are_refused_at_once(tmp_path: Path) -> None:
    for path in non_files(tmp_path):
        with pytest.raises(HoldfastError, match=path.name):
            dry_run(path, tmp_path / "runs")


def test_ordinary_specs_are_accepted(tmp_path: Path) -> None:
    plain = tmp_path / "plain.toml"
    plain.write_text(GOOD + '[launch]\nsetup = ["module load cuda\\nexport A=1"]\n')
    assert "module load cuda\\nexport A=1" in dry_run(plain, tmp_path / "runs")
    aliases = tmp_path / "aliases.yaml"
    aliases.write_text("name: run\ncommand: [a]\nconfig: {one: &o {x: 1}, two: *o}\n")
    assert '"two"' in dry_run(aliases, tmp_path / "runs")
    linked = tmp_path / "linked.toml"
    linked.symlink_to(plain)
    assert dry_run(linked, tmp_path / "runs") == dry_run(plain, tmp_path / "runs")
