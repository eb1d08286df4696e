"""`holdfast doctor` reports the version of Slurm, and warns of one on which no test ran."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.cli.doctor import SLURM, check_slurm

PARTITION = "PartitionName=spot Default=YES State=UP"


@pytest.mark.parametrize(
    ("printed", "status", "found"),
    [
        ("slurm-wlm 22.05.8", "ok", "Slurm 22.05.8, partitions spot"),
        ("slurm 22.05.11", "ok", "Slurm 22.05.11, partitions spot"),
        ("slurm-wlm 26.05.5", "ok", "Slurm 26.05.5, partitions spot"),
        ("slurm 27.11.1", "warn", "Slurm 27.11.1, partitions spot"),
        ("slurm 2.05.8", "warn", "Slurm 2.05.8, partitions spot"),
        ("", "warn", "Slurm of an unknown version, partitions spot"),
    ],
)
def test_the_version_of_slurm_is_reported_and_an_untested_one_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, status: str, found: str
) -> None:
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo "{printed}" || echo "{PARTITION}"\n'
    for name in SLURM:
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    finding = check_slurm()
    assert (finding.level, finding.detail) == (status, found)
    assert ("22.05" in finding.next_step) == (status == "warn")
