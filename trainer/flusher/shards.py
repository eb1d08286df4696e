"""What each node's ranks write, left where the others can read it, so that a loss has names.

Nobody but a node itself knows what its ranks write: plans are made without telling everybody. So
each leaves a list in the launch's folder as soon as its ranks have planned. Where a node is
lost, the others say by its list which files and keys went with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.durable import make_directory, to_json, write_bytes
from holdfast.contracts.errors import SaveError
from holdfast.contracts.paths import CheckpointName, RunPaths

RANKS_NAMED_MAX: Final = 4


@dataclass(frozen=True)
class ShardList:
    """What all ranks of one node write, by rank; `folder` is the launch's."""

    folder: Path
    node: int
    shards: Mapping[int, Mapping[str, Any]]

    def leave(self) -> None:
        """Write the list, in place of an older one.

        Nothing but the words of an error depends on it, so storage may refuse it.
        """
        shards = [{"rank": rank, **shard} for rank, shard in sorted(self.shards.items())]
        try:
            make_directory(self.folder)
            content = to_json({"node": self.node, "shards": shards})
            write_bytes(_path(self.folder, self.node), content)
        except OSError as error:
            print(f"holdfast flusher: no list of shards: {error}", file=sys.stderr, flush=True)


class ShardLists:
    """What the ranks of this node have told of their plans, until all of them have."""

    def __init__(self) -> None:
        self._told: dict[Path, dict[int, dict[str, Any]]] = {}

    def hear(self, rank: int, message: Mapping[str, Any]) -> ShardList | None:
        """Take what a rank writes by its new plan; the whole list once all ranks have told."""
        folder = Path(message["folder"])
        # Of a launch that is over nobody will ask.
        told = self._told.get(folder, {})
        told[rank] = {key: message[key] for key in ("files", "keys", "keys_total")}
        self._told = {folder: told}
        if len(told) < message["local_ranks"]:
            return None
        return ShardList(folder, message["node"], dict(told))


def launch_folder(run: RunPaths, checkpoint: str) -> Path:
    """The folder of the launch that `checkpoint` is of; `SaveError` when that is no name."""
    name = CheckpointName.parse(checkpoint)
    if name is None:
        raise SaveError(f"a slot names the checkpoint {checkpoint!r}, which is no name")
    return run.attempt(name.attempt).launch(name.launch)


def name_shards(folder: Path, nodes: Collection[int]) -> str:
    """What the ranks of these nodes write, in words; empty where they have left no list.

    As `__2_0.distcp with model.a, model.b and 9 keys more; __3_0.distcp with model.c`.
    """
    shards = [shard for node in sorted(nodes) for shard in _read(folder, node)]
    words = [_in_words(shard) for shard in shards[:RANKS_NAMED_MAX]]
    if len(shards) > RANKS_NAMED_MAX:
        words.append(f"and those of {len(shards) - RANKS_NAMED_MAX} more ranks")
    return "; ".join(words)


def _read(folder: Path, node: int) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(_path(folder, node).read_bytes())["shards"]
    except (OSError, ValueError, KeyError):
        return []
    return found


def _in_words(shard: Mapping[str, Any]) -> str:
    files = ", ".join(shard["files"]) or f"no file of rank {shard['rank']}"
    if not shard["keys"]:
        return files
    left = shard["keys_total"] - len(shard["keys"])
    return f"{files} with {', '.join(shard['keys'])}" + (f" and {left} keys more" if left else "")


def _path(folder: Path, node: int) -> Path:
    return folder / f"shards-node-{node:04d}.json"
