"""`holdfast mcp`: tools for agents over the Model Context Protocol, with the caller's token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from holdfast.cli.shared.output import warn
from holdfast.cli.support.api_client import ApiClient, is_token, server_parts
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.environment import PAGE_URL, TOKEN
from holdfast.contracts.errors import NotFoundError, SpecError

TOKEN_BYTES_MAX: Final = 4096
DEFAULT_URL: Final = "http://127.0.0.1:8470"


def mcp(
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help=f"Address of `holdfast serve`. Default: $HOLDFAST_PAGE_URL, else {DEFAULT_URL}.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="A file with the token. Default: $HOLDFAST_TOKEN."),
    ] = None,
    allow_orders: Annotated[
        bool,
        typer.Option("--allow-orders", help="Also offer stop, pause, resume and cancel."),
    ] = False,
) -> None:
    """Serve tools for agents over the Model Context Protocol, on standard input and output.

    The tools call the API of a running `holdfast serve` with your token, and can do what the token
    may. Without --allow-orders, they only read.
    """
    try:
        from holdfast.cli.support.mcp_server import serve
    except ImportError as error:
        raise SpecError(
            f"`holdfast mcp` needs the package mcp: {error}; install Holdfast with the extra `mcp`"
        ) from error
    from holdfast.cli.support.tools import build_tools

    address = (os.environ.get(PAGE_URL) or DEFAULT_URL) if url is None else url
    source = "--url" if url is not None else PAGE_URL
    try:
        server_parts(address)
    except SpecError as error:
        raise SpecError(f"{source} {error}") from error
    client = ApiClient(address, chosen_token(token_file))
    _warn_of_plain_text(address)
    serve(build_tools(client, allow_orders=allow_orders), allow_orders=allow_orders)


def chosen_token(file: Path | None) -> str:
    """Return the caller's token. Raises `SpecError` or `NotFoundError` without a usable one."""
    if file is None:
        given, source = os.environ.get(TOKEN, "").strip(), TOKEN
    else:
        source = f"--token-file {file}"
        try:
            content = read_bounded(file.expanduser(), TOKEN_BYTES_MAX)
        except FileNotFoundError as error:
            raise NotFoundError(f"{source}: no such file") from error
        given = content.decode(errors="replace").strip()
    if not given:
        raise SpecError(
            f"no token: set {TOKEN}, or give a file with --token-file; `holdfast token add` "
            "creates one, with the role reader or operator"
        )
    if not is_token(given):
        # The value is not shown, because it may be a token with a mistake.
        raise SpecError(f"{source}: expected one word, as `holdfast token add` prints it")
    return given


def _warn_of_plain_text(url: str) -> None:
    from holdfast.api.security import is_loopback

    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        warn(f"holdfast: {url} is not https, so others on the network can read your token")
