"""Run a command beside another version of Slurm: `python infra/slurm/other_version.py --help`.

Each Debian release has one version of Slurm. `build` installs that release into a folder, a tree
of about 700 MB. `run` enters the tree and runs a command of this checkout there, with the Python of
this checkout. It uses Linux namespaces, so no process and no mount outlives the command.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm_errors import ClusterError, PrerequisiteError

REPOSITORY: Final = Path(__file__).resolve().parents[2]
# The tests' own variable: they run beside this other version of Slurm.
VARIABLE: Final = "OTHER_SLURM_VERSION"
CERTIFICATES: Final = Path("/etc/ssl/certs")
TREES: Final = REPOSITORY / ".setup" / "slurm-versions"
BUILD_TIMEOUT_S: Final = 1200
SLURM_PACKAGES: Final = ("slurmctld", "slurmd", "slurm-client", "slurmdbd")
# The rest of a cluster, the tools of the tests, and the libraries of Python's own modules. Slurm
# and MariaDB bring libreadline and libssl, whose packages have other names in later releases.
OTHER_PACKAGES: Final = (
    "munge", "mariadb-server", "gcc", "libc6-dev", "strace", "procps", "iproute2",
    "libffi8", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libncursesw6", "libgomp1",
)  # fmt: skip
# Debian's Slurm of a release needs these, and apt would not choose them from another release.
SLURM_LIBRARIES: Final = {"bullseye": ("slurm-wlm-basic-plugins", "libslurm36")}
DATABASE_PACKAGES: Final = (
    "mariadb-server", "mariadb-server-core", "mariadb-client", "mariadb-client-core",
    "mariadb-common", "libmariadb3",
)  # fmt: skip
SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The shell stays as the first process of its namespace and reaps orphans. $1 is the tree, $2 the
# working directory, and the arguments up to `--` are the folders to bind.
ENTER: Final = """
set -e
tree=$1 directory=$2
shift 2
# As the root of a mount, it can have mount namespaces below.
mount --bind "$tree" "$tree"
mount -t proc proc "$tree/proc"
mount --rbind /sys "$tree/sys"
mount --rbind /dev "$tree/dev"
while [ "$1" != -- ]; do
    mkdir -p "$tree$1"
    mount --bind "$1" "$tree$1"
    shift
done
shift
set +e
chroot "$tree" env --chdir="$directory" "$@"
exit $?
"""


@dataclass(frozen=True)
class Release:
    """The Debian releases of a tree, of its Slurm, and of its MariaDB if that differs."""

    tree: str
    slurm: str
    database: str = ""


# bullseye's C library is too old for a Python built on a later release, so its Slurm is installed
# into a tree of bookworm.
RELEASES: Final = {
    "20.11": Release(tree="bookworm", slurm="bullseye"),
    "22.05": Release(tree="bookworm", slurm="bookworm"),
    # libmariadb3 11.8.9 of later releases refuses the first answer that slurmdbd gets, as it has
    # columns.
    "24.11": Release(tree="trixie", slurm="trixie", database="bookworm"),
    "26.05": Release(tree="sid", slurm="sid", database="bookworm"),
}


def build(version: str) -> Path:
    """Return the tree of a version of Slurm; build it first if it is missing (about two minutes).

    Raises PrerequisiteError if this machine cannot build one, and ClusterError with the end of the
    log if a command fails.
    """
    check_prerequisites()
    tree = TREES / version
    packages = (*SLURM_PACKAGES, *DATABASE_PACKAGES, *OTHER_PACKAGES)
    recipe = f"{RELEASES[version]} {' '.join(packages)}\n"
    mark = tree / "holdfast-recipe"
    with locked(version, fcntl.LOCK_EX):
        if mark.is_file() and mark.read_text() == recipe:
            return tree
        shutil.rmtree(tree, ignore_errors=True)
        try:
            install(RELEASES[version], tree)
        except BaseException:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        mark.write_text(recipe)
    return tree


def check_prerequisites() -> None:
    """Raise PrerequisiteError if this machine cannot build or enter a tree."""
    missing = [name for name in ("debootstrap", "unshare", "chroot") if not shutil.which(name)]
    if missing:
        raise PrerequisiteError(
            f"not installed: {', '.join(missing)}; run: apt-get install debootstrap util-linux"
        )
    if os.geteuid() != 0:
        raise PrerequisiteError(f"this runs as uid {os.geteuid()}; chroot and mounts need root")
    if Path(sys.base_prefix) == Path("/usr"):
        raise PrerequisiteError(
            f"{sys.executable} belongs to this machine's Debian, whose libraries other releases "
            "lack; make .venv with a Python outside of /usr (HOLDFAST_PYTHON=/path/to/python3)"
        )


@contextlib.contextmanager
def locked(version: str, kind: int) -> Iterator[None]:
    """Hold the lock of a tree: shared by those who use it, exclusive for the one that builds it."""
    TREES.mkdir(parents=True, exist_ok=True)
    with (TREES / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, kind)
        yield


def install(release: Release, tree: Path) -> None:
    """Install a Debian release with Slurm into `tree`. Raises ClusterError if a command fails."""
    log = tree.with_name(f"{tree.name}.log")
    say(f"installing Debian {release.tree} with the Slurm of {release.slurm} (about two minutes)")
    call(["debootstrap", "--variant=minbase", release.tree, str(tree)], log)
    policy = tree / "usr/sbin/policy-rc.d"
    # Debian's scripts would otherwise start the daemons that they install.
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copy("/etc/resolv.conf", tree / "etc/resolv.conf")
    copy_names(tree)
    wanted = list(SLURM_PACKAGES)
    if release.slurm != release.tree:
        libraries = SLURM_LIBRARIES.get(release.slurm, ())
        wanted = [f"{name}/{release.slurm}" for name in (*SLURM_PACKAGES, *libraries)]
    if release.database:
        wanted += [f"{name}/{release.database}" for name in DATABASE_PACKAGES]
    for suite in {release.slurm, release.database} - {release.tree, ""}:
        add_source(tree, suite)
    # A mirror's copy of a release that changes daily may be weeks old. Its signature still counts.
    apt = ["apt-get", "-q", "-y", "--no-install-recommends", "-o", "Acquire::Check-Valid-Until=no"]
    call(entering(tree, [*apt, "update"]), log)
    call(entering(tree, [*apt, "install", *wanted, *OTHER_PACKAGES]), log)
    call(entering(tree, [*apt, "clean"]), log)


def copy_names(tree: Path) -> None:
    """Give the tree this machine's names: MariaDB and Slurm look their own host up."""
    for name in ("etc/hosts", "etc/hostname"):
        if (Path("/") / name).exists():
            shutil.copy(Path("/") / name, tree / name)


