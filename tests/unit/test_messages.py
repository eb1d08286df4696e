"""Messages for newcomers: numbers with nouns, and the ways to misspell a command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.histories import spec_of

from holdfast.contracts.errors import PreflightError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.flows.parameters import load_spec
from holdfast.workers.decisions.sizes import problem_with
from holdfast.workers.runs import preflight


def test_one_thing_has_no_plural(tmp_path: Path) -> None:
    assert [counted(n, "GPU") for n in range(3)] == ["0 GPUs", "1 GPU", "2 GPUs"]
    spec = spec_of(launch={"working_directory": "/nowhere"})
    with pytest.raises(PreflightError, match=r"cannot start, 1 problem to fix:\n"):
        preflight.check(spec, tmp_path)
    elastic = spec_of(resources={"gpus_per_node": 4}, elastic={"min_gpus": 2, "max_gpus": 4})
    assert str(problem_with(elastic, 1)).startswith("1 GPU: outside elastic 2 to 4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'command = "python train.py --lr 1e-3"',
            'expected a list of arguments: ["train.py", "--lr", "1e-3"], because torchrun starts',
        ),
        (
            'command = "./train --name \'a b\'"\n[program]\nlauncher = "none"',
            'expected a list of arguments: ["./train", "--name", "a b"]',
        ),
        ('command = "train.py \'a"', 'expected a list of arguments: ["train.py \'a"]'),
        ("command = 7", "command: given 7; expected a list"),
        (
            'command = ["t.py"]\n[launch]\nsetup = "module load cuda"',
            'launch.setup: given "module load cuda"; expected a list: ["module load cuda"]',
        ),
        (
            'command = ["t.py"]\n[launch]\nwrapper = "apptainer exec a.sif"',
            'expected a list of arguments: ["apptainer", "exec", "a.sif"]',
        ),
        ('command = ["t.py"]\non = \'[{"name": "a"}]\'', "expected TOML, such as {name = "),
    ],
)
def test_a_text_instead_of_a_list_is_shown_as_a_list(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(f'name = "r"\n{text}\n')
    with pytest.raises(SpecError) as refused:
        load_spec(path, [])
    assert said in str(refused.value)
    assert "tuple" not in str(refused.value)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("python", "train.py"), "torchrun starts Python itself: leave 'python' out"),
        (("python3.11", "-m", "x"), "leave 'python3.11' out"),
        (
            ("torchrun", "train.py"),
            "leave 'torchrun' and its options out",
        ),
        (("~/train.py",), f"nothing expands ~ and variables: write '{Path.home()}/train.py'"),
        (("$HOME/train.py",), f"write '{os.environ['HOME']}/train.py'"),
        (("${HOME}/train.py",), f"write '{os.environ['HOME']}/train.py'"),
        (("$NONE_OF_THESE/train.py",), "nothing expands ~ and variables: write the whole path"),
        (("nothing.py",), "nothing.py is not a file under"),
    ],
)
def test_a_misspelt_program_is_explained(
    command: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    spec = spec_of(launch={"working_directory": str(tmp_path)})
    with pytest.raises(PreflightError) as refused:
        preflight.check(spec.model_copy(update={"command": command}), tmp_path / "root")
    assert said in str(refused.value)
