"""Every captured ending is classified with the right cause and quotes the deciding record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.endings.endings import CRASHES, EVERY, JOBS, Crash, JobEnding
from tests.endings.records import CHECKOUT, FOLDER, read_record, recorded_names
from tests.endings.variants import MISSED, VARIANTS, VARIANTS_FOLDER

from holdfast.contracts.records.documents import Outcome, StopFile
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.node import CrashReport
from holdfast.workers.decisions.causes import Ending, RankFailure, classify
from holdfast.workers.schedulers import JobStatus

QUICK = [crash for crash in CRASHES if crash.is_quick]
ENDINGS_MIN = 25
VARIANTS_MIN = 10


def ending_of_crash(name: str, folder: Path = FOLDER) -> tuple[Ending, RankFailure | None]:
    return CrashReport.from_json(read_record(name, folder)["inputs"]).classify()


def ending_of_job(name: str) -> Ending:
    inputs: dict[str, Any] = read_record(name)["inputs"]
    outcome, status, stop = inputs["outcome"], inputs["status"], inputs["stop"]
    if status is not None:
        state = AttemptState(status["state"]) if status["state"] else None
        lists = {key: tuple(status[key]) for key in ("nodes", "evidence")}
        status = JobStatus(**{**status, **lists, "state": state})
    return classify(
        outcome=Outcome.model_validate(outcome) if outcome else None,
        status=status,
        signals=inputs["signals"],
        stop=StopFile.model_validate(stop) if stop else None,
        claimed=inputs["claimed"],
        lost_hosts=inputs["lost_hosts"],
        job_log=inputs["job_log"],
    )


def check(crash: Crash, folder: Path = FOLDER) -> None:
    ending, first = ending_of_crash(crash.name, folder)
    assert (ending.cause, crash.quote in " ".join(ending.evidence)) == (crash.cause, True), ending
    if crash.first is not None:
        assert first is not None
        assert first.rank == crash.first


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.name)
def test_crash_is_classified_with_the_right_cause(crash: Crash) -> None:
    check(crash)


def test_only_known_misses_of_the_hold_out_set_are_misclassified() -> None:
    assert len(VARIANTS) >= VARIANTS_MIN
    assert set(recorded_names(VARIANTS_FOLDER)) == {variant.name for variant in VARIANTS}
    missed = set()
    for variant in VARIANTS:
        ending, first = ending_of_crash(variant.name, VARIANTS_FOLDER)
        assert first is not None
        assert first.rank == variant.first
        if ending.cause is not variant.cause:
            missed.add(variant.name)
            assert ending.cause is Cause.USER_ERROR, ending
        else:
            assert variant.quote in " ".join(ending.evidence), ending
    assert missed == MISSED


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_job_ending_is_classified_with_the_right_cause(job: JobEnding) -> None:
    ending = ending_of_job(job.name)
    assert ending.cause is job.cause, ending
    assert job.quote in " ".join(ending.evidence), ending


def test_captured_records_match_the_listed_endings_and_cover_all_causes() -> None:
    known = {ending.name for ending in EVERY}
    names = recorded_names()
    assert set(names) == known
    confirmed = {name for name in names if read_record(name)["confirmed"]}
    assert confirmed == {ending.name for ending in EVERY if ending.is_confirmed}
    assert len(confirmed) >= ENDINGS_MIN
    caused = {each.cause for each in EVERY if each.is_confirmed}
    assert caused >= set(Cause) - {Cause.GPU_OOM}


def capture(folder: Path, *names: str) -> None:
    command = [sys.executable, "-m", "tests.endings.capture", "--into", str(folder)]
    subprocess.run([*command, *(["--only", *names] if names else [])], check=True, cwd=CHECKOUT)


@pytest.mark.more
def test_quick_endings_captured_again_are_classified_the_same(tmp_path: Path) -> None:
    capture(tmp_path, *(crash.name for crash in QUICK))
    for crash in QUICK:
        check(crash, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_endings_captured_again_are_classified_the_same(tmp_path: Path) -> None:
    capture(tmp_path)
    for crash in CRASHES:
        if crash.is_confirmed:
            check(crash, tmp_path)
    names = {ending.name for ending in EVERY if ending.is_confirmed}
    assert set(recorded_names(tmp_path)) == names
