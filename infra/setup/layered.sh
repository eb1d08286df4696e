#!/usr/bin/env bash
# Makes .setup/NAME, the Python environment of the tests of a package: the packages of
# infra/setup/NAME.lock, layered over .venv. It returns at once if nothing has changed.
#
#     infra/setup/layered.sh NAME
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly NAME="${1:?expected the name of an environment, such as torchtitan}"
readonly LOCK="infra/setup/$NAME.lock"
readonly ENVIRONMENT=".setup/$NAME"
readonly LOCK_WAIT_S=500
readonly PIP_LIMIT_S=400
readonly PIP_RETRIES=3

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

wanted_stamp() { cat "$LOCK" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-32; }

# Packages of the lock come before those of .venv. `addsitedir` also follows the .pth files there,
# which name the folders of the editable installs.
layer_over_venv() {
    local packages
    packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf 'import site; site.addsitedir("%s")\n' "$packages" >"$1/holdfast.pth"
}

make_environment() {
    local stamp own
    stamp="$(wanted_stamp) $PWD"
    if [[ -x $ENVIRONMENT/bin/python ]] && cmp -s "$ENVIRONMENT/stamp" <(echo "$stamp"); then
        return
    fi
    [[ -x .venv/bin/python ]] || die "there is no .venv; run infra/setup/setup.sh first"
    say "installing $LOCK into $ENVIRONMENT (a minute the first time)"
    rm -rf "$ENVIRONMENT"
    .venv/bin/python -m venv --without-pip "$ENVIRONMENT"
    own="$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # Without --no-deps, pip would install other versions of packages that .venv already has.
    timeout "$PIP_LIMIT_S" .venv/bin/python -m pip --python "$ENVIRONMENT/bin/python" install -qq \
        --disable-pip-version-check --retries "$PIP_RETRIES" --no-deps -r "$LOCK" ||
        die "$LOCK could not be installed; check the connection to the package index, and try again"
    layer_over_venv "$own"
    printf '%s\n' "$stamp" >"$ENVIRONMENT/stamp"
}

main() {
    mkdir -p .setup
    exec 9>"$ENVIRONMENT.lock"
    flock -w "$LOCK_WAIT_S" 9 ||
        die "another setup has held $ENVIRONMENT.lock for $LOCK_WAIT_S s; end it first"
    make_environment
}

main "$@"
