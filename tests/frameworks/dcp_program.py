"""Two ranks that use the DCP drop-in, with several scenarios.

    python -m tests.frameworks.dcp_program SCENARIO[,SCENARIO] WORLD_SIZE FOLDER
    python -m tests.frameworks.dcp_program kill_saves ROUNDS FOLDER

A rank fails if what it sees is not what the scenario expects.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tests.dcp.testbed import assert_same, whole
from tests.frameworks.dcp_states import State, is_same, stock
from tests.support.forked_ranks import _fork, run_ranks
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.errors import DamagedCheckpointError, SaveError
from holdfast.trainer import dcp, load_checkpoint
from holdfast.trainer.dcp import loading
from holdfast.trainer.dcp.delegation import target_of

MANY_ROUNDS = 50
LINK_S = 1.0


class Trained:
    """A sharded model with its optimizer, as PyTorch's tutorial saves them."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 3))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * (seed + 1))
        for _ in range(steps):
            self.train()

    def train(self) -> None:
        torch.manual_seed(5)
        self.model(torch.randn(4, 7)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: State) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def saves(folder: Path) -> None:
    """Save with Holdfast and with stock DCP; each loads what the other saved."""
    trained = Trained(0, 2)
    state = {"app": trained, "step": 2, "shared": torch.arange(5.0)}
    dcp.save(state, checkpoint_id=folder / "ours")
    stock.save(state, checkpoint_id=folder / "stock")
    manifest = read_manifest(folder / "ours")
    assert manifest is not None
    assert manifest.world_size == dist.get_world_size()
    for load, name in ((stock.load, "ours"), (dcp.load, "stock"), (dcp.load, "ours")):
        found = Trained(3, 1)
        other: State = {"app": found, "step": 0, "shared": torch.zeros(5)}
        load(other, checkpoint_id=folder / name)
        assert_same(found.state_dict(), trained.state_dict())
        assert other["step"] == 2
        assert torch.equal(other["shared"], torch.arange(5.0))
        found.train()
    write_whole(trained.state_dict(), folder / f"whole-{dist.get_world_size()}.pt")


def loads(folder: Path) -> None:
    """Load what another number of ranks saved."""
    for name in ("ours", "stock"):
        found = Trained(3, 1)
        dcp.load({"app": found}, checkpoint_id=folder / name)
        write_whole(found.state_dict(), folder / f"{name}-at-{dist.get_world_size()}.pt")


def write_whole(state: State, path: Path) -> None:
    full = whole(state)
    if dist.get_rank() == 0:
        torch.save(full, path)
    dist.barrier()


def fails(folder: Path) -> None:
    """An error of one rank is raised on all, and nothing is left of the save."""
    rank = dist.get_rank()
    dcp.save({"a": torch.full((3,), 1.0)}, checkpoint_id=folder / "a")
    for bad in range(dist.get_world_size()):
        state: State = {"a": torch.full((3,), 2.0)}
        if rank == bad:
            state["generator"] = (x for x in "ab")
        with raising(SaveError, f"rank {bad}: TypeError") as error:
            dcp.save(state, checkpoint_id=folder / "a")
        assert isinstance(error[0], CheckpointException)
        assert set(error[0].failures) == {bad}
        with raising(SaveError, f"rank {bad}: TypeError"):
            dcp.async_save(state, checkpoint_id=folder / "a")
    with raising(SaveError, "different values of checkpoint_id"):
        dcp.save({"a": torch.zeros(3)}, checkpoint_id=folder / f"of {rank}")
    with raising(SaveError, "a"):
        # The parts of the ranks do not fit together.
        dcp.save({"a": torch.zeros(3 + rank)}, checkpoint_id=folder / "a")
    copies_that_fail(folder)
    found = {"a": torch.zeros(3)}
    dcp.load(found, checkpoint_id=folder / "a")
    assert torch.equal(found["a"], torch.full((3,), 1.0))
    assert not list(folder.glob("of *"))


