"""Setup lines in real bash: the first line that fails ends the launch, and is named."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.contracts.states import Cause
from holdfast.workers.decisions.causes import classify
from holdfast.workers.nodes.setup_lines import after_setup, checked_lines, problem_in

# The functions of a site: one uses an unset variable, and both return 1 for an unknown name.
SITE = """\
module() { [ "$1" = load ] && [ "$2" = cuda ] && export LOADED=$2 && return 0
echo "module: no modulefile '$2': $UNSET" >&2; return 1; }
conda() { [ "$2" = mine ] && export CONDA=$2 && return 0; echo "no environment $2" >&2; return 1; }
false
true
"""


def run_both_ways(folder: Path, lines: Sequence[str]) -> tuple[int, str, str]:
    """Run lines as a Slurm job's batch script and before a local agent, with the same result."""
    (folder / "site.sh").write_text(SITE)
    script = folder / "batch.sh"
    parts = ["#!/bin/bash", "#SBATCH --nodes=1", "", *checked_lines("launch.setup", lines)]
    show = "env | grep -E '^(LOADED|CONDA|holdfast)' || true; echo started"
    script.write_text("\n".join([*parts, show]))
    commands = (["bash", str(script)], [*after_setup("launch.setup", lines), "bash", "-c", show])
    batch, local = (
        subprocess.run(one, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
        for one in commands
    )
    assert batch.stdout == local.stdout
    assert problem_in(batch.stderr)[:1] == problem_in(local.stderr)[:1]
    return batch.returncode, batch.stdout, batch.stderr


@pytest.mark.parametrize(
    ("lines", "number", "status"),
    [
        (["source site.sh", "module load cudaa", "conda activate mine"], 2, 1),
        (["source site.sh", "module load cuda", "conda activate mnie"], 3, 1),
        (["source nowhere.sh", "true"], 1, 1),
        (["nosuchcommand a"], 1, 127),
        (["true\n\n(exit 7) # the third", "true"], 3, 7),
        (["cat <<E", "false", "E", "false"], 4, 1),
        (["for name in a b; do", "grep -q $name site.sh x", "done"], 2, 2),
        (["set +e", "false", "set -e"], 0, 0),
        (["f() { return 5; }", 'X="a  b"', "f '$X' \"c\""], 3, 5),
        (["true | (exit 6)"], 1, 6),
        (["test -e nowhere && true", "false"], 2, 1),
    ],
)
def test_the_first_line_that_fails_ends_the_job_and_is_named(
    tmp_path: Path, lines: list[str], number: int, status: int
) -> None:
    code, output, errors = run_both_ways(tmp_path, lines)
    assert code == status
    assert ("started" in output) == (status == 0)
    if status:
        text = "\n".join(lines).split("\n")[number - 1]
        found = problem_in(errors)[0]
        what = f"launch.setup line {number} failed with exit status {status}: {text}"
        assert found == f"{what} -- correct it, or append || true if it may fail"


@pytest.mark.parametrize(
    "line",
    [
        "source nowhere.sh || true",
        "! true",
        "[ -e nowhere ] && source nowhere",
        "if false; then\nfalse\nfi",
        "[ -n '' ] && export A=1",
        "false && true",
        "while false; do true; done",
        "set +e\nfalse\nmodule load nowhere",
        "export HOST=$(false)",
    ],
)
def test_a_line_that_may_fail_does_not_end_the_job(tmp_path: Path, line: str) -> None:
    lines = ["source site.sh", line, "module load cuda", "conda activate mine"]
    code, output, errors = run_both_ways(tmp_path, lines)
    assert (code, problem_in(errors)) == (0, [])
    assert sorted(output.split()) == ["CONDA=mine", "LOADED=cuda", "started"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("exit 3", "exit status 3, at or after: exit 3"),
        ("if then", "exit status 2, at or after: true"),
        ("set -e\nsource site.sh", "exit status 1, at or after: source site.sh"),
        ("exec nosuchcommand", "exit status 127, at or after: exec nosuchcommand"),
    ],
)
def test_lines_that_end_the_shell_are_a_problem(tmp_path: Path, line: str, words: str) -> None:
    code, output, errors = run_both_ways(tmp_path, ["true", line, "true"])
    assert code > 0
    assert "started" not in output
    assert problem_in(errors)[0] == f"launch.setup ended the shell with {words}"


def test_an_unset_variable_under_set_u_is_a_problem(tmp_path: Path) -> None:
    script = "\n".join([*checked_lines("launch.setup", ["set -u", "echo $NIX"]), "echo started"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert "started" not in done.stdout
    problem, before = problem_in(done.stderr)
    assert problem.endswith("at or after: echo $NIX")
    assert before.endswith("NIX: unbound variable")


def test_the_ending_is_a_user_error_that_names_the_line_and_the_commands_own_message(
    tmp_path: Path,
) -> None:
    lines = ["source site.sh", "module load cudaa"]
    ending = classify(outcome=None, status=None, job_log=run_both_ways(tmp_path, lines)[2])
    assert ending.cause is Cause.USER_ERROR
    first = "launch.setup line 2 failed with exit status 1: module load cudaa -- "
    assert ending.evidence[0].startswith(first)
    assert ending.evidence[1] == "module: no modulefile 'cudaa':"


def test_without_lines_nothing_is_added() -> None:
    assert checked_lines("launch.setup", ()) == []
    assert after_setup("launch.node_setup", ()) == []
