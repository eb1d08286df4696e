"""Root leaves no files in the Holdfast home of an account."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.other_users import STRANGER, as_user

from holdfast.api.tokens import Role, TokenStore
from holdfast.cli.shared import exit_status


def everything_in(folder: Path) -> list[tuple[str, int, bytes]]:
    return sorted(
        (str(path), path.stat().st_uid, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    )


@pytest.mark.root
def test_root_leaves_nothing_in_the_home_of_an_account(
    home: Path, call: Call, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = home / "home"
    # The account's own folder has no file of root.
    shutil.rmtree(home)
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)
    for folder in home.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    said = as_user(STRANGER, lambda: TokenStore().add("first", Role.READER)[0].name)
    assert said == "first"
    before = everything_in(home)
    for words in (
        ("token", "add", "second"),
        ("token", "revoke", "first"),
        ("runs",),
        ("db", "upgrade"),
        ("doctor",),
    ):
        done = call(*words)
        assert done.status == exit_status.MISUSE, words
        assert f"belongs to the account {STRANGER}" in done.err
        assert f"sudo -u {STRANGER}" in done.err
    assert everything_in(home) == before
    assert call("token", "add", "--help").status == 0
    # The account itself works on.
    assert as_user(STRANGER, lambda: TokenStore().add("third", Role.READER)[0].name) == "third"