def copies_that_fail(folder: Path) -> None:
    """A copy that fails on one rank fails the save on all, and the next save works."""
    rank = dist.get_rank()
    state: State = {"a": torch.full((3,), 3.0), f"own {rank}": 1}
    dcp.save(state, checkpoint_id=folder / "grows")
    # It has no place in the plan, which is found while the state is copied.
    state[f"own {rank}"] = 10**2000 if rank == 1 else 2
    with raising(SaveError, "own 1: its int needs"):
        dcp.save(state, checkpoint_id=folder / "a")
    future = dcp.async_save(state, checkpoint_id=folder / "a")
    with raising(SaveError, "own 1: its int needs"):
        future.result(timeout=60)  # type: ignore[union-attr]
    state[f"own {rank}"] = 3
    dcp.save(state, checkpoint_id=folder / "grows")


def damaged(folder: Path) -> None:
    """All ranks refuse a checkpoint with damaged bytes, although one rank reads them."""
    trained = Trained(0, 1)
    dcp.save({"app": trained}, checkpoint_id=folder / "a")
    if dist.get_rank() == 0:
        path = folder / "a" / "__1_0.distcp"
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    dist.barrier()
    with raising(DamagedCheckpointError, "__1_0.distcp"):
        dcp.load({"app": Trained(1, 1)}, checkpoint_id=folder / "a")
    with raising(Exception, "no checkpoint is here"):
        dcp.load({"app": Trained(1, 1)}, checkpoint_id=folder / "none")


def own_keys(folder: Path) -> None:
    """Ranks may have keys of their own, in any order, and values of other lengths."""
    rank = dist.get_rank()
    names = ["x", f"own {rank}", "text", "memory"]
    values = {
        "x": torch.arange(4.0),
        f"own {rank}": torch.full((2,), float(rank)),
        "text": "of all",
        "memory": {1, 2, 3},
    }
    order = names if rank else names[::-1]
    dcp.save({name: values[name] for name in order}, checkpoint_id=folder / "a")
    found = {name: torch.zeros(v.shape) if torch.is_tensor(v) else 0 for name, v in values.items()}
    dcp.load(found, checkpoint_id=folder / "a")
    assert is_same(found, values)
    # As with stock DCP, one rank's value counts if the ranks have different ones.
    dcp.save(
        {"text": "x" * (400 * rank + 1), "date": (rank,) * (40 * rank + 1)},
        checkpoint_id=folder / "b",
    )
    one: State = {"text": "", "date": ()}
    dcp.load(one, checkpoint_id=folder / "b")
    assert one["text"] in {"x", "x" * 401}
    assert one["date"] in {(0,), (1,) * 41}


def shards(folder: Path) -> None:
    """A ShardedTensor with several shards on a rank, in another layout than it is loaded into."""
    layouts = (["rank:0/cpu", "rank:1/cpu"], ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])
    specs = [ChunkShardingSpec(dim=0, placements=placements) for placements in layouts]
    for number, (saved, wanted) in enumerate((specs, specs[::-1])):
        made = sharded_tensor.rand(saved, 11, 3)
        dcp.save({"t": made}, checkpoint_id=folder / str(number))
        assert read_manifest(folder / str(number)) is not None
        found = sharded_tensor.zeros(wanted, 11, 3)
        dcp.load({"t": found}, checkpoint_id=folder / str(number))
        outs = [torch.zeros(11, 3) if dist.get_rank() == 0 else None for _ in range(2)]
        made.gather(out=outs[0])
        found.gather(out=outs[1])
        assert dist.get_rank() or torch.equal(outs[0], outs[1])  # type: ignore[arg-type]


