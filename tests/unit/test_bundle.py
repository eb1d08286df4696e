"""`holdfast bundle`: what is in the archive, which secrets are not, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
from tests.support.cli_calls import Call
from tests.support.series import sample_gpu, write_gpus, write_ranks
from tests.unit.test_cli import ended_run

from holdfast.cli.support import bundle as bundles
from holdfast.cli.support.bundle import Archive, spellings
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.workers.nodes.series import RankTimes

__all__ = ["ended_run"]
# Values that are secret because the spec or a document says so; no format gives them away.
FROM_SPEC: Final = {
    "WANDB_API_KEY": "plainwandbvalue",
    "DB_PASSWORD": 'horse "battery" staple',
    "SMTP_PASS": "p@ss/w:rd+x",
    "SSH_PASSPHRASE": "zwei Zeilen\nlange Parole",
}
REFERRED: Final = "value-of-a-reference"
# Values that are recognised by their form or by the text around them.
KEY_LINE: Final = "MIIEpAIBAAKCAQEAxyzSECRETxyzSECRETxyzSECRETxyz12"
BY_FORM: Final = {
    "hf": ("the hub got hf_{}", "AbCdEfGhIjKlMnOpQrSt"),
    "github": ("git clone with ghp_{}", "aB3dE6gH9jK2mN5pQ8sT1vW4"),
    "gitlab": ("glpat-{} is used", "Zx9Yw8Vu7Ts6Rq5Po4"),
    "openai": ("client sk-{}", "proj1234567890abcdefghijk"),
    "slack": ("xoxb-{}", "1234567890-abcdefghij"),
    "aws": ("using AKIA{} now", "QWERTZUIOPASDFGH"),
    "google": ("AIza{}", "SyA1234567890abcdefghijklmnopqrs"),
    "jwt": ("got eyJ{}", "hbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4"),
    "holdfast": ("hold_0a1b2c3d_{}", "v" * 43),
    "url": ("s3 at https://ann:{}@store.lab/x", "urlpassword77"),
    "option": ("run --api-key {} --lr 1", "optionvalue1234"),
    "assigned": ("export MY_SECRET={}", "assignedvalue"),
    "bearer": ("Authorization: Bearer {}", "bearervalue.abcdef123456"),
    "login": ("curl -u ann:{} https://x", "loginpassword"),
    "key": (f"-----BEGIN RSA PRIVATE KEY-----\n{{}}\n{KEY_LINE}\n-----END", "q" * 48),
}
PLANTED: Final = (*FROM_SPEC.values(), REFERRED, *(value for _, value in BY_FORM.values()))


def contents(archive: Path) -> dict[str, str]:
    """The files of an archive by name, without its folder."""
    with tarfile.open(archive) as tar:
        found = {}
        for entry in tar.getmembers():
            stream = tar.extractfile(entry)
            assert stream is not None
            found[entry.name.partition("/")[2]] = stream.read().decode()
        return found


def plant(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> AttemptPaths:
    """Write all secrets where runs have them: spec, request, journals, logs, stacks, documents."""
    monkeypatch.setenv("FROM_ELSEWHERE", REFERRED)
    spec = json.loads(run.spec.read_text())
    reference = {"from_env": "FROM_ELSEWHERE"}
    spec["spec"]["environment"] = {**FROM_SPEC, "REFERRED": reference, "LR_SCHEDULE": "cosine"}
    run.spec.write_text(json.dumps(spec))
    attempt = run.attempt(1)
    said = "\n".join(text.format(value) for text, value in BY_FORM.values())
    bare = "\n".join((*FROM_SPEC.values(), REFERRED))
    log = attempt.rank_log(0, 1, 0)
    log.parent.mkdir(parents=True)
    encoded = base64.b64encode(REFERRED.encode()).decode()
    written = "\n".join(quote(value, safe="") for value in PLANTED[:5])
    log.write_text(f"step 1 loss 2.5\n{said}\n{bare}\n{encoded}\n{written}\nlast line\n")
    (attempt.logs / "77_0_log.err").write_text(f"Traceback\n{said}\n{bare}")
    (attempt.logs / "77_submitted.pkl").write_text(bare)
    dump = attempt.dump(0, 1)
    dump.mkdir(parents=True, exist_ok=True)
    (dump / "rank-00000.txt").write_text(f'File "train.py", line 3\n  token = "{REFERRED}"')
    (dump / "nccl-ras.txt").write_text(f"NCCL version 2.27.3\n{said}\n{bare}")
    attempt.channel.write_text(json.dumps({"token": REFERRED}))
    run.private.mkdir()
    run.secrets.write_text(bare)
    with JournalWriter(run.journal_of("cli")) as journal:
        for text, value in BY_FORM.values():
            journal.append(EventKind.NOTE, text=text.format(value), api_key=value)
        journal.append(EventKind.NOTE, text=bare, nested={"deep": [{"password": 97531864}]})
    plant_slowness(attempt, said, bare)
    with (run.journal / "damaged.jsonl").open("w") as stream:
        stream.write(f'{{"kind": "note", "password": "{FROM_SPEC["SMTP_PASS"]}", \n{said}\n')
    return attempt


def plant_slowness(attempt: AttemptPaths, said: str, bare: str) -> None:
    """Write the secrets where a run has what was slow: journal lines and series of a node."""
    with JournalWriter(attempt.node_journal(0)) as journal:
        slow: dict[str, Any] = {"attempt": 1, "launch": 1, "slow": True}
        text = f"n7 is slow: {said}"
        journal.append(EventKind.NODE_SLOW, host=f"n7 {REFERRED}", text=text, **slow)
        journal.append(EventKind.LINK_SLOW, hosts=["n6", "n7"], text=bare, **slow)
        journal.append(EventKind.SLOWDOWN_TESTED, attempt=1, step=7, api_key=REFERRED, links=[310])
    write_ranks(
        attempt,
        lambda rank, _: RankTimes(1.0 + rank, 0.1, 0.2),
        start=1e9,
        buckets=9,
        host=REFERRED,
    )
    beats = [(sample_gpu(0, bucket),) for bucket in range(9)]
    write_gpus(attempt, beats, start=1e9, host=REFERRED)
    record = attempt.dump(0, 1) / "nccl-rank-00000"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(bare)


def test_twenty_planted_secrets_are_not_in_the_archive(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(ended_run, monkeypatch)
    out = tmp_path / "report.tar.gz"
    done = call("bundle", "kelp", "--out", out, "--json")
    assert done.status == 0, done.err
    files = contents(out)
    assert len(PLANTED) == 20
    for value in PLANTED:
        forms = {value, *value.splitlines(), json.dumps(value)[1:-1], quote(value, safe="")}
        for form in (*forms, base64.b64encode(value.encode()).decode()):
            assert [name for name, text in files.items() if form in text] == [], form
    assert not any("97531864" in text for text in files.values())
    assert KEY_LINE not in "".join(files.values())
    for needed in ("spec.json", "versions.json", "attempts/0001/request.json"):
        assert needed in files
    log = files["attempts/0001/logs/node-0000/l01/rank-00000.stdout.log"]
    assert log.startswith("step 1 loss 2.5")
    assert log.endswith("last line\n")
    assert "cosine" in files["spec.json"], "what is no secret stays"
    assert "train.py" in files["attempts/0001/dumps/node-0000-01/rank-00000.txt"]
    assert "NCCL version" in files["attempts/0001/dumps/node-0000-01/nccl-ras.txt"]
    assert not [name for name in files if name.endswith((".pkl", "channel.json", "secrets.json"))]
    assert out.stat().st_mode & 0o777 == 0o600


def test_what_was_slow_is_in_the_archive(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(ended_run, monkeypatch)
    out = tmp_path / "report.tar.gz"
    assert call("bundle", "kelp", "--out", out).status == 0
    files = contents(out)
    lines = json.loads(files["slowness.json"])
    assert [one["kind"] for one in lines] == ["node_slow", "link_slow", "slowdown_tested"]
    assert lines[0]["data"]["text"].startswith("n7 is slow: the hub got ")
    assert lines[1]["data"]["hosts"] == ["n6", "n7"]
    assert lines[2]["data"]["links"] == [310]
    ranks = json.loads(files["attempts/0001/series/ranks-step.json"])
    assert [one["step_s"] for one in ranks["worst"]] == [2.0, 1.0]
    assert (ranks["buckets"], len(ranks["rows"])) == (9 * 10, 2)
    assert json.loads(files["attempts/0001/series/ranks-own.json"])["value"] == "own"
    (gpu,) = json.loads(files["attempts/0001/series/gpus-0000.json"])["gpus"]
    assert max(gpu["temperature_c"]) >= 60
    left_out = {one["name"] for one in json.loads(files["MANIFEST.json"])["left_out"]}
    assert "attempts/*/dumps/*/nccl-rank-*" in left_out
    assert not [name for name in files if "nccl-rank" in name]


def test_the_manifest_lists_the_files_and_what_is_left_out(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = plant(ended_run, monkeypatch)
    monkeypatch.delenv("FROM_ELSEWHERE")
    monkeypatch.setattr(bundles, "LOG_BYTES_MAX", 20)
    (attempt.logs / "linked.log").symlink_to("/etc/hostname")
    os.mkfifo(attempt.logs / "pipe.log")
    (attempt.logs / "a name with blanks.log").write_text("x")
    out = tmp_path / "report.tar.gz"
    done = call("bundle", "kelp", "--out", out)
    assert done.status == 0
    files = contents(out)
    manifest = json.loads(files["MANIFEST.json"])
    listed = {one["name"]: one for one in manifest["files"]}
    assert listed.keys() | {"MANIFEST.json"} == files.keys()
    assert listed["attempts/0001/logs/77_0_log.err"]["bytes_before"] > 100
    left_out = {one["name"]: one["reason"] for one in manifest["left_out"]}
    assert "never included" in left_out["checkpoints"]
    for name in ("linked.log", "pipe.log", "a name with blanks.log"):
        assert f"attempts/0001/logs/{name}" in left_out
        assert name in done.err
    assert "the index does not know the run" in left_out["index.json"]
    assert "REFERRED" in manifest["secrets_without_a_value_here"][0]
    assert "unknown here" in done.err


def test_an_archive_has_a_bounded_size() -> None:
    archive = Archive((), bytes_max=1000)
    archive.add_text("one.txt", "x" * 900)
    archive.add_text("two.txt", "y" * 900)
    archive.add_text("../three.txt", "z")
    assert archive.names == ["one.txt"]
    assert [one["name"] for one in archive.left_out] == ["two.txt", "../three.txt"]
    packed = archive.to_bytes({"folder": "f", "made_at": 0})
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert tar.getnames() == ["f/MANIFEST.json", "f/one.txt"]


def test_what_consumers_printed_is_included_without_secrets(
    call: Call, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "CONSUMERS_MAX", 2)
    for number in (1, 2, 3):
        start = ended_run.consumer(number)
        start.directory.mkdir(parents=True)
        order = {"consumer": "eval", "parameters": {"api_token": "plainhubtoken"}}
        start.order.write_text(json.dumps(order))
        start.log.write_text(f"evaluation {number} got plainhubtoken\n")
        start.logs.mkdir()
        (start.logs / "7_0_log.err").write_text("no such python, plainhubtoken\n")
        (start.logs / "7_submission.sh").write_text("srun\n")
        (start.logs / ".link.sh").symlink_to(start.logs / "7_submission.sh")
    out = tmp_path / "out.tar.gz"
    assert call("bundle", "kelp", "--out", out).status == 0
    found = contents(out)
    assert found["consumers/0003/output.log"] == f"evaluation 3 got {13 * '*'}\n"
    assert json.loads(found["consumers/0002/order.json"])["consumer"] == "eval"
    assert found["consumers/0003/logs/7_0_log.err"].startswith("no such python")
    assert found["consumers/0003/logs/7_submission.sh"] == "srun\n"
    assert ".link.sh" not in found["MANIFEST.json"]
    assert not [name for name in found if name.startswith("consumers/0001")]
    assert "only the newest 2 starts" in found["MANIFEST.json"]
    assert not [name for name, text in found.items() if "plainhubtoken" in text]


def test_a_secret_that_one_file_reveals_is_removed_from_all(tmp_path: Path) -> None:
    """A program prints a token without its name, and another file says what it is."""
    token, harmless = "qX7rT2mW9kLp4", "step-0000000100-01J9ZK3V"
    (tmp_path / "0.log").write_text(f"bad value {token} at {harmless}\n")
    (tmp_path / "1.log").write_text(f'login(token="{token}")  # {harmless}\n')
    lines = [json.dumps({"kind": "note", "text": token}), json.dumps({"hf_token": "aB3" * 5})]
    (tmp_path / "j.jsonl").write_text("\n".join([*lines, json.dumps({"text": "aB3" * 5})]))
    archive = Archive(())
    for name in ("0.log", "1.log"):
        archive.add_end(name, tmp_path / name, 1000, below=tmp_path)
    archive.add_json_lines("j.jsonl", tmp_path / "j.jsonl", 1000, below=tmp_path)
    (tmp_path / "a.tar.gz").write_bytes(archive.to_bytes({"folder": "f", "made_at": 0}))
    found = contents(tmp_path / "a.tar.gz")
    assert not [name for name, text in found.items() if token in text or "aB3" * 5 in text]
    assert found["0.log"].count(harmless) == found["1.log"].count(harmless) == 1


def test_bad_input_is_refused(call: Call, ended_run: RunPaths, tmp_path: Path) -> None:
    out = tmp_path / "there.tar.gz"
    out.write_text("mine")
    existing = call("bundle", "kelp", "--out", out)
    assert (existing.status, out.read_text()) == (5, "mine")
    assert "not overwritten" in existing.err
    assert call("bundle", "nobody").status == 3
    assert call("bundle", "kelp", "--out", tmp_path / "none" / "x.tar.gz").status == 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".there")]
    ended_run.spec.write_text("{")
    assert call("bundle", ended_run.directory, "--out", tmp_path / "new.tar.gz").status != 0
    assert not (tmp_path / "new.tar.gz").exists()


SLURM: Final = """#!/bin/sh
case "$0 $*" in
  *sacct*) echo "JobID|State"; echo "77|PREEMPTED";;
  *) echo "JobId=77 Comment=token=abcdef123456 JobState=PREEMPTED";;
