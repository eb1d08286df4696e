"""A real Slurm cluster on one machine, in one directory, for tests and experiments.

>>> with SlurmCluster(directory, ClusterSpec(nodes=2)) as cluster:
...     cluster.run("sbatch", "--wrap", "hostname")
"""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import slurm_config as config
import slurm_daemons as daemons
from slurm_config import ClusterAddress, ClusterPaths, ClusterSpec
from slurm_daemons import ProcessRecord
from slurm_errors import ClusterStateError, DaemonError, PrerequisiteError

APT_PACKAGES = "slurmctld slurmd slurm-client slurmdbd munge mariadb-server"
PROGRAMS = (
    "munged", "mariadbd", "mariadb-install-db", "mariadb-admin",
    "slurmdbd", "slurmctld", "slurmd", "sacctmgr", "sinfo", "scontrol",
)  # fmt: skip
# Debian installs daemons in folders that are often missing from a user's PATH.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", "/sbin"))

INSTALL_TIMEOUT_S = 120.0
DAEMON_TIMEOUT_S = 60.0
NODES_TIMEOUT_S = 60.0
CLIENT_TIMEOUT_S = 30.0
TERM_WAIT_S = 15.0
# Below the kernel's ephemeral range, so that no outgoing connection takes one of these ports.
PORT_RANGE = range(20_000, 32_000)
PORT_TRIES_MAX = 1000
# Distinguishes a node's slurmstepds from those of other nodes and other clusters.
NODE_MARKER = "HOLDFAST_TEST_NODE"
# The other daemons need these, so `stop` ends them last.
SUPPORT_DAEMONS = ("munged", "mariadbd", "slurmdbd")
BAD_NODE_STATES = ("down", "drain", "fail", "unk", "inval", "*")


