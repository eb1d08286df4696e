"""Command line of the one-machine Slurm cluster: `python infra/slurm/cluster.py --help`."""

import argparse
import secrets
import shlex
import sys
import tempfile
from pathlib import Path

from slurm_cluster import SlurmCluster
from slurm_config import ClusterSpec
from slurm_errors import ClusterError


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands and options. Times are whole seconds."""
    defaults = ClusterSpec()
    parser = argparse.ArgumentParser(description="A real Slurm cluster on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="start a cluster and wait until it is idle")
    start.add_argument(
        "directory", nargs="?", help="a missing or empty directory; default: a temporary one"
    )
    start.add_argument("--nodes", type=int, default=defaults.nodes)
    start.add_argument("--gpus-per-node", type=int, default=defaults.gpus_per_node)
    start.add_argument("--kill-wait", type=int, default=defaults.kill_wait_s, metavar="S")
    start.add_argument("--grace-time", type=int, default=defaults.grace_time_s, metavar="S")
    start.add_argument(
        "--send-user-signal",
        action="store_true",
        help="a preemption sends the job's own --signal instead of the first TERM",
    )
    for name, text in (
        ("status", "show the daemons and nodes"),
        ("stop", "end all processes and remove the files"),
        ("env", "print the shell lines that select the cluster, for `eval`"),
    ):
        commands.add_parser(name, help=text).add_argument("directory")
    for name, text in (
        ("kill-node", "kill a node and all processes on it"),
        ("start-node", "start a killed node again"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("directory")
        command.add_argument("node", help="n1, n2, ...")
    return parser


def run_command(options: argparse.Namespace) -> None:
    """Run the selected command. Raises ClusterError or ValueError."""
    if options.command == "start":
        spec = ClusterSpec(
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            kill_wait_s=options.kill_wait,
            grace_time_s=options.grace_time,
            send_user_signal=options.send_user_signal,
        )
        start(options.directory, spec)
        return
    cluster = SlurmCluster.open(options.directory)
    if options.command == "status":
        print(cluster.describe())
    elif options.command == "stop":
        cluster.stop()
    elif options.command == "env":
        print_env(cluster)
    elif options.command == "kill-node":
        count = cluster.kill_node(options.node)
        print(f"killed {options.node} and {count} processes of its steps")
    elif options.command == "start-node":
        cluster.start_node(options.node)


def start(directory: str | None, spec: ClusterSpec) -> None:
    """Start a cluster and print how to use and stop it."""
    # The default path does not exist yet, so `stop` removes it.
    default = Path(tempfile.gettempdir()) / f"slurm-{secrets.token_hex(4)}"
    cluster = SlurmCluster(directory or default, spec)
    cluster.start()
    print(f"# {spec.nodes} nodes idle; stop: {sys.argv[0]} stop {cluster.directory}")
    print_env(cluster)


def print_env(cluster: SlurmCluster) -> None:
    """Print shell lines that point Slurm's clients at the cluster."""
    for name, value in cluster.env.items():
        print(f"export {name}={shlex.quote(value)}")


def main() -> int:
    """Return the exit status: 0 success, 1 failure (reason on stderr), 2 usage, 130 Ctrl-C."""
    options = build_parser().parse_args()
    try:
        run_command(options)
    except (ClusterError, ValueError) as error:
        print(f"cluster.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster.py: interrupted; a half-started cluster was removed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
