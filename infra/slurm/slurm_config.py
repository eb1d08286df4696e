"""The spec, file names and configuration files of a one-machine cluster.

All functions are pure: they read, write and start nothing. This is the only module with names of
files on disk.
"""

import re
from dataclasses import dataclass
from pathlib import Path

# The path of a Unix socket has at most 107 bytes, and slurmstepd appends up to 33 of its own
# ("/spool.n16/n16_4294967295.4294967295") to the directory.
DIRECTORY_LENGTH_MAX = 70
NODES_MAX = 16
GPUS_PER_NODE_MAX = 16
SLURM_SAFE_PATH = re.compile(r"/[A-Za-z0-9_./+-]*")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The description of a cluster. Raises ValueError for values that Slurm cannot use.

    `kill_wait_s` is the time between TERM and KILL for a cancelled or timed out job.
    `grace_time_s` is the time that a preempted job of partition `spot` gets.
    `slurmd_timeout_s` is the silence after which a node counts as down.
    With `send_user_signal`, a preemption sends the job's own `--signal` instead of TERM.
    With `expedite`, jobs may ask for an expedited requeue (Slurm 25.11 and later).
    Without `accounting`, there is no slurmdbd, and the cluster keeps no records of ended jobs.
    """

    nodes: int = 4
    gpus_per_node: int = 4
    cpus_per_node: int = 16
    memory_per_node_mb: int = 64_000
    kill_wait_s: int = 30
    grace_time_s: int = 30
    slurmd_timeout_s: int = 15
    send_user_signal: bool = False
    expedite: bool = False
    accounting: bool = True
    name: str = "holdfast"

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
    """The addresses of a cluster's daemons: this host's short name and free TCP ports."""

    hostname: str
    ctld_port: int
    dbd_port: int
    slurmd_ports: tuple[int, ...]


@dataclass(frozen=True)
class ClusterPaths:
    """Every file and folder of a cluster, all directly in `directory`.

    Raises ValueError for a path that is invalid in Slurm's configuration or too long for sockets.
    """

    directory: Path

    def __post_init__(self) -> None:
        text = str(self.directory)
        if not SLURM_SAFE_PATH.fullmatch(text):
            raise ValueError(
                f"{text!r} is not valid in slurm.conf; give an absolute path of letters, "
                "digits and any of _ . / + -"
            )
        if len(text) > DIRECTORY_LENGTH_MAX:
            raise ValueError(
                f"{text!r} has {len(text)} characters, too many for the sockets in it; "
                f"give a path of at most {DIRECTORY_LENGTH_MAX} characters"
            )

    @property
    def state(self) -> Path:
        """The record of the started processes. Its existence marks the directory as in use."""
        return self.directory / "cluster.json"

    @property
    def slurm_conf(self) -> Path:
        """Main configuration. The other configuration files must be beside it."""
        return self.directory / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        """Configuration of the accounting daemon."""
        return self.directory / "slurmdbd.conf"

    @property
    def gres_conf(self) -> Path:
        """Configuration of the device files that are the nodes' GPUs."""
        return self.directory / "gres.conf"

    @property
    def cgroup_conf(self) -> Path:
        """Configuration by which Slurm does not touch the machine's cgroups."""
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
        """Folder of MariaDB's temporary files."""
        return self.directory / "mariadb-tmp"

    @property
    def database_socket(self) -> Path:
        """The only socket of this cluster's own MariaDB."""
        return self.directory / "mariadb.sock"

    @property
    def devices(self) -> Path:
        """Folder of the fake GPUs."""
        return self.directory / "dev"

    @property
    def logs(self) -> Path:
        """Folder of the daemons' logs."""
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
        """Return the spool of a node's slurmd. In slurm.conf, %n stands for the node."""
        return self.directory / f"spool.{node}"

    def gpu(self, index: int) -> Path:
        """Return the device file of a fake GPU. Its number is used in CUDA_VISIBLE_DEVICES."""
        return self.devices / f"nvidia{index}"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon, with times. `daemon` is its name in `cluster.json`."""
        return self.logs / f"{daemon}.log"

    def output(self, daemon: str) -> Path:
        """Return the file of a daemon's standard output and error, from its start."""
        return self.logs / f"{daemon}.out"

    def pid_file(self, daemon: str) -> Path:
        """Return the pid file that a daemon writes. This code uses its own record instead."""
        return self.run / f"{daemon}.pid"

    def owned(self, node_names: tuple[str, ...]) -> tuple[Path, ...]:
        """Return all paths that a cluster creates in its directory, `state` last."""
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