def add_source(tree: Path, suite: str) -> None:
    """Add another release from the same mirror to the tree's package sources."""
    sources = tree / "etc/apt/sources.list"
    kind, mirror, _, component = sources.read_text().split()[:4]
    with sources.open("a") as stream:
        stream.write(f"{kind} {mirror} {suite} {component}\n")
    # Without this, apt would take every package from the newer of both releases or from none.
    pin = tree / "etc/apt/preferences.d/other-release"
    pin.write_text(f"Package: *\nPin: release n={suite}\nPin-Priority: 100\n")


def entering(tree: Path, command: Sequence[str], folders: Sequence[Path] = ()) -> list[str]:
    """Return the command line that runs `command` in `tree`, with `folders` at their own paths."""
    inside = [str(folder) for folder in folders]
    where = str(REPOSITORY) if REPOSITORY in folders else "/"
    isolate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
    return [*isolate, "sh", "-c", ENTER, "sh", str(tree), where, *inside, "--", *command]


def call(argv: Sequence[str], log: Path) -> None:
    """Run a command with its output in `log`. Raises ClusterError with the log's end."""
    environment = {**os.environ, "PATH": SEARCH_PATH, "DEBIAN_FRONTEND": "noninteractive"}
    with log.open("ab") as stream:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ClusterError(f"{argv[0]} exited {done.returncode}; the end of {log}:\n{tail}")


def run(version: str, command: Sequence[str]) -> int:
    """Run a command of this checkout in the tree of a version; return its exit status."""
    tree = build(version)
    folders = {Path(sys.base_prefix), Path(tempfile.gettempdir()), REPOSITORY}
    # Variables of this machine may name its certificates.
    folders |= {CERTIFICATES} if CERTIFICATES.is_dir() else set()
    environment = {**os.environ, "PATH": SEARCH_PATH, "HOME": "/root", VARIABLE: version}
    with locked(version, fcntl.LOCK_SH):
        copy_names(tree)
        argv = entering(tree, command, sorted(folders))
        return subprocess.run(argv, env=environment, check=False).returncode


def say(text: str) -> None:
    print(f"other_version.py: {text}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the two commands."""
    parser = argparse.ArgumentParser(description="Run a command beside another version of Slurm.")
    commands = parser.add_subparsers(dest="action", required=True)
    for name, text in (
        ("build", "install the version if it is missing"),
        ("run", "run a command there, from the top folder of this checkout"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("version", choices=sorted(RELEASES), help="version of Slurm")
        if name == "run":
            command.add_argument("command", nargs=argparse.REMAINDER, help="after `--`")
    return parser


def main() -> int:
    """Return the command's exit status, or 1 with the reason on stderr."""
    options = build_parser().parse_args()
    try:
        if options.action == "build":
            build(options.version)
            return 0
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        return run(options.version, command)
    except (ClusterError, OSError, subprocess.TimeoutExpired) as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
