"""The sections of a run spec, except `checkpoint` and `resources`."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, Strict, ValidationInfo, field_validator, model_validator

from holdfast.contracts.node.handshake import parse_ports
from holdfast.contracts.spec.part import SpecPart, is_recorded
from holdfast.contracts.spec.secrets import OnlyReference
from holdfast.contracts.spec.slurm_options import problem_with_setup
from holdfast.contracts.states import Cause

# `alerts` of a run spec: limits that people want to know about, and targets of notifications.

TARGETS_MAX = 16
Topic = Literal[
    "failed", "completed", "preempted", "hang", "node", "loss", "save", "limit", "decision"
]
TargetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class Alerts(SpecPart):
    """Notifications of a run: their targets, their topics, and limits."""

    targets: Annotated[dict[TargetName, OnlyReference], Field(max_length=TARGETS_MAX)] = Field(
        default_factory=dict,
        description="addresses for notifications, each a reference to a secret. The secret is an "
        "address of Apprise, such as `slack://…`, `mailtos://…` or `jsons://host/path`",
    )
    on: tuple[Topic, ...] = Field(
        default=("failed", "hang", "node", "loss", "save", "limit"),
        description="what notifications are sent for: the run's end as `failed` or `completed`, "
        "each preemption, a hang, a lost or unhealthy node, a bad loss, a failed save or damaged "
        "checkpoint, a limit of `alerts`, and each decision of the supervisor",
    )
    ettr_min: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="least productive share of the run's time, from its second hour on",
    )
    checkpoint_age_max_min: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="most minutes of training since the newest checkpoint"
    )
    gpu_hours_max: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="GPU hours that the run may use. The alert comes at 90 %"
    )


# `health` of a run spec: commands that every node runs to find out whether it can train.

CHECKS_MAX = 16
CHECK_S_MAX = 3600.0
Check = Annotated[str, Field(min_length=1, max_length=4096)]


Slowdown = Literal["report", "ask", "act", "off"]
GpuFaults = Literal["exclude", "report", "off"]


class Health(SpecPart):
    """Checks of the nodes. Exit status 0 means healthy."""

    before: Annotated[tuple[Check, ...], Field(max_length=CHECKS_MAX)] = Field(
        default=(),
        description="shell lines that every node runs once per attempt, before its first launch. "
        "If one fails, the node is unhealthy. Holdfast has the checks `ready`, `allreduce` and "
        "`nvrx`",
    )
    after: Annotated[tuple[Check, ...], Field(max_length=CHECKS_MAX)] = Field(
        default=(),
        description="the same, after a failure and before a restart in place",
    )
    timeout_s: Annotated[float, Field(gt=0, le=CHECK_S_MAX)] = Field(
        default=60.0, description="longest time that one check may take. A longer one has failed"
    )
    slowdown: Slowdown = Field(
        default="report",
        description="what to do if a node or a link slows the others down for two minutes. "
        "`report`: the journal and `show` name it. `ask`: a short test at a step boundary proves "
        "it, they also say how to drain the node, and a notification is sent. `act`: the run "
        "leaves a node that the test proved slow, at a step boundary, once the slowdown has cost "
        "as much as a restart and a spare node or a smaller size is faster. `off`: nodes are not "
        "compared",
    )
    gpus: GpuFaults = Field(
        default="exclude",
        description="what to do if a GPU reports a fault during training: a fatal Xid, a new "
        "uncorrectable memory error, a lost GPU or NVLink. `exclude`: a crash or hang counts as "
        "`node_failure`, and later attempts exclude the host. `report`: the journal and `show` "
        "name it. `off`: the counters are not compared",
    )
    throttled_s_max: Annotated[float, Field(ge=0, le=300)] = Field(
        default=0.0,
        description="later attempts exclude a host if heat lowered the clock of a GPU for so many "
        "of 300 seconds. 0: no limit",
    )
    link_errors_max: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="later attempts exclude a host if a GPU has so many new NVLink errors, or PCIe "
        "replays, within 300 seconds. 0: no limit",
    )


# `program` of a run spec: a program that writes its own checkpoints and resumes from them.

STEP_FIELD: Final = "{step}"
STEP_GROUP: Final = "step"
_PROGRESS_EXAMPLE: Final = r"'step (?P<step>\d+)'"

ProgramSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "none"]


class Program(SpecPart):
    """A program that writes its own checkpoints, without a `Session`, and resumes from them.

    Holdfast watches its checkpoints and records each complete one. It never changes them.
    """

    checkpoints: str = Field(
        default="",
        description="where the program writes its checkpoints: a path with `{step}` in its last "
        "part, such as `out/checkpoint-{step}`, or without it if each save overwrites the one "
        "before, such as `out/ckpt.pt`. A relative path starts at the working directory, and node "
        "0 must see it. Empty: the program uses a `Session`, or has no checkpoints",
    )
    complete: tuple[str, ...] = Field(
        default=(),
        description="files that a checkpoint's directory has only once it is complete, such as "
        '`["trainer_state.json"]`. Empty: it is complete when nothing in it changes any more',
    )
    settle_s: Annotated[float, Field(gt=0, le=86400)] = Field(
        default=5.0,
        description="seconds for which no file of a checkpoint may have changed before it counts "
        "as complete",
    )
    progress: str = Field(
        default="",
        description="regular expression with a group `step`, such as "
        r"`step (?P<step>\d+)`. Holdfast searches each line of rank 0's output for it. "
        "Empty: only checkpoints show progress",
    )
    signal: ProgramSignal = Field(
        default="SIGTERM",
        description="signal that tells the program to save and exit when the attempt must stop. "
        "`none`: it trains until the deadline, and is killed",
    )
    signal_to: Literal["main", "all"] = Field(
        default="main",
        description="processes that get the signal: `main` is each rank's own process, or that of "
        "the command without torchrun. `all` also includes the processes below them",
    )
    launcher: Literal["torchrun", "none"] = Field(
        default="torchrun",
        description="`none` runs `command` itself once on each node, as a command line without a "
        "shell. It finds the nodes in MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK",
    )

    @property
    def is_watched(self) -> bool:
        """True if the program writes the checkpoints and Holdfast watches them."""
        return bool(self.checkpoints)

    @property
    def is_overwritten(self) -> bool:
        """True if each save of the program overwrites the checkpoint before it."""
        return self.is_watched and STEP_FIELD not in self.checkpoints

    @field_validator("checkpoints")
    @classmethod
    def _checkpoints_have_a_step(cls, value: str) -> str:
        folder, _, last = value.rpartition("/")
        is_valid = (
            last.count(STEP_FIELD) <= 1 and STEP_FIELD not in folder and last not in {"", "."}
        )
        if value and (not is_valid or ".." in value.split("/")):
            raise ValueError(
                f"{value!r}: expected a path without `..`. Its last part has {STEP_FIELD} once, "
                "such as 'out/checkpoint-{step}', or not at all if the program overwrites it, such "
                "as 'out/ckpt.pt'"
            )
        return value

    @field_validator("complete")
    @classmethod
    def _complete_names_files_inside(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(
                    f"{name!r}: expected the name of a file inside a checkpoint's directory, such "
                    "as 'trainer_state.json'"
                )
        return value

    @field_validator("progress")
    @classmethod
    def _progress_has_a_step(cls, value: str) -> str:
        try:
            groups = re.compile(value).groupindex
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{value!r}: not a regular expression: {error}; expected one such as "
                f"{_PROGRESS_EXAMPLE}"
            ) from error
        if value and STEP_GROUP not in groups:
            raise ValueError(
                f"{value!r}: has no group named 'step'; mark the number of the step, as in "
                f"{_PROGRESS_EXAMPLE}"
            )
        return value

    @model_validator(mode="after")
    def _complete_proves_something(self) -> Program:
        if self.complete and self.is_overwritten:
            raise ValueError(
                f"program.complete proves nothing for {self.checkpoints!r}, because its files are "
                "still there while the program overwrites them; leave it out, or let the program "
                "write each checkpoint to a path with {step}"
            )
        return self


# `supervision` of a run spec: how Holdfast watches an attempt, and how often it relaunches.

_PLAIN_HTTP = re.compile(r"http://[^\s/:@]+(:[0-9]{1,5})?(/[^\s?#]*)?")

SilentPhase = Literal[
    "start", "rendezvous", "load", "compile", "train", "eval", "save", "stop", "done"
]


NumericsAction = Literal["stop", "skip", "rollback", "warn"]


class Numerics(SpecPart):
    """The action after a loss that is not finite, or is far above the losses before it."""

    on_nan: NumericsAction = Field(
        default="stop", description="action after a loss that is NaN or infinite"
    )
    on_spike: NumericsAction = Field(
        default="warn", description="action after a loss far above those before it"
    )
    metric: str = Field(default="loss", description="logged metric to watch")
    window: Annotated[int, Field(ge=8)] = Field(
        default=100, description="number of losses that a spike is compared with"
    )
    spike_mads: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        description="median absolute deviations above the median that count as a spike",
    )
    margin_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="least number of steps between the target of a rollback and the loss",
    )
    skip_steps: Annotated[int, Field(ge=1)] = Field(
        default=10,
        description="steps of data to skip: around the loss by a rollback, after it by a skip",
    )
    changes_max: Annotated[int, Field(ge=0)] = Field(
        default=5, description="most rollbacks and skips of a run, until an operator relaunches it"
    )


class Supervision(SpecPart):
    """How Holdfast watches an attempt, and how often it relaunches after each cause."""

    heartbeat_s: Annotated[float, Field(gt=0)] = Field(
        default=2.0, description="seconds between two heartbeats of a node"
    )
    poll_s: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="seconds between two checks by the supervisor"
    )
    grace_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="seconds between the signal of a preemption and the kill"
    )
    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        default="auto", description="cloud whose interruption notices the nodes listen for"
    )
    notices_url: str = Field(
        default="",
        description="address of the notices, as `http://host:port`. Empty: the cloud's own address",
    )
    flush_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=1800.0,
        description="longest time that a stop without a deadline may take, and that a save may "
        "take until it is durable",
    )
    join_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="longest time that node 0 and the other nodes of a job wait for each other",
    )
    pending_timeout_min: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="minutes that Slurm may keep a job pending, at the last of "
        "`resources.fallbacks`. Holdfast then takes it back and submits a smaller one, or pauses "
        "the run if `elastic` allows none. None: no limit",
    )
    ports: str = Field(
        default="any",
        pattern=r"^(any|[0-9]{1,5}-[0-9]{1,5})$",
        description="ports between nodes, for the agents and the torchrun store, as `40000-40063`",
    )
    restarts_in_place: Annotated[int, Field(ge=0)] = Field(
        default=3, description="restarts of torchrun inside one attempt"
    )
    standby_after_s: Annotated[float, Field(ge=0)] | Literal["off"] = Field(
        default=3.0,
        description="seconds of training after which the warm standby starts: a second torchrun "
        "that loads the ranks' libraries and waits for the next restart in place. "
        "`off` starts none",
    )
    hangs: bool = Field(
        default=True, description="examine silent ranks, and end and restart those that hang"
    )
    silence_s: dict[SilentPhase, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="seconds of silence in a phase before Holdfast ends anything, as `{ train = "
        "60, eval = 900 }`. Empty: the limits of each phase",
    )
    numerics: Numerics = Numerics()
    budgets: dict[Annotated[Cause, Strict(False)], Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="relaunches allowed per cause, as `{ hang = 2 }`. Empty: the default budgets",
    )
    backoff_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="seconds before the first relaunch after a failure. Each further failure of "
        "the same cause doubles the delay, up to ten minutes. Preemptions, time limits "
        "and the first loss of a node have no back-off",
    )
    allow_early_exit: bool = Field(
        default=False,
        description="accept a program that exits with status 0 before its last step as completed. "
        "`holdfast submit --allow-early-exit` sets it",
    )
    attempts_max: Annotated[int, Field(ge=1)] = Field(
        default=1000,
        description="most attempts of one run, also moves to a fallback and growth. An operator's "
        "relaunch may exceed it",
    )

    @field_validator("notices_url")
    @classmethod
    def _notices_url_is_plain_http(cls, value: str) -> str:
        if value and not _PLAIN_HTTP.fullmatch(value):
            raise ValueError(f"{value!r}: expected an HTTP address such as http://169.254.169.254")
        return value

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str) -> str:
        ports = parse_ports(value)
        if ports is not None and not 1 <= ports.start < ports.stop <= 65536:
            raise ValueError(f"ports {value!r}: expected FIRST-LAST between 1 and 65535")
        return value

    @property
    def port_range(self) -> range | None:
        """The ports that nodes may use to reach each other; None for any."""
        return parse_ports(self.ports)


# `launch`, `elastic`, `cost` and `blocks` of a run spec.

# The torchrun options that a spec must not contain, because Holdfast sets them itself.

_OPTION: Final = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_SIZE: Final = "set resources.nodes and resources.gpus_per_node"
_MEETING: Final = "leave it out: node 0's agent chooses where the ranks meet at each launch"
_PROGRAM: Final = "set command"
_LOGS: Final = "leave it out: Holdfast writes the output to the run's folder, see holdfast logs"
_ENDINGS: Final = "leave it out: the agent restarts and ends the ranks"
REFUSED: Final = {
    "nnodes": _SIZE,
    "nproc-per-node": "set resources.nproc_per_node",
    "node-rank": _SIZE,
    "rdzv-backend": _MEETING,
    "rdzv-endpoint": _MEETING,
    "rdzv-id": _MEETING,
    "rdzv-conf": _MEETING,
    "standalone": _MEETING,
    "local-addr": _MEETING,
    "master-addr": _MEETING,
    "master-port": _MEETING,
    "max-restarts": _ENDINGS,
    "monitor-interval": _ENDINGS,
    "signals-to-handle": _ENDINGS,
    "shutdown-timeout": _ENDINGS,
    "log-dir": _LOGS,
    "redirects": _LOGS,
    "tee": _LOGS,
    "local-ranks-filter": _LOGS,
    "module": _PROGRAM,
    "no-python": _PROGRAM,
    "run-path": _PROGRAM,
}


def problem_with_torchrun(option: str) -> str:
    """Return why `launch.torchrun` must not contain `option`; empty if it may.

    torchrun accepts underscores for hyphens and unique beginnings of names.
    """
    # Only underscores in the option's name are replaced, not those in its value, such as a path.
    found = _OPTION.fullmatch(option.replace("_", "-", option.partition("=")[0].count("_")))
    if found is None:
        return f"option {option!r}: expected one option with its value, as in --numa-binding=node"
    # argparse accepts unique beginnings, so `--nno` would reach torchrun as `--nnodes`.
    refused = next((name for name in REFUSED if name.startswith(found[1])), None)
    return "" if refused is None else f"option {option!r} is not for torchrun: {REFUSED[refused]}"


class Launch(SpecPart):
    """How a node starts the program."""

    python: str = Field(
        default="",
        description="Python interpreter of the job's environment: a name on `PATH`, or a path. A "
        "relative path starts at the working directory, and is refused in a container. Empty: "
        "that of the agent",
    )
    setup: tuple[str, ...] = Field(
        default=(),
        description="lines of bash to run before the program, such as `module load cuda`. If one "
        "fails, the launch fails. A line that may fail ends with `|| true`",
    )
    container: tuple[str, ...] = Field(
        default=(),
        description="srun arguments that select a container, such as `--container-image`",
    )
    srun: tuple[str, ...] = Field(
        default=(),
        description="further srun arguments. Options for heterogeneous jobs (`--het-group`) are "
        "refused",
    )
    node_setup: tuple[str, ...] = Field(
        default=(),
        description="lines of bash that every node runs before the program, inside a container, "
        "such as `ulimit -l unlimited`. If one fails, the launch fails",
    )
    wrapper: tuple[str, ...] = Field(
        default=(),
        description='command that starts the job on each node, such as `["numactl", '
        '"--interleave=all"]` or `["apptainer", "exec", "--nv", "/shared/image.sif"]`. `python` '
        "and its arguments follow. The command's own path may start at the working directory. "
        "Those in its arguments must be absolute",
    )
    network_interface: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}$")] | None
    ) = Field(
        default=None,
        description="network interface of each node for the traffic between nodes, such as "
        "`ib0`. Agents and ranks meet at its addresses, and NCCL and gloo use it. None: the "
        "address of the host name, and the choice of NCCL and gloo",
    )
    torchrun: tuple[str, ...] = Field(
        default=(),
        description="further torchrun options, such as `--numa-binding=node`. Options that "
        "Holdfast sets itself are refused",
    )
    export: Literal["all", "none"] = Field(
        default="all",
        description="environment that a Slurm job starts with. `all` is that of the submitter, "
        "`none` is a new login's",
    )
    working_directory: str = Field(
        default=".",
        description="working directory of the program, relative to the folder of the spec",
    )
    code: Literal["in_place", "snapshot"] = Field(
        default="in_place",
        description="`in_place` runs the code where it is. `snapshot` copies the working "
        "directory into the run, at most 512 MiB, and runs the copy. It copies the files that git "
        "tracks or does not ignore, with those of submodules, or all files except caches where "
        "there is no git",
    )

    @field_validator("container", "srun")
    @classmethod
    def _one_component(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # Recorded specs are passed over: a rule that became stricter must not end a live run, see
        # decision 44.
        several = [option for option in value if option.startswith(("--het-group", "--pack-group"))]
        if several and not is_recorded(info):
            raise ValueError(
                f"{several[0]!r}: Holdfast does not start heterogeneous jobs; leave the option out"
            )
        return value

    @field_validator("setup")
    @classmethod
    def _setup_has_no_options(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        problem = problem_with_setup(value)
        if problem and not is_recorded(info):
            raise ValueError(problem)
        return value

    @field_validator("torchrun")
    @classmethod
    def _torchrun_options_are_not_holdfasts(
        cls, value: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        problems = [problem for option in value if (problem := problem_with_torchrun(option))]
        if problems and not is_recorded(info):
            raise ValueError("; ".join(problems))
        return value


class Elastic(SpecPart):
    """The GPU counts that a relaunch may use."""

    min_gpus: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="fewest GPUs that a relaunch may use. None: the smallest count in the spec",
    )
    max_gpus: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="most GPUs that a relaunch may use. None: the largest count in the spec",
    )
    choices: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(),
        description="allowed counts. Empty: every count from `min_gpus` to `max_gpus` that is "
        "at most `gpus_per_node` or a multiple of it",
    )
    on_preemption: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(), description="counts after the 1st, 2nd, … preemption. The last one repeats"
    )
    grow: bool = Field(
        default=False,
        description="if more GPUs become free while an attempt runs, save, stop and relaunch "
        "with them. Only Slurm reports free GPUs",
    )
    grow_after_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0,
        description="seconds for which the GPUs must have been free, and for which the attempt "
        "must have run. It doubles each time a grown attempt is preempted, up to 32 "
        "times the value",
    )


class Cost(SpecPart):
    """Prices of GPU time."""

    gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price that you pay for one GPU hour"
    )
    on_demand_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="price of one GPU hour that is never preempted, for comparison"
    )
    currency: str = Field(default="USD", description="currency of both prices")


class Blocks(SpecPart):
    """Blocks of Prefect, by name. Their values are the defaults of the spec's other parts."""

    cluster: str | None = Field(
        default=None,
        description="block of the type `holdfast-cluster`, with defaults of `resources` and "
        "`launch.setup`",
    )
    storage: str | None = Field(
        default=None,
        description="block of the type `holdfast-storage`, with the folder of the runs and "
        "defaults of `checkpoint.directory` and `checkpoint.mirror`",
    )
