"""The index as a flow uses it: one that was removed is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs import storied_run

from holdfast.lineage import queries
from holdfast.lineage.database import URL_VARIABLE, open_database
from holdfast.lineage.index import Index


def test_a_file_that_was_removed_under_an_open_index_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    run = next(run for run in list(storied_run(tmp_path / "runs")) if run.name == "gpt")
    url = f"sqlite:///{tmp_path}/index.db"
    monkeypatch.setenv(URL_VARIABLE, url)
    with Index() as index:
        index.update(run.paths)
        for path in tmp_path.glob("index.db*"):
            path.unlink()
        index.update(run.paths)
    with open_database(url) as database:
        shown = queries.show_run(database, str(run.paths.directory), now=0.0)
    assert shown["run"]