def groups(folder: Path) -> None:
    """Process groups of some ranks, of all ranks, and no_dist, in one program."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [dist.new_group([other]) for other in range(world_size)]
    state = {"a": torch.full((4,), float(rank))}
    dcp.save(state, checkpoint_id=folder / f"part {rank}", process_group=parts[rank])
    dcp.save(state, checkpoint_id=folder / f"alone {rank}", no_dist=True)
    dcp.save({"a": torch.ones(4)}, checkpoint_id=folder / "all")
    futures = [
        dcp.async_save(state, checkpoint_id=folder / f"part {rank}", process_group=parts[rank]),
        dcp.async_save({"a": torch.ones(4)}, checkpoint_id=folder / "all"),
    ]
    for future in futures:
        future.result(timeout=60)  # type: ignore[union-attr]
    for name in (f"part {rank}", f"alone {rank}"):
        found = {"a": torch.zeros(4)}
        dcp.load(found, checkpoint_id=folder / name, no_dist=True)
        assert torch.equal(found["a"], state["a"])
    manifest = read_manifest(folder / f"part {rank}")
    assert manifest is not None
    assert manifest.world_size == 1


def renewed_group(folder: Path) -> None:
    """A process group that is destroyed and made again is a new one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dcp.save({"a": torch.ones(2)}, checkpoint_id=folder / "a")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size
    )
    dcp.save({"a": torch.full((2,), 2.0)}, checkpoint_id=folder / "a")
    found = {"a": torch.zeros(2)}
    dcp.load(found, checkpoint_id=folder / "a")
    assert torch.equal(found["a"], torch.full((2,), 2.0))


def trains_on(folder: Path) -> None:
    """Asynchronous saves while the program trains and uses its own collectives."""
    trained = Trained(0, 1)
    expected, futures = [], []
    for step in range(6):
        futures.append(dcp.async_save({"app": trained}, checkpoint_id=folder / str(step)))
        expected.append(copy.deepcopy(whole(trained.state_dict())))
        trained.train()
    for step, future in enumerate(futures):
        future.result(timeout=60)  # type: ignore[union-attr]
        found = Trained(4, 1)
        dcp.load({"app": found}, checkpoint_id=folder / str(step))
        assert_same(whole(found.state_dict()), expected[step])


def lowest_rank(folder: Path) -> None:
    """A planner that saves copies from the lowest rank. Each rank has others here."""
    for name, module in (("lowest", dcp), ("stock-lowest", stock)):
        copies = {f"copy{n}": torch.full((64,), float(dist.get_rank())) for n in range(6)}
        planner = stock.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        module.save(
            copies | {"number": dist.get_rank()}, checkpoint_id=folder / name, planner=planner
        )
        found: State = {key: torch.full((64,), 9.0) for key in copies} | {"number": 9}
        stock.load(found, checkpoint_id=folder / name)
        assert found.pop("number") == 0, name
        assert all(not value.any() for value in found.values()), (name, found)


def links(folder: Path) -> None:
    """A link to a checkpoint. It moves while the ranks load, and all of them load one."""
    rank, latest = dist.get_rank(), folder / "latest"
    # The ranks read parts of it for each other.
    model = torch.nn.ParameterDict({f"w{n}": torch.zeros(1 << 16) for n in range(16)})
    for number in (1, 2):
        state = {key: torch.full_like(weight, number) for key, weight in model.items()}
        dcp.save(state, checkpoint_id=folder / f"c{number}")

    def move_late(directory: Path) -> Path:
        # The first rank has followed the link now.
        time.sleep(LINK_S)
        _point(latest, "c2")
        return target_of(directory)

    def load_into_model(state: State) -> None:
        if rank == 1:
            time.sleep(LINK_S)
            _point(latest, "c2")
        load_checkpoint(latest, model, rename={k: f"model.{k}" for k in state})
        state |= {key: weight.detach() for key, weight in model.items()}

    if rank == 1:
        vars(loading)["target_of"] = move_late
    for load in (
        partial(stock.load, checkpoint_id=latest),
        load_into_model,
        partial(dcp.load, checkpoint_id=latest),
    ):
        if rank == 0:
            _point(latest, "c1")
        dist.barrier()
        state = {key: torch.zeros(1 << 16) for key in model}
        load(state)
        found: list[Any] = [None, None]
        values = torch.cat([*state.values()])
        dist.all_gather_object(found, {float(values.min()), float(values.max())})
        assert found[0] == found[1] in ({1.0}, {2.0}), (load, found)
        dist.barrier()
    dcp.save({"w0": torch.full((2,), 3.0)}, checkpoint_id=latest)
    assert latest.is_symlink()
    state = {"w0": torch.zeros(2)}
    stock.load(state, checkpoint_id=latest)
    assert state["w0"].tolist() == [3.0, 3.0]


