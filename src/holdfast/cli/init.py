"""`holdfast init|schema`: the files of a project of one's own, for this cluster or machine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast.cli.shared.output import AsJson, answer, echo, say, to_json_text
from holdfast.contracts.disk import durable, paths
from holdfast.contracts.errors import NotFoundError, OutputExistsError, SchedulerError, SpecError
from holdfast.contracts.spec.schema import run_spec_schema

SPEC: Final = "run.toml"
# Relative to the spec, so that it is true wherever the folder is copied to.
SCHEMA: Final = "run.schema.json"
PROGRAM: Final = "train.py"
DEPLOYMENTS: Final = "prefect.yaml"
TIME_LIMIT_MIN: Final = 1440
_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_-]+")

SPEC_TEXT: Final = """\
#:schema ./{schema}
# The spec of a run. `holdfast submit {spec}` starts it. The documentation lists all keys.
name = "{name}"
command = ["{program}"]             # the program and its arguments, for torchrun

[resources]
{resources}
[elastic]
min_gpus = {least}                         # a relaunch may use fewer, down to this many

[checkpoint]
interval = "10m"
keep = {{ last = 3 }}
"""
SLURM_TEXT: Final = """\
executor = "slurm"
partition = "{partition}"           # here: {others}
nodes = 1
{size}
time_limit_min = {minutes}              # the run continues in the next job
# account = "…"
# cpus_per_gpu = 8                     # if `holdfast submit` warns of too few
# memory_gb_per_node = 64
"""
LOCAL_TEXT: Final = """\
executor = "local"                     # this machine
{size}
"""
PROGRAM_TEXT: Final = '''\
"""A training program. torchrun starts it on every rank; replace model and data by your own."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.trainer import Session

STEPS, SAMPLES, GLOBAL_BATCH = 2000, 4096, 32

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")

torch.manual_seed(0)
inputs = torch.randn(SAMPLES, 16).to(device)
targets = inputs @ torch.randn(16, 1).to(device)
model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

session = Session(model, optimizer)  # resumes here, if there is a checkpoint
for step in session.steps(STEPS):
    ids = session.batch(SAMPLES, GLOBAL_BATCH)  # this rank's samples of the step
    loss = torch.nn.functional.mse_loss(model(inputs[ids]), targets[ids])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    session.log(loss=loss.item())
session.close()  # waits for the last checkpoint
dist.destroy_process_group()
'''
DEPLOYMENTS_TEXT: Final = """\
# For a Prefect server: `holdfast deploy` creates the work pool, `prefect deploy --all` creates this
# deployment, and `prefect deployment run train/{name}` starts the run.
name: {name}
deployments:
  - name: {name}
    description: The training run {name}
    entrypoint: holdfast.flows.train.train
    parameters:
      spec: {spec}
      root: {root}
    # The automations of `holdfast deploy --automations` are for flow runs with this tag.
    tags: [holdfast]
    work_pool:
      name: holdfast
      job_variables:
        env: {{PREFECT_FLOWS_HEARTBEAT_FREQUENCY: "30"}}
"""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder for the files.")
    ] = Path(),
    name: Annotated[
        str | None, typer.Option(help="The run's name. Default: the folder's name.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="The Slurm partition. Default: the cluster's default.")
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(help="slurm or local. Default: slurm if this host has its commands."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a spec, its schema, a program and a prefect.yaml. No file is overwritten.

    An editor with support for TOML completes and checks the keys of the spec by the schema.
    """
    place = folder.expanduser().absolute()
    chosen = _UNUSUAL.sub("-", place.name).strip("-_") if name is None else name
    if not paths.SPEC_NAME.fullmatch(chosen):
        raise SpecError(f"--name {chosen!r}: expected letters, digits, '-' and '_'")
    files = {
        SPEC: _spec_text(chosen, executor, partition),
        SCHEMA: f"{json.dumps(run_spec_schema(), indent=1)}\n",
        PROGRAM: PROGRAM_TEXT,
        DEPLOYMENTS: DEPLOYMENTS_TEXT.format(
            name=chosen,
            spec=json.dumps(str(place / SPEC)),
            root=json.dumps(str(paths.default_root())),
        ),
    }
    if there := [each for each in files if (place / each).exists()]:
        raise OutputExistsError(
            f"{place}: {' and '.join(there)} exist already and are not overwritten; give another "
            "folder"
        )
    place.mkdir(parents=True, exist_ok=True)
    for each, text in files.items():
        durable.create_bytes(place / each, text.encode())
    facts = {"name": chosen, "folder": str(place), "files": list(files)}
    answer(facts, as_json, _render)


def _spec_text(name: str, executor: str | None, partition: str | None) -> str:
    """Return a spec for the cluster of this host, or for this machine."""
    kind = executor
    if kind is None:
        kind = "slurm" if shutil.which("sbatch") else "local"
    if kind not in {"slurm", "local"}:
        raise SpecError(f"--executor {executor!r}: expected slurm or local")
    if kind == "local":
        if partition is not None:
            raise SpecError(
                f"--partition {partition}: the local executor has none; leave it out, or call this "
                "on a login node of the cluster"
            )
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        resources = LOCAL_TEXT.format(size=_size_text(gpus))
    else:
        resources, gpus = _slurm_text(partition)
    least = max(1, (gpus or 2) // 2)
    return SPEC_TEXT.format(
        name=name, program=PROGRAM, spec=SPEC, schema=SCHEMA, resources=resources, least=least
    )


def _slurm_text(partition: str | None) -> tuple[str, int]:
    """Return the resources for a partition, and the GPUs of its nodes. Raises `NotFoundError`."""
    from holdfast.workers.schedulers.slurm_defaults import ask_partitions, choose_partition

    try:
        known = ask_partitions()
    except SchedulerError as error:
        raise type(error)(f"{error}; for runs on this machine, give --executor local") from error
    named = [one for one in known if one.name == partition]
    found = choose_partition(known if partition is None else named)
    listed = ", ".join(map(str, known))
    if not known:
        raise NotFoundError("the cluster has no partitions; give --executor local")
    if found is None:
        raise NotFoundError(f"--partition {partition}: no such partition; there are {listed}")
    limit = found.minutes_max
    minutes = TIME_LIMIT_MIN if limit is None else min(TIME_LIMIT_MIN, int(limit))
    text = SLURM_TEXT.format(
        partition=found.name, others=listed, size=_size_text(found.gpus), minutes=minutes
    )
    return text, found.gpus


def _size_text(gpus: int) -> str:
    if gpus:
        return f"gpus_per_node = {gpus}                    # with one rank each"
    return "gpus_per_node = 0\nnproc_per_node = 2                     # ranks, on the CPU"


def _render(facts: dict[str, Any]) -> None:
    say(f"wrote {', '.join(facts['files'])} to {facts['folder']}")
    say(f"read {SPEC}, then: cd {shlex.quote(facts['folder'])} && holdfast submit {SPEC}")


def schema() -> None:
    """Print the JSON Schema of a run spec, with which an editor completes and checks its keys.

    `holdfast init` writes it beside the spec. After an upgrade, write it again.
    """
    echo(to_json_text(run_spec_schema(), 1))
