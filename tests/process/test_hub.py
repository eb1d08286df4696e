"""Exports to a repository of the Hugging Face Hub, and imports from it, with the Hub's client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from tests.support.fake_hub import TOKEN, FakeHub, environment_of, fake_hub

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError, SpecError
from holdfast.contracts.records.history import load_events
from holdfast.workers.checkpoints import hub

LIMIT_S = 240
WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as one:
        variables = {
            **environment_of(one, tmp_path),
            "HOLDFAST_HOME": str(tmp_path / "home"),
            "HOLDFAST_ROOT": str(tmp_path / "runs"),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield one


def holdfast(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("holdfast"))
    return subprocess.run(
        [program, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def facts_of(*words: str) -> Any:
    done = holdfast(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.more
def test_weights_go_to_the_hub_and_come_back_with_the_same_digest(
    served: FakeHub, tmp_path: Path
) -> None:
    source = tmp_path / "weights"
    source.mkdir()
    save_file(WEIGHTS, source / "model.safetensors")
    first = facts_of("import", str(source), "--name", "base")
    export = ("export", first["checkpoint"], "--to", "hf", "--push", "lab/small")
    pushed = facts_of(*export, "--private")
    place = pushed["pushed_to"]
    assert pushed["path"] == place
    assert served.private == {"lab/small"}
    assert served.messages == [f"Checkpoint {first['checkpoint']}"]
    found = load(served.files("lab/small")["model.safetensors"])
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], one) for name, one in WEIGHTS.items())
    # The repository gets a newer commit, and the import asks for the older one.
    served.commit("lab/small", {"model.safetensors": b"other", "run.py": b"raise SystemExit"})
    again = facts_of("import", place, "--name", "again")
    assert (again["digest"], again["path"]) == (first["digest"], place)
    assert not any("run.py" in one for one in served.asked), "no code is fetched"
    paths = RunPaths(tmp_path / "runs" / "base")
    exported = [e.data for e in load_events(paths) if e.kind is EventKind.EXPORTED]
    assert [one["path"] for one in exported] == [place]
    graph = facts_of("lineage", "again")
    assert {"kind": "source", "id": place, "path": place} in graph["nodes"]
    # With --output, the folder stays too.
    output = tmp_path / "kept"
    kept = facts_of(*export, "--output", str(output))
    assert (output / "model.safetensors").is_file()
    assert (kept["path"], kept["pushed_to"] != place) == (str(output), True)
    written = [one for one in (tmp_path / "runs").rglob("*") if one.is_file()]
    assert not any(TOKEN.encode() in one.read_bytes() for one in written), "the token was stored"
    refused = holdfast(*export, HF_TOKEN="hf_wrong")
    assert refused.returncode not in {0, 2}
    assert "hf://lab/small: " in refused.stderr
    assert "hf_wrong" not in refused.stderr
    missing = holdfast("import", "hf://lab/none", "--name", "none")
    assert "hf://lab/none: RepositoryNotFoundError" in missing.stderr
    assert not (tmp_path / "runs" / "none").exists()


def test_a_repository_without_safetensors_is_refused(served: FakeHub) -> None:
    served.commits["lab/pickled"] = [("0" * 40, {})]
    served.commit("lab/pickled", {"pytorch_model.bin": b"x"})
    # In a process of its own, because the library keeps the address of its import.
    done = holdfast("import", "hf://lab/pickled", "--name", "pickled")
    assert done.returncode == 4, done
    assert "has no safetensors, and nothing else is fetched" in done.stderr
    assert not any("/resolve/" in one for one in served.asked)


@pytest.mark.parametrize(
    "text", ["hf://x", "hf://a/b@", "hf://a/../b", "hf://a/b/c", "hf://a/b@-x"]
)
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="expected hf://OWNER/NAME"):
        hub.parse_place(text)


def test_the_library_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PreflightError, match="install Holdfast with the extra `hub`"):
        hub.create("lab/small", private=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "torch", "--push", "a/b"], "the Hub gets --to hf"),
        (["--to", "hf", "--private", "--output", "x"], "acts only with --push"),
        (["--to", "hf"], "expected the file or folder to write, or --push"),
        (["--to", "hf", "--push", "a"], "expected OWNER/NAME"),
    ],
)
def test_options_of_a_push_that_do_not_fit_are_refused(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = holdfast("export", str(tmp_path), *words)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.replace("│", " ").split())