def _point(link: Path, target: str) -> None:
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


def saves_forever(folder: Path) -> None:
    """Save into one directory again and again. `kill_saves` kills the ranks."""
    rank = dist.get_rank()
    begun = reported(folder)
    for number in range(begun + 1, begun + 10_000):
        state = {"a": torch.full((1 << 18,), float(number)), f"own {rank}": torch.tensor(number)}
        dcp.save(state, checkpoint_id=folder / "last")
        if rank == 0:
            (folder / "saved.tmp").write_text(str(number))
            os.replace(folder / "saved.tmp", folder / "saved")


def kill_saves(folder: Path, rounds: int) -> None:
    """Kill two ranks and their flusher at many moments of a save; each time, load what is there.

    The checkpoint is one whole save, and not older than the last one that was reported.
    """
    seen = set()
    for number in range(rounds):
        store = folder / f"store-kill-{number}"
        pids = [_fork(rank, 2, store, partial(saves_forever, folder)) for rank in range(2)]
        before = reported(folder)
        give_up = time.monotonic() + 120
        while reported(folder) < before + 2:
            assert time.monotonic() < give_up, "the ranks do not save"
            time.sleep(0.001)
        time.sleep(0.002 * number % 0.15)
        ranks = [psutil.Process(pid) for pid in pids]
        everyone = [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]
        assert len(everyone) == 3, "expected two ranks and a flusher"
        for process in everyone:
            process.kill()
        for pid in pids:
            os.waitpid(pid, 0)
        psutil.wait_procs(everyone, timeout=30)
        seen.add(len(list((folder / "last").glob(".saving-*"))))
        found = {"a": torch.zeros(1 << 18), "own 0": torch.tensor(0), "own 1": torch.tensor(0)}
        dcp.load(found, checkpoint_id=folder / "last", no_dist=True)
        whole_save = int(found["own 0"])
        assert bool((found["a"] == whole_save).all())
        assert int(found["own 1"]) == whole_save
        assert whole_save >= reported(folder)
    # A few kills may all come between two saves.
    assert rounds < MANY_ROUNDS or seen == {0, 1}, "expected kills during a save and between saves"
    print(f"{rounds} kills, each left a whole checkpoint")


def reported(folder: Path) -> int:
    """The number of the last save that returned on rank 0."""
    path = folder / "saved"
    return int(path.read_text()) if path.exists() else 0


class raising:
    """`pytest.raises` for ranks: yields a list with the error."""

    def __init__(self, kind: Any, text: str) -> None:
        self.kind, self.text = kind, text
        self.errors: list[Any] = []

    def __enter__(self) -> list[Any]:
        return self.errors

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        assert error is not None, f"expected {self.kind} with {self.text!r}"
        if not isinstance(error, self.kind):
            return False
        assert self.text in str(error), f"{self.text!r} is not in {error}"
        self.errors.append(error)
        return True


SCENARIOS: Mapping[str, Callable[[Path], None]] = {
    act.__name__: act
    for act in (
        saves,
        loads,
        fails,
        damaged,
        own_keys,
        shards,
        groups,
        renewed_group,
        trains_on,
        lowest_rank,
        links,
    )
}


def run(scenario: str, folder: Path) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    SCENARIOS[scenario](folder)
    if dist.get_rank() == 0:
        print(f"{scenario}: {time.monotonic() - began:.2f} s", file=sys.stderr)


def main() -> None:
    # The forked ranks could not use threads that this process has started.
    torch.set_num_threads(1)
    scenarios, count, folder = sys.argv[1].split(","), int(sys.argv[2]), Path(sys.argv[3])
    if scenarios == ["kill_saves"]:
        kill_saves(folder, count)
        return
    for scenario in scenarios:
        place = folder if scenario in {"saves", "loads"} else folder / scenario
        place.mkdir(exist_ok=True)
        store = folder / f"store-{scenario}-{count}"
        run_ranks(count, store, partial(run, scenario, place))


if __name__ == "__main__":
    main()
