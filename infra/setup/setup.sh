#!/usr/bin/env bash
# Sets up this checkout: it installs requirements.lock into `.venv`. If Node is installed, it builds
# the web UI. Every make target runs this script. It returns at once if nothing has changed.
#   --demo     installs only what `make demo` needs, and does not build the web UI
#   --page     fails if the web UI cannot be built
#   --cluster  also installs the system packages for the tests of Slurm, PostgreSQL, the web UI and
#              injected faults
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly PYTHON_MIN=3.11
readonly LOCK_WAIT_S=1800
readonly APT_WAIT_S=300
readonly WHOLE_LOCK=requirements.lock
# Part of the whole one: infra/setup/lock.py writes both.
readonly DEMO_LOCK=infra/setup/demo.lock
readonly UV_VERSION=0.13.9
readonly UV_LIMIT_S=1500
readonly PIP_RETRIES=3
readonly NODE_MIN=18
readonly PAGE_LIMIT_S=600
readonly PREFECT_LIMIT_S=300
readonly IMPORT_LIMIT_S=300
readonly TREE_LIMIT_S=1200
readonly NEWER_SLURM=24.11
readonly PAGE=src/holdfast/api/static
# Command, or file → the package that contains it, on Debian and Ubuntu.
readonly CLUSTER_PACKAGES=(
    slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client slurmdbd:slurmdbd
    munged:munge mariadbd:mariadb-server initdb:postgresql
    gcc:gcc strace:strace node:nodejs npm:npm chromium:chromium
    fusermount3:fuse3 pkg-config:pkg-config /usr/include/fuse3/fuse.h:libfuse3-dev
    debootstrap:debootstrap mkfs.xfs:xfsprogs buildah:buildah
    glusterfsd:glusterfs-server redis-server:redis-server ip:iproute2
)
# Their checkers read files in infra. They are unpacked into .setup/checkers, because installing
# them would start services.
readonly CHECKERS=(prometheus caddy cloud-init)

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

is_recent() { "$1" -c "import sys; sys.exit(sys.version_info < (${PYTHON_MIN/./, }))" 2>/dev/null; }

find_python() {
    local candidate given="${HOLDFAST_PYTHON:-}"
    if [[ -n "$given" ]] && ! is_recent "$given"; then
        die "HOLDFAST_PYTHON=$given: expected the path of a Python $PYTHON_MIN or newer"
    fi
    # The versions that the lock file was made for come first, the system's Python last.
    for candidate in ${given:-python3.11 python3.12 python3.13 python3}; do
        if is_recent "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "found $(python3 --version 2>&1 || echo 'no python3'); expected Python $PYTHON_MIN" \
        "or newer. Install one (Debian: apt-get install python3 python3-venv)," \
        "or name it: HOLDFAST_PYTHON=/path/to/python3"
}

wanted_stamp() {
    cat "$1" pyproject.toml benchmarks/pyproject.toml infra/setup/{setup.sh,uv_install.py} |
        sha256sum | cut -c1-32
}

# True if `.venv` was made from this lock file.
is_made_from() {
    [[ -x .venv/bin/holdfast && "$(cat .setup/python 2>/dev/null)" == "$(wanted_stamp "$1") $PWD" ]]
}

make_venv() {
    local python
    if [[ -e .venv ]] && ! is_recent .venv/bin/python; then
        die ".venv has no working Python $PYTHON_MIN or newer; expected one made here." \
            "Remove it (rm -r .venv) and try again"
    fi
    if [[ ! -x .venv/bin/pip ]]; then
        python="$(find_python)"
        say "making .venv with $python"
        "$python" -m venv .venv ||
            die "python's venv module failed; Debian: apt-get install python3-venv"
    fi
}

pip_install() {
    .venv/bin/pip install -qq --disable-pip-version-check --retries "$PIP_RETRIES" "$@"
}

# uv installs in seconds what takes pip minutes.
add_uv() {
    if [[ "$(.venv/bin/uv --version 2>/dev/null)" != "uv $UV_VERSION"* ]] &&
        ! pip_install "uv==$UV_VERSION" >.setup/uv.log 2>&1; then
        say "uv $UV_VERSION could not be installed (see .setup/uv.log):" \
            "pip installs the packages, which takes minutes"
        return 1
    fi
}