def parse_version(text: str) -> tuple[int, int]:
    """Return a Slurm version such as `slurm-wlm 22.05.8` as (22, 5). Raises ValueError."""
    found = re.search(r"\b(\d\d)\.(\d\d)\b", text)
    if found is None:
        raise ValueError(f"{text!r} names no version of Slurm; expected text as 'slurm 22.05.8'")
    return int(found[1]), int(found[2])


def render_slurm_conf(
    spec: ClusterSpec, paths: ClusterPaths, address: ClusterAddress, version: tuple[int, int]
) -> str:
    """Return the text of slurm.conf for a version of Slurm. Its times are in seconds."""
    spot = "PriorityTier=1 PreemptMode=REQUEUE"
    lines = [
        f"ClusterName={spec.name}",
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
        *_behaviour_lines(spec, version),
        "",
        *(_accounting_lines(paths, address) if spec.accounting else ()),
        "JobAcctGatherType=jobacct_gather/none",
        "",
        *_node_lines(spec, address),
        "",
        f"PartitionName=spot Nodes=ALL Default=YES State=UP {spot} GraceTime={spec.grace_time_s}",
        "PartitionName=prod Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def with_lines(text: str, lines: tuple[str, ...]) -> str:
    """Return slurm.conf with `lines`, such as `PreemptType=preempt/qos`.

    A line replaces the lines with the same key. Lines of partitions are added. Slurm would accept
    a key twice, but each of its commands would complain.
    """
    keys = {line.partition("=")[0] for line in lines} - {"PartitionName"}
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in keys]
    return "\n".join([*kept, *lines]) + "\n"


def _behaviour_lines(spec: ClusterSpec, version: tuple[int, int]) -> list[str]:
    """Return the lines on how jobs are tracked, scheduled, preempted and ended."""
    lines = [
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        # Nodes may have more CPUs and memory than this machine.
        "SlurmdParameters=config_overrides",
        # A node that returns after a loss is used again without an administrator.
        "ReturnToService=2",
        f"SlurmdTimeout={spec.slurmd_timeout_s}",
        f"KillWait={spec.kill_wait_s}",
        # Slurm drains a node whose processes survive KILL for this long. It must exceed KillWait.
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
        is_renamed = version >= (23, 2)
        lines.append(
            "PreemptParameters=send_user_signal"
            if is_renamed
            else "SlurmctldParameters=preempt_send_user_signal"
        )
    if spec.expedite and version >= (25, 11):
        lines.append("SlurmctldParameters=enable_expedited_requeue")
    return lines


def _accounting_lines(paths: ClusterPaths, address: ClusterAddress) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={address.dbd_port}",
        # For slurmdbd, the munge socket replaces the password. AuthInfo has no effect.
        f"AccountingStoragePass={paths.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
    ]


def _node_lines(spec: ClusterSpec, address: ClusterAddress) -> list[str]:
    """Return one NodeName line per slurmd. Every node is this host on another port."""
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
    """Return the text of slurmdbd.conf. MYSQL_UNIX_PORT in the environment sets the socket."""
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
    """Return the text of gres.conf. All nodes share the fake device files."""
    if not spec.gpus_per_node:
        return ""
    last = spec.gpus_per_node - 1
    return f"NodeName=n[1-{spec.nodes}] Name=gpu File={paths.devices}/nvidia[0-{last}]\n"


def render_cgroup_conf(version: tuple[int, int]) -> str:
    """Return the text of cgroup.conf: Slurm mounts nothing and does not use systemd.

    22.05 has no `disabled` plugin. With linuxproc tracking, the v1 plugin changes nothing. 20.11
    has no plugins.
    """
    if version >= (23, 11):
        return "CgroupPlugin=disabled\n"
    plugin = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n" if version >= (21, 8) else ""
    return f"{plugin}CgroupAutomount=no\n"
