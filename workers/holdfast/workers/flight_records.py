"""Name the rank that the others wait for, from the flight records in one or more folders.

    python -m holdfast.workers.flight_records DIRECTORY... [--prefix nccl-rank-] [--ranks N]

The agent does the same when it suspects a hang. This prints one JSON object with `missing`, the
ranks to blame, `finding`, a sentence, and `unread`, the records that could not be read. The exit
status is 1 if the records show no open collective, or if none could be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.node.flight import RankFlight
from holdfast.workers.agent.watch.collectives import find_missing
from holdfast.workers.checkpoints.trainer_call import ask_trainer


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.workers.flight_records", description=__doc__)
    parser.add_argument("directory", type=Path, nargs="+")
    parser.add_argument("--prefix", default="nccl-rank-")
    parser.add_argument("--ranks", type=int, help="how many ranks the job has")
    given = parser.parse_args(arguments)
    found = []
    for directory in given.directory:
        words = (str(directory.resolve()), "--prefix", given.prefix)
        try:
            answer = ask_trainer([sys.executable], "flight_records", *words)
        except HoldfastError as error:
            print(f"{directory}: {error}", file=sys.stderr)
            return 2
        found += [RankFlight.from_json(one) for one in answer["ranks"]]
    blame = find_missing(found, given.ranks)
    shown = {
        "missing": list(blame.ranks) if blame else [],
        "finding": blame.finding if blame else _nothing(found),
        "unread": {str(one.rank): one.problem for one in found if one.problem},
    }
    print(json.dumps(shown, indent=2))
    return 0 if blame else 1


def _nothing(found: Sequence[RankFlight]) -> str:
    """Return why no rank is blamed."""
    if not found:
        return "there is no flight record with this prefix; PyTorch's own is nccl_trace_rank_"
    if all(one.problem for one in found):
        return "no flight record could be read"
    return "the records show no open collective"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