# Installs with uv, or with pip if uv fails. The first argument is an option for uv alone, because
# pip always writes bytecode, and always installs the checkout again.
install_packages() {
    local option=$1
    shift
    if [[ $USES_UV == yes ]]; then
        timeout "$UV_LIMIT_S" .venv/bin/python infra/setup/uv_install.py -q "$option" "$@" && return
        say "uv failed: pip installs the packages, which takes minutes"
        USES_UV=no
    fi
    pip_install "$@"
}

install_demo() {
    local importing
    say "installing $DEMO_LOCK into .venv (half a minute the first time)"
    install_packages --no-compile-bytecode -r "$DEMO_LOCK"
    install_packages --reinstall --no-deps --no-build-isolation -e .
    # These write the bytecode of what they import. The demo needs only a part of all modules.
    import_trainer &
    importing=$!
    make_prefect_database
    wait "$importing"
}

install_whole() {
    say "installing $WHOLE_LOCK into .venv (a few minutes the first time)"
    install_packages --compile-bytecode -r "$WHOLE_LOCK"
    # A demo may be running in this environment, so what it uses is not installed again.
    if [[ $HAS_DEMO == yes ]]; then
        install_packages --reinstall --no-deps --no-build-isolation -e benchmarks
    else
        install_packages --reinstall --no-deps --no-build-isolation -e . -e benchmarks
        make_prefect_database
    fi
}

# The purpose is `demo` or `whole`.
make_environment() {
    local purpose=$1 lock=$WHOLE_LOCK
    if [[ $purpose == demo ]]; then
        lock=$DEMO_LOCK
    fi
    if is_made_from "$WHOLE_LOCK" || is_made_from "$lock"; then
        return
    fi
    HAS_DEMO=no
    if is_made_from "$DEMO_LOCK"; then
        HAS_DEMO=yes
    fi
    make_venv
    # If this ends before the last line, the environment is made again.
    rm -f .setup/python
    USES_UV=no
    if add_uv; then
        USES_UV=yes
    fi
    "install_$purpose"
    printf '%s\n' "$(wanted_stamp "$lock") $PWD" >.setup/python
}

import_trainer() {
    env -u PYTHONDONTWRITEBYTECODE timeout "$IMPORT_LIMIT_S" .venv/bin/python -c \
        'import holdfast.trainer, torch.distributed.fsdp, torch.distributed.run' ||
        die "holdfast.trainer cannot be imported; remove .venv (rm -r .venv) and try again"
}

# Prefect's server takes longer to create its database than to start with one. The demo and the
# tests start theirs with a copy of this one.
make_prefect_database() {
    rm -rf .setup/prefect
    if ! env -u PYTHONDONTWRITEBYTECODE -u PREFECT_API_URL -u PREFECT_API_DATABASE_CONNECTION_URL \
        PREFECT_HOME="$PWD/.setup/prefect" PREFECT_SERVER_ANALYTICS_ENABLED=false \
        timeout "$PREFECT_LIMIT_S" .venv/bin/prefect server database upgrade -y \
        >.setup/prefect.log 2>&1; then
        rm -rf .setup/prefect
        say "Prefect's database could not be prepared (see .setup/prefect.log):" \
            "the demo starts more slowly; everything else works"
    fi
}

missing_packages() {
    local pair
    for pair in "${CLUSTER_PACKAGES[@]}"; do
        # initdb is outside PATH, in a folder with the version's name.
        if ! PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null &&
            ! compgen -G "/usr/lib/postgresql/*/bin/${pair%%:*}" >/dev/null &&
            [[ ! -f "${pair%%:*}" ]]; then
            printf '%s\n' "${pair#*:}"
        fi
    done
}

