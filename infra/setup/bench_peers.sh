#!/usr/bin/env bash
# Installs bench_peers.lock into .setup/bench-peers, the folder of packages that `holdfast bench`
# compares Holdfast with. It returns at once if nothing has changed. Without them, the benchmark
# still runs, and says which is missing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly LOCK=infra/setup/bench_peers.lock
readonly FOLDER=.setup/bench-peers
readonly LOCK_WAIT_S=200
readonly PIP_LIMIT_S=150
readonly PIP_RETRIES=3

say() { printf 'setup: %s\n' "$*" >&2; }

wanted_stamp() { cat "$LOCK" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-32; }

install_peers() {
    # Without --no-deps, pip would install torch again. `.venv` has all that the peers need.
    timeout "$PIP_LIMIT_S" .venv/bin/python -m pip install -qq --disable-pip-version-check \
        --retries "$PIP_RETRIES" --no-deps --require-hashes --target "$1" -r "$LOCK"
}

main() {
    mkdir -p .setup
    exec 9>.setup/bench-peers.lock
    if [[ "$(cat "$FOLDER/stamp" 2>/dev/null)" == "$(wanted_stamp)" ]]; then
        return
    fi
    if ! flock -w "$LOCK_WAIT_S" 9; then
        say "another setup has held .setup/bench-peers.lock for $LOCK_WAIT_S s"
        return
    fi
    rm -rf "$FOLDER" "$FOLDER.new"
    if ! install_peers "$FOLDER.new"; then
        say "$LOCK could not be installed: the benchmark measures without these packages." \
            "Check the connection to the package index, and try again"
        return
    fi
    wanted_stamp >"$FOLDER.new/stamp"
    mv "$FOLDER.new" "$FOLDER"
}

main "$@"
