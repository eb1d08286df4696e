"""`python -m holdfast.flows.detached RUN_DIRECTORY`: the flow of one run, with no worker."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.contracts.paths import RunPaths
from holdfast.flows.start import flow_parameters


def main(arguments: list[str]) -> int:
    """Run the flow to its end; 0 when the run completed, 1 when it failed or was cancelled."""
    if len(arguments) != 1:
        print("usage: python -m holdfast.flows.detached RUN_DIRECTORY", file=sys.stderr)
        return 2
    from holdfast.flows.train import train

    state = train(**flow_parameters(RunPaths(Path(arguments[0]))), return_state=True)
    return 0 if state.is_completed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
