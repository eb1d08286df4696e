"""A tensor subclass with two inner tensors inside a DTensor is refused by key on all ranks."""

from __future__ import annotations

import json
import sys

import pytest
from tests.process import wrapped_program
from tests.process.wrapped_program import RANKS
from tests.support import forked

WAIT_S = 100.0
INNER = "it is a Quantised with inner tensors codes, scale"

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The errors of each rank, by case."""
    folder = tmp_path_factory.mktemp("wrapped")
    done = forked.run([sys.executable, "-m", wrapped_program.__name__, folder], timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("buffer", f"model.odd: {INNER}"),
        ("moment", f"optimizer.state.weight.moment: {INNER}"),
        ("target", "model.odd: in this program it is a Quantised"),
    ],
)
def test_every_rank_reports_the_unsupported_key(
    errors: list[dict[str, str]], case: str, said: str
) -> None:
    for each in errors:
        assert said in each[case]


def test_unsupported_tensor_on_one_rank_fails_all_ranks(errors: list[dict[str, str]]) -> None:
    for each in errors:
        assert f"model.odd: {INNER}" in each["one rank"]
