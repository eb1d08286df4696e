"""Start one local job in a new session, print its process and exit.

`python -m holdfast.workers.executors.local_launch <request.json>` must run in a new session, so
that a signal to the submitter's process group does not reach the job. The first step waits for this
process, so it imports no pydantic.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import submitit

from holdfast.contracts.disk.paths import AttemptPaths, folder_of
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import NotFoundError, SpecError, reading_run
from holdfast.workers.nodes import processes, setup_lines
from holdfast.workers.nodes.visible_gpus import problem_with_gpus, visible_gpus

AGENT: Final = "holdfast.workers.agent.main"


class _AgentExecutor(submitit.LocalExecutor):
    """submitit's local executor, whose jobs start the agent directly.

    submitit's own start imports submitit and numpy first, which takes as long as the agent.
    """

    request: Path

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m {AGENT} {shlex.quote(str(self.request))}"


def launch(request_path: Path) -> dict[str, object]:
    """Submit the agent with submitit's local executor; return the job's process name.

    Raises `NotFoundError` if there is no request at `request_path`, `UnreadableRunError` if it is
    damaged, and `SpecError` if this machine cannot run it.
    """
    paths = AttemptPaths(request_path.parent)
    # The agent validates the request.
    with reading_run(request_path):
        request: dict[str, Any] = json.loads(_content(request_path))
        # This process runs under the spec's wrapper, and so does everything that it starts.
        setup = setup_lines.after_setup("launch.setup", request["launch"].get("setup", ()))
        python = shlex.join([*setup, request["launch"].get("python") or sys.executable])
        scheduler, gpus = dict(request["scheduler"]), _gpus_of(request)
    executor = _AgentExecutor(folder=paths.logs, python=python)
    executor.request = request_path
    executor.update_parameters(**scheduler)
    executor.parameters.update(gpus)
    # submitit pickles a call, which nothing reads: the job's command starts the agent.
    job = executor.submit(str, str(request_path))
    name = processes.name_process(int(job.job_id))
    return {
        "job_id": job.job_id,
        "pid": int(job.job_id),
        "process_start_s": name.start_s if name else 0.0,
        "boot_id": name.boot_id if name else "",
        "host": socket.gethostname(),
    }


def _content(path: Path) -> bytes:
    try:
        return read_bounded(path, below=folder_of(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(
            f"{path}: no request here; the supervisor writes it before submission"
        ) from None


def _gpus_of(request: Mapping[str, Any]) -> dict[str, object]:
    """Return submitit's parameters for the job's GPUs: the first ones that are visible here.

    submitit itself takes the GPUs 0 to n-1, and accepts only indices. Raises `SpecError` if fewer
    GPUs are visible than the job needs.
    """
    environment = {**os.environ, **request["environment"]}
    if problem := problem_with_gpus(environment, request["gpus_per_node"]):
        raise SpecError(problem)
    visible = visible_gpus(environment)
    if visible is None:
        return {}
    return {"visible_gpus": visible} if visible else {"gpus_per_node": 0}


def main(request_path: Path) -> None:
    """Launch the job and print the answer, on a pipe that the job itself must not inherit.

    The reader of the answer waits for the end of the pipe, so a job that held it would block the
    reader.
    """
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, (json.dumps(launch(request_path)) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