esac
"""


@pytest.mark.parametrize("answers", [True, False])
def test_slurms_records_are_included_if_it_answers(
    answers: bool, ended_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended_run.attempt(1).submission
    path.write_text(json.dumps({**json.loads(path.read_text()), "executor": "slurm"}))
    for name in ("sacct", "scontrol"):
        (tmp_path / name).write_text(SLURM if answers else "#!/bin/sh\nsleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bundles, "SLURM_S", 20.0 if answers else 0.5)
    made = bundles.make_bundle(ended_run)
    (tmp_path / "made.tar.gz").write_bytes(made.content)
    files: dict[str, Any] = contents(tmp_path / "made.tar.gz")
    if answers:
        assert "77|PREEMPTED" in files["slurm/77.sacct.txt"]
        assert "JobState=PREEMPTED" in files["slurm/77.scontrol.txt"]
        assert "abcdef123456" not in files["slurm/77.scontrol.txt"]
    else:
        reasons = {one["name"]: one["reason"] for one in made.left_out}
        assert "did not answer" in reasons["slurm"]


def test_a_secret_is_known_in_each_form_in_which_programs_print_it() -> None:
    found = spellings(['a "b"\nzweite Zeile'])
    assert 'a \\"b\\"\\nzweite Zeile' in found
    assert "zweite%20Zeile" in found
    assert "zweite Zeile" in found
    assert all(len(one) >= 6 for one in found)