add_cluster_packages() {
    local missing sudo=()
    mapfile -t missing < <(missing_packages)
    [[ ${#missing[@]} -gt 0 ]] || return 0
    if [[ $EUID -ne 0 ]]; then
        sudo=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
        say "not installed: ${missing[*]}. The tests of Slurm, PostgreSQL and the web UI" \
            "need these packages and will fail without them; make demo does not need them." \
            "Install them as root, then try again"
        return 0
    fi
    say "installing ${missing[*]} (for the tests of Slurm, PostgreSQL and the web UI)"
    local quiet=(-qq -o "DPkg::Lock::Timeout=$APT_WAIT_S" -o "Dpkg::Use-Pty=0")
    "${sudo[@]}" apt-get update "${quiet[@]}" ||
        say "apt-get update failed; trying with the present package lists"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y \
        --no-install-recommends "${quiet[@]}" "${missing[@]}" >.setup/apt.log 2>&1 ||
        say "apt-get could not install ${missing[*]} (see .setup/apt.log):" \
            "the tests that need them will fail"
}

# The tests also run with a newer Slurm, from another Debian release in a folder of its own.
add_newer_slurm() {
    local build=(.venv/bin/python infra/slurm/other_version.py build "$NEWER_SLURM")
    if [[ $EUID -eq 0 ]] && ! timeout "$TREE_LIMIT_S" "${build[@]}"; then
        say "Slurm $NEWER_SLURM could not be installed: the test that needs it will fail"
    fi
}

add_checkers() {
    local folder=.setup/checkers
    if [[ -d $folder ]] || ! command -v apt-get >/dev/null; then
        return 0
    fi
    rm -rf "$folder.new"
    mkdir -p "$folder.new/packages"
    if ! unpack_checkers "$folder.new"; then
        say "${CHECKERS[*]} could not be unpacked (see .setup/apt.log): tests of infra will fail"
        return 0
    fi
    rm -r "$folder.new/packages"
    mv "$folder.new" "$folder"
}

unpack_checkers() {
    local package log="$PWD/.setup/apt.log"
    (
        cd "$1/packages" || exit 1
        # Without package lists, the names are unknown.
        apt-get download -qq "${CHECKERS[@]}" >>"$log" 2>&1 ||
            { update_package_lists && apt-get download -qq "${CHECKERS[@]}" >>"$log" 2>&1; }
    ) || return 1
    for package in "$1"/packages/*.deb; do
        dpkg-deb -x "$package" "$1" || return 1
    done
}

update_package_lists() {
    local sudo=()
    [[ $EUID -eq 0 ]] || sudo=(sudo -n)
    "${sudo[@]}" apt-get update -qq -o "DPkg::Lock::Timeout=$APT_WAIT_S"
}

page_stamp() {
    find web -type d \( -name node_modules -o -name dist \) -prune -o -type f -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32
}

has_node() {
    local version
    version="$(node --version 2>/dev/null)" || return 1
    version="${version#v}"
    [[ "${version%%.*}" -ge $NODE_MIN ]] && command -v npm >/dev/null
}

# The web UI is built into the package. Without it, everything else works, and the server's start
# page explains that it is missing.
build_page() {
    local stamp
    stamp="$(page_stamp)"
    if [[ -f $PAGE/index.html && "$(cat .setup/page 2>/dev/null)" == "$stamp" ]]; then
        return 0
    fi
    if ! has_node; then
        say "no Node $NODE_MIN or newer with npm: the web UI is not built; everything else works"
        return 0
    fi
    say "building the web UI (a minute the first time)"
    if (cd web && timeout "$PAGE_LIMIT_S" npm ci --ignore-scripts --no-audit --no-fund &&
        timeout "$PAGE_LIMIT_S" npm run --silent build) >.setup/page.log 2>&1; then
        printf '%s\n' "$stamp" >.setup/page
    else
        say "the web UI could not be built (see .setup/page.log); everything else works"
        [[ "${1:-}" != --strict ]]
    fi
}

main() {
    mkdir -p .setup
    # Prevents two make targets from building the same environment at the same time.
    exec 9>.setup/lock
    flock -w "$LOCK_WAIT_S" 9 ||
        die "another setup has held .setup/lock for $LOCK_WAIT_S s; end that process first"
    if [[ "${1:-}" == --demo ]]; then
        make_environment demo
        return
    fi
    make_environment whole
    if [[ "${1:-}" == --cluster ]]; then
        add_cluster_packages
        add_newer_slurm
        add_checkers
    fi
    if [[ "${1:-}" == --page ]]; then
        has_node || die "make page needs Node $NODE_MIN or newer with npm" \
            "(Debian: apt-get install nodejs npm)"
        build_page --strict
    else
        build_page
    fi
}

main "$@"
