"""Lightning and Fabric at changing numbers of ranks: the same samples, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.rank_programs import run_program
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.frameworks.lightning.global_batch import (
    SampleShare,
    continue_share,
    limits_of,
)

# Two ranks, then one, one again from a checkpoint of one rank, and two.
PLAIN: Final = {
    "lightning_program": [[2, 1], [1, 3], [1, 5], [2, None]],
    "fabric_program": [[2, 1], [1, 5], [1, 7], [2, None]],
}
DATA: Final[Any] = list(range(24))
DISTRIBUTED: Final = DistributedSampler.__name__


def share(**changed: Any) -> SampleShare:
    """What two ranks with batches of 6 saved."""
    usual: dict[str, Any] = {
        "parts": 2,
        "order": DISTRIBUTED,
        "size": 6,
        "given": 6,
        "seed": 5,
        "shuffle": True,
    }
    return SampleShare(**usual | changed)


@pytest.mark.more
@pytest.mark.parametrize(
    "program", [pytest.param("lightning_program", marks=pytest.mark.slow), "fabric_program"]
)
def test_each_step_has_the_same_samples_at_every_number_of_ranks(
    program: str, tmp_path: Path
) -> None:
    launches = json.dumps(PLAIN[program])
    said = run_program(
        "frameworks.lightning_resized", program, "plain", launches, tmp_path, timeout_s=300
    )
    assert "batches equal" in said


@pytest.mark.parametrize("saved", [share(), share(parts=1, size=12)])
def test_one_rank_gets_the_order_and_the_batch_of_two(saved: SampleShare) -> None:
    loader: Any = DataLoader(DATA, batch_size=6, shuffle=True)
    continue_share(loader, saved, rank=0, ranks=1)
    order: list[int] = list(DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=True, seed=5))
    assert [batch.tolist() for batch in loader] == [order[:12], order[12:]]
    assert (loader.batch_size, len(loader)) == (12, 2)
    assert SampleShare.of(loader, 1, 6) == share(parts=1, size=12)


def test_a_batch_size_that_the_program_changed_counts() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 2, 0))
    continue_share(loader, share(), rank=0, ranks=2)
    assert loader.batch_size == 4


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (share(size=1, given=6), "a global batch of 2 .* does not split evenly over 4 ranks"),
        (share(order="RandomSampler"), "came from RandomSampler on 2 .* DistributedSampler on 4"),
        (share(size=None), "continues at another number of ranks only with DistributedSampler"),
    ],
)
def test_an_order_that_cannot_go_on_is_refused(saved: SampleShare, says: str) -> None:
    loader = DataLoader(DATA, batch_size=6, sampler=DistributedSampler(DATA, 4, 0))
    with pytest.raises(CheckpointError, match=says):
        continue_share(loader, saved, rank=0, ranks=4)


def test_the_numbers_of_ranks_that_can_continue_are_known_from_the_checkpoint() -> None:
    batches = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    alone = SampleShare.of(DataLoader(DATA, batch_sampler=batches), 1, 4)
    assert limits_of([share(), share(size=4)]) == {"global_batches": [8, 12]}
    assert limits_of([share(), alone])["fixed"].startswith("the order of the samples comes from R")
    assert (
        "without a sampler" in limits_of([SampleShare.of(DataLoader(DATA, None), 1, None)])["fixed"]
    )
    assert limits_of([]) == {"global_batches": []}
