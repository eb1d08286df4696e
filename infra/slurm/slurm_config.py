"""What a one-machine cluster looks like: its spec, its file names, its configuration texts.

Everything here is pure: nothing is read, written or started. This is the only module that
spells an on-disk name.
"""

import re
from dataclasses import dataclass
from pathlib import Path

# A unix socket's path holds 107 bytes, and slurmstepd appends up to 33 of its own
# ("/spool.n16/n16_4294967295.4294967295") to the directory.
DIRECTORY_LENGTH_MAX = 70
NODES_MAX = 16
GPUS_PER_NODE_MAX = 16
SLURM_SAFE_PATH = re.compile(r"/[A-Za-z0-9_./+-]*")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What is wanted of a cluster. Raises ValueError on values that Slurm cannot run with.

    `kill_wait_s` is the time between TERM and KILL for a cancelled or timed out job;
    `grace_time_s` the notice that a preempted job of partition `spot` gets;
    `slurmd_timeout_s` the silence after which a node counts as down.
    `send_user_signal` makes a preemption send the job's own `--signal` instead of TERM.
    """

    nodes: int = 4
    gpus_per_node: int = 4
    cpus_per_node: int = 16
    memory_per_node_mb: int = 64_000
    kill_wait_s: int = 30
    grace_time_s: int = 30
    slurmd_timeout_s: int = 15
    send_user_signal: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("nodes", 1, NODES_MAX),
            ("gpus_per_node", 0, GPUS_PER_NODE_MAX),
            ("cpus_per_node", 1, 256),
            ("memory_per_node_mb", 1, 2**30),
            ("kill_wait_s", 1, 3600),
            ("grace_time_s", 0, 3600),
            ("slurmd_timeout_s", 5, 3600),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; give a number from {low} to {high}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names: n1, n2, ..."""
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))


@dataclass(frozen=True, kw_only=True)
class ClusterAddress:
    """Where the daemons of a cluster listen: this host's short name and free TCP ports."""

    hostname: str
    ctld_port: int
    dbd_port: int
    slurmd_ports: tuple[int, ...]


@dataclass(frozen=True)
class ClusterPaths:
    """Every file and folder of a cluster, all directly below `directory`.

    Raises ValueError for a directory that Slurm's configuration or a socket cannot name.
    """

    directory: Path

    def __post_init__(self) -> None:
        text = str(self.directory)
        if not SLURM_SAFE_PATH.fullmatch(text):
            raise ValueError(
                f"{text!r} cannot stand in slurm.conf; give an absolute path of letters, "
                "digits and any of _ . / + -"
            )
        if len(text) > DIRECTORY_LENGTH_MAX:
            raise ValueError(
                f"{text!r} has {len(text)} characters, too many for the sockets below it; "
                f"give a path of at most {DIRECTORY_LENGTH_MAX}"
            )

    @property
    def state(self) -> Path:
        """The record of what was started; its existence marks the directory as in use."""
        return self.directory / "cluster.json"

    @property
    def slurm_conf(self) -> Path:
        """Main configuration; the others must lie beside it."""
        return self.directory / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        """Configuration of the accounting daemon."""
        return self.directory / "slurmdbd.conf"

    @property
    def gres_conf(self) -> Path:
        """Which device files are which node's GPUs."""
        return self.directory / "gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Configuration that keeps Slurm off the machine's cgroups."""
        return self.directory / "cgroup.conf"

    @property
    def munge_key(self) -> Path:
        """This cluster's own munge key."""
        return self.directory / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Socket of this cluster's own munged."""
        return self.directory / "munge.sock"

    @property
    def munge_seed(self) -> Path:
        """Random seed that munged keeps between its runs."""
        return self.directory / "munge.seed"

    @property
    def database(self) -> Path:
        """Data directory of this cluster's own MariaDB."""
        return self.directory / "mariadb"

    @property
    def database_scratch(self) -> Path:
        """Where its MariaDB keeps what it needs for a moment."""
        return self.directory / "mariadb-tmp"

    @property
    def database_socket(self) -> Path:
        """Socket of this cluster's own MariaDB, which listens on nothing else."""
        return self.directory / "mariadb.sock"

    @property
    def devices(self) -> Path:
        """Folder of the fake GPUs."""
        return self.directory / "dev"

    @property
    def logs(self) -> Path:
        """Folder of one log per daemon."""
        return self.directory / "log"

    @property
    def run(self) -> Path:
        """Folder of the daemons' pid files."""
        return self.directory / "run"

    @property
    def ctld_state(self) -> Path:
        """slurmctld's saved state."""
        return self.directory / "ctld"

    def spool(self, node: str) -> Path:
        """slurmd's spool of one node; slurm.conf spells it with %n as the node."""
        return self.directory / f"spool.{node}"

    def gpu(self, index: int) -> Path:
        """Device file of a fake GPU; its number becomes CUDA_VISIBLE_DEVICES."""
        return self.devices / f"nvidia{index}"

    def log(self, daemon: str) -> Path:
        """The log a daemon writes, with times; its name is that in `cluster.json`."""
        return self.logs / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """Standard output and error of a daemon: all that it logs, from its first moment on."""
        return self.logs / f"{daemon}.out"

    def pid_file(self, daemon: str) -> Path:
        """The pid file a daemon writes; we go by our own record instead."""
        return self.run / f"{daemon}.pid"

    def owned(self, node_names: tuple[str, ...]) -> tuple[Path, ...]:
        """Everything that a cluster puts into its directory, `state` last."""
        munge_files = (
            self.munge_key,
            self.munge_socket,
            self.munge_socket.with_name(self.munge_socket.name + ".lock"),
            self.munge_seed,
        )
        configs = (self.slurm_conf, self.slurmdbd_conf, self.gres_conf, self.cgroup_conf)
        folders = (
            self.database,
            self.database_scratch,
            self.devices,
            self.logs,
            self.run,
            self.ctld_state,
        )
        spools = tuple(self.spool(node) for node in node_names)
        return (*munge_files, *configs, self.database_socket, *folders, *spools, self.state)


