"""Run `uv pip install` for this Python with pip's settings: `uv_install.py -r requirements.lock`.

uv does not read pip's settings. So this script asks pip for those that say where packages come from
and how they are downloaded. With them, uv installs what pip would install.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SETTING = re.compile(r"(global|install|:env:)\.([\w-]+)=(.*)")
# pip's sections, from the weakest to the strongest.
SECTIONS = ("global", "install", ":env:")
# pip's setting → uv's option. Each word of the setting is a value.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
}
# pip's setting → the environment variable that uv reads. Variables that are set already win.
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
CONFIG_S = 120


def read_settings(listed: str) -> dict[str, str]:
    """Return pip's settings for `pip install` from the output of `pip config list`."""
    found = [match for line in listed.splitlines() if (match := SETTING.fullmatch(line))]
    found.sort(key=lambda match: SECTIONS.index(match[1]))
    return {match[2]: str(ast.literal_eval(match[3])) for match in found}


def options_of(settings: Mapping[str, str]) -> list[str]:
    """Return uv's options with the same effect as pip's settings."""
    options = [
        word
        for name, option in OPTIONS.items()
        for value in settings.get(name, "").split()
        for word in (option, value)
    ]
    if settings.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        options.append("--no-index")
    # pip takes the best version from all indexes, uv from the first one that has the package.
    return [*options, "--index-strategy", "unsafe-best-match"]


def environment_of(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with the variables that correspond to pip's settings."""
    given = {VARIABLES[name]: value for name, value in settings.items() if name in VARIABLES}
    return given | dict(environment)


def main() -> int:
    """Return uv's exit status."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=CONFIG_S,
        check=True,
    )
    settings = read_settings(listed.stdout)
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--python", sys.executable, *options_of(settings)]
    # This process becomes uv, so that a signal to it ends uv.
    os.execve(uv, [*command, *sys.argv[1:]], environment_of(settings, os.environ))


if __name__ == "__main__":
    sys.exit(main())
