"""Lists of what each node's ranks write, so that the error for a lost node can name its shards.

Only a node itself knows what its ranks write, because ranks plan a save without exchanging plans.
Each node therefore writes a list into the launch's folder as soon as its ranks have planned. If a
node is lost, the others read from its list which files and keys are lost too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import make_directory, to_json, write_bytes
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import SaveError
from holdfast.trainer.flusher.hints import log

RANKS_NAMED_MAX: Final = 4


@dataclass(frozen=True)
class ShardList:
    """What all ranks of one node write, by rank. `folder` is the launch's folder."""

    folder: Path
    node: int
    shards: Mapping[int, Mapping[str, Any]]

    def leave(self) -> None:
        """Write the list in place of an earlier one.

        Only the text of an error depends on it, so a failed write is logged and not raised.
        """
        shards = [{"rank": rank, **shard} for rank, shard in sorted(self.shards.items())]
        try:
            make_directory(self.folder)
            content = to_json({"node": self.node, "shards": shards})
            # Written once for each plan, beside training, see decision 18.
            write_bytes(_path(self.folder, self.node), content)
        except OSError as error:
            log(f"the list of shards was not written: {error}")


class ShardLists:
    """Collects the reports of this node's ranks until every rank has reported its plan."""

    def __init__(self) -> None:
        self._reports: dict[Path, dict[int, dict[str, Any]]] = {}

    def hear(self, rank: int, message: Mapping[str, Any]) -> ShardList | None:
        """Record what a rank writes by its new plan. Return the list once all have reported."""
        folder = Path(message["folder"])
        # Reports of an earlier launch are dropped.
        # The folder names the launch, so a new folder drops the reports of the former one.
        reports = self._reports.get(folder, {})
        reports[rank] = {key: message[key] for key in ("files", "keys", "keys_total")}
        self._reports = {folder: reports}
        if len(reports) < message["local_ranks"]:
            return None
        return ShardList(folder, message["node"], dict(reports))


def launch_folder(run: RunPaths, checkpoint: str) -> Path:
    """Return the folder of the launch that wrote `checkpoint`. Raises `SaveError` if malformed."""
    name = CheckpointName.parse(checkpoint)
    if name is None:
        raise SaveError(f"a slot names the checkpoint {checkpoint!r}, which is not a valid name")
    return run.attempt(name.attempt).launch(name.launch)


def name_shards(folder: Path, nodes: Collection[int]) -> str:
    """Describe what the ranks of these nodes write. Empty if these nodes left no list.

    Example: `__2_0.distcp with model.a, model.b and 9 more keys; __3_0.distcp with model.c`.
    """
    shards = [shard for node in sorted(nodes) for shard in _read(folder, node)]
    texts = [_describe(shard) for shard in shards[:RANKS_NAMED_MAX]]
    if len(shards) > RANKS_NAMED_MAX:
        texts.append(f"and those of {len(shards) - RANKS_NAMED_MAX} more ranks")
    return "; ".join(texts)


def _read(folder: Path, node: int) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(_path(folder, node).read_bytes())["shards"]
    except (OSError, ValueError, KeyError):
        return []
    return found


def _describe(shard: Mapping[str, Any]) -> str:
    files = ", ".join(shard["files"]) or f"no file of rank {shard['rank']}"
    if not shard["keys"]:
        return files
    left = shard["keys_total"] - len(shard["keys"])
    return f"{files} with {', '.join(shard['keys'])}" + (f" and {left} more keys" if left else "")


def _path(folder: Path, node: int) -> Path:
    return folder / f"shards-node-{node:04d}.json"
