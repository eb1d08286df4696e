"""Two ranks that check stock DCP and Holdfast on each other's checkpoints.

    python -m tests.dcp.program GROUP RANK WORLD_SIZE FOLDER FLUSHER

Each check that passes is recorded in `FOLDER/passed-RANK`; the first that fails ends the rank.
"""

from __future__ import annotations

import datetime
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from tests.dcp import own_planners, state_dicts, stock_reads, stock_writes
from tests.dcp.testbed import Testbed
from tests.support.checkpoint_program import make_identity

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.saving.engine import CheckpointEngine

Check = Callable[[Testbed], None]
COLLECTIVES_S = 200

GROUPS: Mapping[str, tuple[Check, ...]] = {
    "none": (),
    "stock_reads": stock_reads.CHECKS,
    "state_dicts": state_dicts.CHECKS,
    "own_planners": own_planners.CHECKS,
    "stock_writes": stock_writes.CHECKS,
    "stock_writes_slowly": stock_writes.SLOW_CHECKS,
}


def names(*groups: str) -> list[str]:
    """The names of all checks of the given groups, as `group-check`."""
    return [f"{group}-{check.__name__}" for group in groups for check in GROUPS[group]]


def main() -> None:
    groups, rank, world_size = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
    folder, flusher = Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=COLLECTIVES_S)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout
    )
    testbed = make_testbed(rank, world_size, folder, flusher)
    with open(folder / f"passed-{rank}", "w", buffering=1) as passed:
        for group in groups:
            for check in GROUPS[group]:
                try:
                    check(testbed)
                except BaseException:
                    print(f"{group}-{check.__name__} on rank {rank}:", file=sys.stderr)
                    traceback.print_exc()
                    raise SystemExit(1) from None
                print(f"{group}-{check.__name__}", file=passed)
                dist.barrier()
    testbed.engine.close()
    dist.destroy_process_group()


def make_testbed(rank: int, world_size: int, folder: Path, flusher: str) -> Testbed:
    """A testbed with a committed checkpoint that all checks share."""
    group = dist.new_group(backend="gloo")
    run = RunPaths(folder / "r")
    identity = make_identity(rank, world_size)
    engine = CheckpointEngine(flusher=flusher, run=run, identity=identity, group=group)
    testbed = Testbed(rank, world_size, folder, group, engine, Path(), flusher)
    state = testbed.state()
    assert engine.save(state, {"epoch": 1}, step=2, reason="interval", parent=None)
    (result,) = engine.wait(120)
    assert result.committed, result.error
    ours = run.checkpoint(result.checkpoint)
    dist.barrier()
    return Testbed(rank, world_size, folder, group, engine, ours, flusher)


if __name__ == "__main__":
    main()