def check_prerequisites() -> None:
    """Raise PrerequisiteError if a cluster cannot run on this machine."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        raise PrerequisiteError(
            f"not installed: {', '.join(missing)}; run: apt-get install {APT_PACKAGES}"
        )
    if os.geteuid() != 0:
        raise PrerequisiteError(
            f"this runs as uid {os.geteuid()}; the daemons start jobs for users and the fake "
            "GPUs are device files, so run it as root (sudo, or a container)"
        )


def pick_free_ports(count: int) -> tuple[int, ...]:
    """Return `count` different TCP ports on which no process listens now."""
    ports: list[int] = []
    for _ in range(PORT_TRIES_MAX):
        if len(ports) == count:
            return tuple(ports)
        port = random.SystemRandom().choice(PORT_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    raise DaemonError(f"no {count} free ports after {PORT_TRIES_MAX} tries in {PORT_RANGE}")


class SlurmCluster:
    """A cluster in `directory`, which must be missing or empty. A missing one is created.

    The process that started it can use it, and any other one after `open`.
    Raises ValueError for a directory whose path Slurm cannot use.
    """

    def __init__(
        self,
        directory: str | Path,
        spec: ClusterSpec | None = None,
        node_prefix: Callable[[str], list[str]] = lambda node: [],
    ) -> None:
        """`node_prefix(node)` returns words to put before the command line of a node's slurmd."""
        self._node_prefix = node_prefix
        self.spec = spec or ClusterSpec()
        self.paths = ClusterPaths(Path(directory).resolve())
        self._first_conf = ""
        self._made_directory = False
        self._processes: dict[str, ProcessRecord] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Return the cluster that runs in `directory`. Raises ClusterStateError without one."""
        cluster = cls(directory)
        try:
            state = json.loads(cluster.paths.state.read_text())
        except FileNotFoundError:
            raise ClusterStateError(
                f"no cluster in {cluster.directory}; start one there, or give another directory"
            ) from None
        cluster.spec = ClusterSpec(**state["spec"])
        cluster._made_directory = state["made_directory"]
        cluster._processes = {
            name: ProcessRecord(*record) for name, record in state["processes"].items()
        }
        return cluster

    @property
    def directory(self) -> Path:
        """The directory with all files of this cluster."""
        return self.paths.directory

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that a program needs to use this cluster."""
        return {"SLURM_CONF": str(self.paths.slurm_conf)}

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes' names: n1, n2, ..."""
        return self.spec.node_names

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- the whole cluster ---------------------------------------------------------------

    def start(self) -> None:
        """Start the cluster and wait until all nodes are idle, about ten seconds.

        Raises PrerequisiteError, ClusterStateError if the directory is in use or not empty, and
        DaemonError with the ends of the logs. A failed start removes what it created.
        """
        check_prerequisites()
        self._claim_directory()
        try:
            self._write_files()
            self._start_munged()
            if self.spec.accounting:
                self._start_database()
                self._start_slurmdbd()
            self._start_slurmctld()
            for name in self.node_names:
                self._start_slurmd(name)
            self._wait_for_nodes(self.node_names)
        except BaseException:
            # Also on Ctrl-C: a half-started cluster must not outlive the command.
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster, including running jobs, and remove its files.

        Also removes the directory if `start` created it and it has no other files. A second call,
        or a call before `start`, does nothing. Raises DaemonError if a process survives SIGKILL.
        """
        for name in [name for name in self._processes if name not in SUPPORT_DAEMONS]:
            daemons.send_signal(self._processes[name], signal.SIGTERM)
        daemons.kill_processes(lambda: self._find_step_processes(self.node_names))
        for name in reversed(list(self._processes)):
            daemons.stop_process(self._processes[name], TERM_WAIT_S)
        self._processes = {}
        for path in self.paths.owned(self.node_names):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self._made_directory and not any(self.directory.glob("*")):
            self.directory.rmdir()
        self._made_directory = False

    def configure(self, *lines: str) -> None:
        """Change the configuration as it was at the start by `lines`, and restart slurmctld.

        See `slurm_config.with_lines`. Without `lines`, the cluster is as it was. Jobs continue.
        Only the process that started the cluster may call this.
        """
        self._first_conf = self._first_conf or self.paths.slurm_conf.read_text()
        self.paths.slurm_conf.write_text(config.with_lines(self._first_conf, lines))
        daemons.stop_process(self._processes["slurmctld"], TERM_WAIT_S)
        self._start_slurmctld()
        self._wait_for("slurmctld", ["scontrol", "reconfigure"])
        self._wait_for_nodes(self.node_names, allow_busy=True)

    def lose_state(self) -> None:
        """Restart slurmctld without its saved state, as after the loss of its disk.

        It then knows no jobs, and the accounting ends those that were live. Only the process that
        started the cluster may call this.
        """
        daemons.stop_process(self._processes["slurmctld"], TERM_WAIT_S)
        shutil.rmtree(self.paths.ctld_state)
        self.paths.ctld_state.mkdir(mode=0o700)
        self._start_slurmctld()
        self._wait_for_nodes(self.node_names, allow_busy=True)

    def describe(self) -> str:
        """Return the state of the daemons and the nodes as `sinfo` shows them, as text."""
        lines = []
        for name, record in self._processes.items():
            state = "running" if daemons.is_alive(record) else "dead"
            lines.append(f"{name:<12} pid {record.pid:<8} {state}")
        try:
            lines.append(self.run("sinfo", "-N", "-o", "%5N %10P %10T %12G %E").rstrip())
        except DaemonError as error:
            lines.append(f"sinfo: {error}")
        return "\n".join(lines)

    # -- one node ------------------------------------------------------------------------

    def kill_node(self, name: str) -> int:
        """Simulate the loss of a node: SIGKILL its slurmd and all processes of its steps.

        Slurm notices this after `slurmd_timeout_s`. Returns the number of killed step processes.
        Raises ClusterStateError if there is no such node.
        """
        record = self._processes[self._daemon_of(name)]
        daemons.send_signal(record, signal.SIGKILL)
        count = daemons.kill_processes(lambda: self._find_step_processes((name,)))
        daemons.stop_process(record, TERM_WAIT_S)
        return count

    def start_node(self, name: str) -> None:
        """Start a killed node's slurmd and wait until Slurm uses the node again.

        Wait until `node_states` shows `down` first if the lost jobs matter. If the node is back
        sooner, Slurm may list a young job as RUNNING although its processes are gone. Raises
        ClusterStateError if there is no such node or its slurmd runs, and DaemonError if the node
        does not start.
        """
        record = self._processes[self._daemon_of(name)]
        if daemons.is_alive(record):
            raise ClusterStateError(f"slurmd of {name} already runs, as pid {record.pid}")
        # Slurm shows whole seconds.
        started_s = int(time.time())
        self._start_slurmd(name)
        # Slurm may not have noticed the loss yet, and may still report the node as idle.
        if not daemons.wait_until(lambda: self._registered_s(name) >= started_s, NODES_TIMEOUT_S):
            tail = daemons.read_log_tail(self.paths.output(self._daemon_of(name)))
            raise DaemonError(f"{name} did not register within {NODES_TIMEOUT_S} s", tail)
        self._wait_for_nodes((name,), allow_busy=True)

    def node_states(self) -> dict[str, str]:
        """Return every node's state in sinfo's long form ("idle", "mixed", "down*", ...)."""
        text = self.run("sinfo", "-h", "-N", "-p", "prod", "-o", "%N %T")
        return dict(line.split() for line in text.splitlines())

    def _registered_s(self, name: str) -> float:
        """Return when the node's slurmd started, as known to Slurm (Unix seconds; 0: never)."""
        found = re.search(r"SlurmdStartTime=(\d\S+)", self.run("scontrol", "show", "node", name))
        return datetime.fromisoformat(found[1]).timestamp() if found else 0.0

    # -- clients -------------------------------------------------------------------------

    def run(self, *argv: str, timeout_s: float = CLIENT_TIMEOUT_S) -> str:
        """Run a Slurm client against this cluster and return its output.

        Raises DaemonError if it fails or does not finish within `timeout_s` seconds.
        """
        try:
            done = subprocess.run(
                argv,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DaemonError(f"{' '.join(argv)} did not finish within {timeout_s} s") from None
        if done.returncode != 0:
            raise DaemonError(f"{' '.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    # -- private: files ------------------------------------------------------------------

    def _claim_directory(self) -> None:
        """Take the directory. The exclusive creation of the state file decides a race."""
        try:
            self.directory.mkdir(parents=True)
            self._made_directory = True
        except FileExistsError:
            if any(self.directory.iterdir()):
                raise ClusterStateError(
                    f"{self.directory} is not empty; stop the cluster in it, or give another "
                    "directory"
                ) from None
        try:
            self.paths.state.touch(exist_ok=False)
        except FileExistsError:
            raise ClusterStateError(
                f"another cluster has just started in {self.directory}; give another directory"
            ) from None

    def _write_state(self) -> None:
        """Record the started processes, so that other processes can stop them."""
        state = {
            "spec": dataclasses.asdict(self.spec),
            "made_directory": self._made_directory,
            "processes": {
                name: dataclasses.astuple(record) for name, record in self._processes.items()
            },
        }
        draft = self.paths.state.with_suffix(".new")
        draft.write_text(json.dumps(state, indent=1))
        os.replace(draft, self.paths.state)

    def _write_files(self) -> None:
        """Write the configuration files, the munge key and the fake GPUs."""
        spec, paths = self.spec, self.paths
        ports = pick_free_ports(2 + spec.nodes)
        address = ClusterAddress(
            hostname=socket.gethostname().partition(".")[0],
            ctld_port=ports[0],
            dbd_port=ports[1],
            slurmd_ports=ports[2:],
        )
        self._write_state()
        for folder in (paths.devices, paths.logs, paths.run):
            folder.mkdir()
        for folder in (paths.ctld_state, paths.database, paths.database_scratch):
            folder.mkdir(mode=0o700)
        for name in spec.node_names:
            paths.spool(name).mkdir(mode=0o755)
        version = config.parse_version(self.run("slurmctld", "-V"))
        paths.slurm_conf.write_text(config.render_slurm_conf(spec, paths, address, version))
        paths.slurmdbd_conf.touch(mode=0o600)
        paths.slurmdbd_conf.write_text(config.render_slurmdbd_conf(paths, address))
        paths.gres_conf.write_text(config.render_gres_conf(spec, paths))
        paths.cgroup_conf.write_text(config.render_cgroup_conf(version))
        paths.munge_key.touch(mode=0o600)
        paths.munge_key.write_bytes(os.urandom(128))
        for index in range(spec.gpus_per_node):
            self._make_gpu(paths.gpu(index))

    @staticmethod
    def _make_gpu(path: Path) -> None:
        """Create a device file with the numbers of /dev/null, which is harmless to open."""
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            raise PrerequisiteError(
                f"no permission to create the device file {path}; run with the capability "
                "CAP_MKNOD, or without fake GPUs (--gpus-per-node 0)"
            ) from None

    # -- private: daemons ----------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        """Return this process's environment without the Slurm variables of an outer job."""
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "MYSQL_"))
        }
        return {**outer, "PATH": SEARCH_PATH, **self.env}

    def _start(self, name: str, argv: list[str], **variables: str) -> None:
        """Start a daemon under `name` and record it at once."""
        program = shutil.which(argv[0], path=SEARCH_PATH)
        assert program is not None, "check_prerequisites found it"
        environment = {**self._environment(), **variables}
        output = self.paths.output(name)
        self._processes[name] = daemons.start_daemon([program, *argv[1:]], environment, output)
        self._write_state()

    def _wait_for(self, name: str, client: list[str]) -> None:
        """Wait until `client` succeeds. Raises DaemonError if daemon `name` dies or is late."""
        deadline_s = time.monotonic() + DAEMON_TIMEOUT_S
        while True:
            try:
                self.run(*client)
                return
            except DaemonError as error:
                dead = not daemons.is_alive(self._processes[name])
                if dead or time.monotonic() >= deadline_s:
                    what = "died" if dead else f"did not answer within {DAEMON_TIMEOUT_S} s"
                    tail = daemons.read_log_tail(self.paths.output(name))
                    raise DaemonError(f"{name} {what} ({error})", tail) from None
            time.sleep(daemons.POLL_INTERVAL_S)

    def _start_munged(self) -> None:
        """Start our own munged, with --force because other users may not access our directory."""
        paths = self.paths
        argv = [
            "munged", "--foreground", "--force",
            f"--socket={paths.munge_socket}",
            f"--key-file={paths.munge_key}",
            f"--pid-file={paths.pid_file('munged')}",
            f"--log-file={paths.log('munged')}",
            f"--seed-file={paths.munge_seed}",
        ]  # fmt: skip
        self._start("munged", argv)
        self._wait_for("munged", ["munge", "-n", f"--socket={paths.munge_socket}"])

    def _start_database(self) -> None:
        """Start our own MariaDB on a socket only. root needs no password."""
        paths = self.paths
        common = ["--no-defaults", f"--datadir={paths.database}", "--user=root"]
        # In a shared folder, a server that starts would remove the temporary files of others.
        common.append(f"--tmpdir={paths.database_scratch}")
        self.run(
            "mariadb-install-db", *common, "--skip-test-db", "--skip-name-resolve",
            "--auth-root-authentication-method=socket", "--auth-root-socket-user=root",
            timeout_s=INSTALL_TIMEOUT_S,
        )  # fmt: skip
        argv = [
            "mariadbd", *common, "--skip-networking",
            f"--socket={paths.database_socket}",
            f"--pid-file={paths.pid_file('mariadbd')}",
            # A test cluster does not need to survive a power cut.
            "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0",
            "--innodb-buffer-pool-size=32M", "--innodb-lock-wait-timeout=900",
        ]  # fmt: skip
        self._start("mariadbd", argv)
        socket_option = f"--socket={paths.database_socket}"
        self._wait_for("mariadbd", ["mariadb-admin", "--no-defaults", socket_option, "ping"])

    def _start_slurmdbd(self) -> None:
        """Start the accounting daemon, without which submitit never sees a job end."""
        database = str(self.paths.database_socket)
        self._start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=database)
        self._wait_for("slurmdbd", ["sacctmgr", "-n", "show", "cluster"])

    def _start_slurmctld(self) -> None:
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.paths.slurm_conf)])

    def _start_slurmd(self, node: str) -> None:
        """Start a node's slurmd, with a marker by which its steps can be found later."""
        argv = ["slurmd", "-D", "-N", node, "-f", str(self.paths.slurm_conf)]
        argv = [*self._node_prefix(node), *argv]
        self._start(self._daemon_of(node), argv, **self._node_marker(node))

    def _daemon_of(self, node: str) -> str:
        """Return the name under which a node's slurmd is recorded."""
        if node not in self.node_names:
            raise ClusterStateError(
                f"there is no node {node!r}; there are {', '.join(self.node_names)}"
            )
        return f"slurmd.{node}"

    def _node_marker(self, node: str) -> dict[str, str]:
        """Return the variable that slurmd passes to its slurmstepds (not to their tasks)."""
        return {NODE_MARKER: f"{self.directory}:{node}"}

    def _find_step_processes(self, nodes: tuple[str, ...]) -> set[ProcessRecord]:
        """Return the processes of the steps of `nodes`, without the slurmds themselves.

        These are the slurmstepds, their descendants and detached tasks.
        """
        markers = [self._node_marker(node) for node in nodes]
        markers += [{**self.env, "SLURMD_NODENAME": node} for node in nodes]
        return daemons.find_processes(markers) - set(self._processes.values())

    def _wait_for_nodes(self, names: tuple[str, ...], *, allow_busy: bool = False) -> None:
        """Wait until `names` are idle (`allow_busy`: usable). Raises DaemonError with logs."""
        watched = ["slurmctld", *(self._daemon_of(name) for name in names)]
        deadline_s = time.monotonic() + NODES_TIMEOUT_S
        states: dict[str, str] = {}
        while time.monotonic() < deadline_s:
            dead = [name for name in watched if not daemons.is_alive(self._processes[name])]
            if dead:
                tail = "\n".join(daemons.read_log_tail(self.paths.output(name)) for name in dead)
                raise DaemonError(f"{', '.join(dead)} died while starting", tail)
            try:
                states = self.node_states()
            except DaemonError:
                states = {}  # slurmctld does not answer yet.
            if all(_is_ready(states.get(name, "*"), allow_busy) for name in names):
                return
            time.sleep(daemons.POLL_INTERVAL_S)
        tail = "\n".join(daemons.read_log_tail(self.paths.output(name)) for name in watched)
        raise DaemonError(f"nodes not ready after {NODES_TIMEOUT_S} s: {states}", tail)


def _is_ready(state: str, allow_busy: bool) -> bool:
    """Return whether a node in sinfo's `state` can run jobs ("*" means not responding)."""
    if allow_busy:
        return not any(word in state for word in BAD_NODE_STATES)
    return state == "idle"