def render_slurm_conf(spec: ClusterSpec, paths: ClusterPaths, address: ClusterAddress) -> str:
    """Text of slurm.conf. Times in it are seconds."""
    spot = "PriorityTier=1 PreemptMode=REQUEUE"
    lines = [
        "ClusterName=holdfast",
        f"SlurmctldHost={address.hostname}(127.0.0.1)",
        f"SlurmctldPort={address.ctld_port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={paths.munge_socket}",
        "CredType=cred/munge",
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        f"StateSaveLocation={paths.ctld_state}",
        f"SlurmdSpoolDir={paths.spool('%n')}",
        f"SlurmctldPidFile={paths.pid_file('slurmctld')}",
        f"SlurmdPidFile={paths.pid_file('slurmd.%n')}",
        f"SlurmctldLogFile={paths.log('slurmctld')}",
        f"SlurmdLogFile={paths.log('slurmd.%n')}",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        "LogTimeFormat=iso8601_ms",
        "",
        *_behaviour_lines(spec),
        "",
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={address.dbd_port}",
        # For slurmdbd the munge socket goes where a password would; AuthInfo is not looked at.
        f"AccountingStoragePass={paths.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
        "JobAcctGatherType=jobacct_gather/none",
        "",
        *_node_lines(spec, address),
        "",
        f"PartitionName=spot Nodes=ALL Default=YES State=UP {spot} GraceTime={spec.grace_time_s}",
        "PartitionName=prod Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def _behaviour_lines(spec: ClusterSpec) -> list[str]:
    """How jobs are tracked, scheduled, preempted and ended."""
    lines = [
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        # Lets nodes claim more CPUs and memory than this machine has.
        "SlurmdParameters=config_overrides",
        # A node that comes back from the dead is used again without an administrator.
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        f"KillWait={spec.kill_wait_s}",
        # Slurm drains a node whose processes outlive KILL by this; it must exceed KillWait.
        f"UnkillableStepTimeout={max(60, 2 * spec.kill_wait_s)}",
        "OverTimeLimit=0",
        "InactiveLimit=0",
        "CompleteWait=0",
        "MinJobAge=3600",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
    ]
    if spec.send_user_signal:
        # 22.05's name; from 23.02 on it is PreemptParameters=send_user_signal.
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    return lines


def _node_lines(spec: ClusterSpec, address: ClusterAddress) -> list[str]:
    """One NodeName line per slurmd; every node is this host under another port."""
    gres = f" Gres=gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    lines = ["GresTypes=gpu"]
    for name, port in zip(spec.node_names, address.slurmd_ports, strict=True):
        lines.append(
            f"NodeName={name} NodeHostname={address.hostname} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={spec.cpus_per_node} RealMemory={spec.memory_per_node_mb}{gres}"
            " State=UNKNOWN"
        )
    return lines


def render_slurmdbd_conf(paths: ClusterPaths, address: ClusterAddress) -> str:
    """Text of slurmdbd.conf. Its storage socket comes from MYSQL_UNIX_PORT in the environment."""
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={paths.munge_socket}",
        f"DbdHost={address.hostname}",
        "DbdAddr=127.0.0.1",
        f"DbdPort={address.dbd_port}",
        "SlurmUser=root",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_acct",
        f"LogFile={paths.log('slurmdbd')}",
        f"PidFile={paths.pid_file('slurmdbd')}",
        "DebugLevel=verbose",
    ]
    return "\n".join(lines) + "\n"


def render_gres_conf(spec: ClusterSpec, paths: ClusterPaths) -> str:
    """Text of gres.conf: all nodes share the fake device files, which nobody opens."""
    if not spec.gpus_per_node:
        return ""
    last = spec.gpus_per_node - 1
    return f"NodeName=n[1-{spec.nodes}] Name=gpu File={paths.devices}/nvidia[0-{last}]\n"


def render_cgroup_conf() -> str:
    """Text of cgroup.conf: Slurm mounts nothing and talks to no systemd.

    22.05 knows no `disabled` plugin; with linuxproc tracking the v1 plugin touches nothing.
    """
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nIgnoreSystemd=yes\n"
