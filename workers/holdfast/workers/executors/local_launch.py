"""Start one local job in a new session, print its process and exit.

`python -m holdfast.workers.executors.local_launch <request.json>` must run in a new session, so
that a signal to the submitter's process group does not reach the job.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path

import submitit

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.attempt import Request, read_document
from holdfast.workers.agent.main import run_agent
from holdfast.workers.nodes.processes import name_process
from holdfast.workers.nodes.setup_lines import after_setup
from holdfast.workers.schedulers.local import problem_with_gpus, visible_gpus


def launch(request_path: Path) -> dict[str, object]:
    """Submit the agent with submitit's local executor; return the job's process name.

    Raises `NotFoundError` if there is no request at `request_path`, and `SpecError` if this machine
    cannot run it.
    """
    request = read_document(Request, request_path)
    if request is None:
        raise NotFoundError(
            f"{request_path}: no request here; the supervisor writes it before submission"
        )
    paths = AttemptPaths(request_path.parent)
    # This process runs under the spec's wrapper, and so does everything that it starts.
    setup = after_setup("launch.setup", request.launch.setup)
    python = shlex.join([*setup, request.launch.python or sys.executable])
    executor = submitit.LocalExecutor(folder=paths.logs, python=python)
    executor.update_parameters(**request.scheduler)
    executor.parameters.update(_gpus_of(request))
    job = executor.submit(run_agent, str(request_path))
    name = name_process(int(job.job_id))
    return {
        "job_id": job.job_id,
        "pid": int(job.job_id),
        "process_start_s": name.start_s if name else 0.0,
        "boot_id": name.boot_id if name else "",
        "host": socket.gethostname(),
    }


def _gpus_of(request: Request) -> dict[str, object]:
    """Return submitit's parameters for the job's GPUs: the first ones that are visible here.

    submitit itself takes the GPUs 0 to n-1, and accepts only indices. Raises `SpecError` if fewer
    GPUs are visible than the job needs.
    """
    environment = {**os.environ, **request.environment}
    if problem := problem_with_gpus(environment, request.gpus_per_node):
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
