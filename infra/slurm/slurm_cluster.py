"""A real Slurm cluster on one machine, in one directory, for tests and for trying things out.

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
# Debian keeps daemons where a user's PATH often does not look.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/bin", "/sbin"))

INSTALL_TIMEOUT_S = 120.0
DAEMON_TIMEOUT_S = 60.0
NODES_TIMEOUT_S = 60.0
CLIENT_TIMEOUT_S = 30.0
TERM_WAIT_S = 15.0
# Below the kernel's ephemeral range, so that no outgoing connection takes one meanwhile.
PORT_RANGE = range(20_000, 32_000)
PORT_TRIES_MAX = 1000
# Tells a node's slurmstepds apart from those of other nodes and other clusters.
NODE_MARKER = "HOLDFAST_TEST_NODE"
# These serve the others, so `stop` ends them last.
SUPPORT_DAEMONS = ("munged", "mariadbd", "slurmdbd")
BAD_NODE_STATES = ("down", "drain", "fail", "unk", "inval", "*")


def check_prerequisites() -> None:
    """Raises PrerequisiteError, saying what to do, when no cluster can run on this machine."""
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
    """That many different TCP ports on which nobody listens now."""
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
    """One cluster in `directory`, which is made if missing and must else be empty.

    Usable from the process that started it and, by `open`, from any other.
    Raises ValueError for a directory whose path Slurm cannot use.
    """

    def __init__(self, directory: str | Path, spec: ClusterSpec | None = None) -> None:
        self.spec = spec or ClusterSpec()
        self.paths = ClusterPaths(Path(directory).resolve())
        self._address: ClusterAddress | None = None
        self._made_directory = False
        self._processes: dict[str, ProcessRecord] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """The cluster that runs in `directory`. Raises ClusterStateError when none does."""
        cluster = cls(directory)
        try:
            state = json.loads(cluster.paths.state.read_text())
        except FileNotFoundError:
            raise ClusterStateError(
                f"no cluster in {cluster.directory}; start one there, or give its directory"
            ) from None
        cluster.spec = ClusterSpec(**state["spec"])
        cluster._made_directory = state["made_directory"]
        cluster._processes = {
            name: ProcessRecord(*record) for name, record in state["processes"].items()
        }
        return cluster

    @property
    def directory(self) -> Path:
        """Where everything of this cluster lies."""
        return self.paths.directory

    @property
    def env(self) -> dict[str, str]:
        """What a program needs in its environment to use this cluster."""
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
        """Start everything and wait until all nodes are idle; about ten seconds.

        Raises PrerequisiteError, ClusterStateError when the directory is in use or not
        empty, and DaemonError with the logs' tails, after undoing what was done.
        """
        check_prerequisites()
        self._claim_directory()
        try:
            self._write_files()
            self._start_munged()
            self._start_database()
            self._start_slurmdbd()
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.paths.slurm_conf)])
            for name in self.node_names:
                self._start_slurmd(name)
            self._wait_for_nodes(self.node_names)
        except BaseException:
            # Also on Ctrl-C: a half-started cluster must not outlive the command.
            self.stop()
            raise

    def stop(self) -> None:
        """End every process of the cluster, running jobs included, and remove its files.

        The directory goes too if `start` made it and nobody put anything into it.
        Calling it again, or before `start`, does nothing. Raises DaemonError when a
        process outlives SIGKILL.
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

    def describe(self) -> str:
        """Which daemons run, and the nodes as `sinfo` shows them, as lines of text."""
        lines = []
        for name, record in self._processes.items():
            word = "running" if daemons.is_alive(record) else "dead"
            lines.append(f"{name:<12} pid {record.pid:<8} {word}")
        try:
            lines.append(self.run("sinfo", "-N", "-o", "%5N %10P %10T %12G %E").rstrip())
        except DaemonError as error:
            lines.append(f"sinfo: {error}")
        return "\n".join(lines)

    # -- one node ------------------------------------------------------------------------

    def kill_node(self, name: str) -> int:
        """Lose a node: SIGKILL its slurmd and all that its steps run, however detached.

        Slurm notices after `slurmd_timeout_s`. Returns how many step processes died.
        Raises ClusterStateError when there is no such node.
        """
        record = self._processes[self._daemon_of(name)]
        daemons.send_signal(record, signal.SIGKILL)
        count = daemons.kill_processes(lambda: self._find_step_processes((name,)))
        daemons.stop_process(record, TERM_WAIT_S)
        return count

    def start_node(self, name: str) -> None:
        """Start a killed node's slurmd and wait until Slurm uses the node again.

        Wait for `node_states` to say down first if the lost jobs matter: a node that is back
        sooner leaves a young job RUNNING in Slurm's books, with nothing behind it.
        Raises ClusterStateError when there is no such node or its slurmd runs, DaemonError
        when it does not come up.
        """
        record = self._processes[self._daemon_of(name)]
        if daemons.is_alive(record):
            raise ClusterStateError(f"slurmd of {name} runs already, as pid {record.pid}")
        # Whole seconds, as Slurm shows them.
        started_s = int(time.time())
        self._start_slurmd(name)
        # Slurm may not have noticed the loss yet and still call the node idle.
        if not daemons.wait_until(lambda: self._registered_s(name) >= started_s, NODES_TIMEOUT_S):
            tail = daemons.read_log_tail(self.paths.output(self._daemon_of(name)))
            raise DaemonError(f"{name} did not register within {NODES_TIMEOUT_S} s", tail)
        self._wait_for_nodes((name,), allow_busy=True)

    def node_states(self) -> dict[str, str]:
        """Every node's state in sinfo's long words ("idle", "mixed", "down*", ...)."""
        text = self.run("sinfo", "-h", "-N", "-p", "prod", "-o", "%N %T")
        return dict(line.split() for line in text.splitlines())

    def _registered_s(self, name: str) -> float:
        """When the slurmd that Slurm last heard from on that node started (Unix time; 0: never)."""
        found = re.search(r"SlurmdStartTime=(\d\S+)", self.run("scontrol", "show", "node", name))
        return datetime.fromisoformat(found[1]).timestamp() if found else 0.0

    # -- clients -------------------------------------------------------------------------

    def run(self, *argv: str, timeout_s: float = CLIENT_TIMEOUT_S) -> str:
        """Run a Slurm client against this cluster and return what it printed.

        Raises DaemonError when it fails or is not done within `timeout_s` seconds.
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
            raise DaemonError(f"{' '.join(argv)} was not done after {timeout_s} s") from None
        if done.returncode != 0:
            raise DaemonError(f"{' '.join(argv)} exited {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    # -- private: files ------------------------------------------------------------------

    def _claim_directory(self) -> None:
        """Make the directory ours; the state file's exclusive creation decides a race."""
        try:
            self.directory.mkdir(parents=True)
            self._made_directory = True
        except FileExistsError:
            if any(self.directory.iterdir()):
                raise ClusterStateError(
                    f"{self.directory} is not empty; stop the cluster in it, or give another"
                ) from None
        try:
            self.paths.state.touch(exist_ok=False)
        except FileExistsError:
            raise ClusterStateError(f"{self.directory} was just taken by another") from None

    def _write_state(self) -> None:
        """Record what was started, so that other processes can stop it."""
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
        """Write configuration, munge key and fake GPUs."""
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
        paths.slurm_conf.write_text(config.render_slurm_conf(spec, paths, address))
        paths.slurmdbd_conf.touch(mode=0o600)
        paths.slurmdbd_conf.write_text(config.render_slurmdbd_conf(paths, address))
        paths.gres_conf.write_text(config.render_gres_conf(spec, paths))
        paths.cgroup_conf.write_text(config.render_cgroup_conf())
        paths.munge_key.touch(mode=0o600)
        paths.munge_key.write_bytes(os.urandom(128))
        for index in range(spec.gpus_per_node):
            self._make_gpu(paths.gpu(index))

    @staticmethod
    def _make_gpu(path: Path) -> None:
        """A device file with the numbers of /dev/null: harmless, should anybody open it."""
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            raise PrerequisiteError(
                f"may not make the device file {path}; run with the capability CAP_MKNOD, or "
                "without fake GPUs (--gpus-per-node 0)"
            ) from None

    # -- private: daemons ----------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        """Ours, without the Slurm variables of a job that we may run in ourselves."""
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "MYSQL_"))
        }
        return {**outer, "PATH": SEARCH_PATH, **self.env}

    def _start(self, name: str, argv: list[str], **variables: str) -> None:
        """Start one daemon under `name` and put it on record at once."""
        program = shutil.which(argv[0], path=SEARCH_PATH)
        assert program is not None, "check_prerequisites looked for it"
        environment = {**self._environment(), **variables}
        output = self.paths.output(name)
        self._processes[name] = daemons.start_daemon([program, *argv[1:]], environment, output)
        self._write_state()

    def _wait_for(self, name: str, client: list[str]) -> None:
        """Wait until `client` succeeds while daemon `name` lives; DaemonError otherwise."""
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
        """A munged of our own; --force because our directory may be closed to other users."""
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
        """A MariaDB of our own on a socket only; root logs in by being root."""
        paths = self.paths
        common = ["--no-defaults", f"--datadir={paths.database}", "--user=root"]
        # A server that starts removes what others have for the moment in a folder that they share.
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
            # Nothing of a test cluster needs to survive a power cut.
            "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0",
            "--innodb-buffer-pool-size=32M", "--innodb-lock-wait-timeout=900",
        ]  # fmt: skip
        self._start("mariadbd", argv)
        socket_option = f"--socket={paths.database_socket}"
        self._wait_for("mariadbd", ["mariadb-admin", "--no-defaults", socket_option, "ping"])

    def _start_slurmdbd(self) -> None:
        """The accounting daemon, without which submitit never sees a job end."""
        database = str(self.paths.database_socket)
        self._start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=database)
        self._wait_for("slurmdbd", ["sacctmgr", "-n", "show", "cluster"])

    def _start_slurmd(self, node: str) -> None:
        """One node's daemon, marked so that its steps can be found later."""
        argv = ["slurmd", "-D", "-N", node, "-f", str(self.paths.slurm_conf)]
        self._start(self._daemon_of(node), argv, **self._node_marker(node))

    def _daemon_of(self, node: str) -> str:
        """The name under which a node's slurmd is on record."""
        if node not in self.node_names:
            raise ClusterStateError(
                f"there is no node {node!r}; there are {', '.join(self.node_names)}"
            )
        return f"slurmd.{node}"

    def _node_marker(self, node: str) -> dict[str, str]:
        """The variable that slurmd hands down to its slurmstepds (not to their tasks)."""
        return {NODE_MARKER: f"{self.directory}:{node}"}

    def _find_step_processes(self, nodes: tuple[str, ...]) -> set[ProcessRecord]:
        """What the steps of `nodes` run: slurmstepds, their trees, and tasks that detached.

        The slurmds themselves are not among them.
        """
        markers = [self._node_marker(node) for node in nodes]
        markers += [{**self.env, "SLURMD_NODENAME": node} for node in nodes]
        return daemons.find_processes(markers) - set(self._processes.values())

    def _wait_for_nodes(self, names: tuple[str, ...], *, allow_busy: bool = False) -> None:
        """Wait until `names` are idle, or merely usable; DaemonError with logs otherwise."""
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
    """Whether a node in sinfo's `state` can take jobs ("*" after it: not responding)."""
    if allow_busy:
        return not any(word in state for word in BAD_NODE_STATES)
    return state == "idle"
