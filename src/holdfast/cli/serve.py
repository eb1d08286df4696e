"""`holdfast serve` and `holdfast token`: the web UI, the API, and access to them."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.shared import collector, index
from holdfast.cli.shared.output import AsJson, answer, print_table, say, time_text, warn
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.records.history import load_history

if TYPE_CHECKING:
    from holdfast.api.security import AccessPolicy
    from holdfast.api.services import Services
    from holdfast.api.tokens import Token

SHUT_DOWN_S: Final = 3
PREFIX: Final = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*){1,8}")
UNENCRYPTED: Final = (
    "holdfast: tokens cross the network unencrypted. Use --certificate and --key, or "
    "--trusted-proxy with the address of a proxy that serves HTTPS."
)
ROLES: Final = ("reader", "operator")
HOST_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
DAY_S: Final = 24 * 3600.0
DAYS_MAX: Final = 3650


token = typer.Typer(help="Manage the tokens of a server.", no_args_is_help=True)


def serve(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 chooses a free one.")
    ] = 8470,
    root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A folder of runs. Default: $HOLDFAST_ROOT, else ~/.holdfast/runs. Repeatable.",
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another host name of the server. Repeatable."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Trust the X-Forwarded-For and -Proto headers of this proxy. Repeatable.",
        ),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="PATH", help="Its path at a proxy, such as /holdfast.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this PEM certificate.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's private key.")
    ] = None,
) -> None:
    """Serve the web UI and the API until interrupted.

    Every request needs a token. On loopback, the printed URL contains one that is valid until the
    server stops. With another address, or with --name, create tokens with `holdfast token add`.
    """
    import uvicorn

    from holdfast.api.app import create_app
    from holdfast.api.connections import limited_protocol, raise_open_files

    _check_names(name or (), trusted_proxy or ())
    _check_certificate(certificate, key)
    roots = tuple(index.existing_root(str(one)) for one in root or ()) or (index.choose_root(None),)
    below = _checked_prefix(prefix)
    access_policy = _access_policy(host, name or ())
    listening = _listen(host, port)
    services = _services(roots, access_policy)
    is_secure = certificate is not None
    config = uvicorn.Config(
        create_app(services, below),
        log_level="warning",
        http=limited_protocol(raise_open_files()),
        # Trust these headers only from the named proxies.
        proxy_headers=bool(trusted_proxy),
        forwarded_allow_ips=trusted_proxy or [],
        server_header=False,
        timeout_graceful_shutdown=SHUT_DOWN_S,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    if not (is_secure or trusted_proxy or is_private(host, name or ())):
        warn(UNENCRYPTED)
    query = f"?token={_own_token(services)}" if is_private(host, name or ()) else ""
    scheme = "https" if is_secure else "http"
    warn(f"holdfast: serving {_address(host, listening, scheme, below)}{query}")
    collector.return_free_memory()
    uvicorn.Server(config).run(sockets=[listening])


@token.command("add")
def add_token(
    name: Annotated[str, typer.Argument(help="The owner's name, which the records show.")],
    role: Annotated[str, typer.Option(help="The token's role: reader or operator.")] = "reader",
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=DAYS_MAX, help="How long it is valid. Default: until it is revoked."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. Holdfast stores only its hash."""
    from holdfast.api.tokens import Role, TokenStore

    if role not in ROLES:
        raise SpecError(f"--role {role!r}: expected {' or '.join(ROLES)}")
    expires_at = None if days is None else time.time() + days * DAY_S
    token, text = TokenStore().add(name, Role(role), expires_at=expires_at)
    answer({**_facts(token), "token": text}, as_json, lambda facts: say(facts["token"]))


@token.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """List the tokens by name, role and id, without their secrets."""
    from holdfast.api.tokens import TokenStore

    answer([_facts(one) for one in TokenStore().tokens()], as_json, _render_tokens)


@token.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(help="The token's name or id.")], as_json: AsJson = False
) -> None:
    """Revoke a token, and end the browser sessions that used it."""
    from holdfast.api.tokens import TokenStore

    token = TokenStore().revoke(name)
    answer(_facts(token), as_json, lambda facts: say(f"revoked {facts['name']}"))


def start_run(paths: RunPaths, goes_on: bool = True) -> Mapping[str, Any]:
    """Start what a request to a run needs, see `start_after`; return the facts for JSON."""
    from holdfast.flows.start import start_after

    return start_after(paths, goes_on=goes_on).as_json()


def check_secrets(paths: RunPaths) -> None:
    """Raise `PreflightError` if a secret that the run needs has no value."""
    from holdfast.flows.supervisor.secrets import require_again

    require_again(paths)


def begin_fork(
    parent: RunPaths, directory: str, name: str, overrides: Sequence[str], by: str
) -> Mapping[str, Any]:
    """Create a run from a checkpoint and start its supervisor; return the facts for JSON."""
    from holdfast.api.watch import WRITER
    from holdfast.flows.forks import fork_run

    paths = fork_run(parent, directory, name=name, overrides=overrides, by=by, writer=WRITER)
    uid = load_history(paths).record.uid
    return {"run": paths.name, "uid": uid, "directory": str(paths.directory)} | dict(
        start_run(paths)
    )


def _check_names(names: Sequence[str], proxies: Sequence[str]) -> None:
    """Raise `SpecError` for a name or an address that no request could have."""
    import ipaddress

    for one in names:
        if not HOST_NAME.fullmatch(one):
            raise SpecError(
                f"--name {one!r}: expected a host name without a port, such as runs.lab.example"
            )
    for one in proxies:
        try:
            ipaddress.ip_network(one)
        except ValueError:
            raise SpecError(
                f"--trusted-proxy {one!r}: expected an address or a network, such as 127.0.0.1 or "
                "10.0.0.0/8"
            ) from None


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise `SpecError` or `NotFoundError` if HTTPS cannot be served with these files."""
    import ssl

    if certificate is None:
        if key is not None:
            raise SpecError(f"--key {key}: expected --certificate too, the file that it belongs to")
        return
    for option, path in {"--certificate": certificate, "--key": key}.items():
        if path is not None and not path.is_file():
            raise NotFoundError(f"{option} {path}: no such file, expected a PEM file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"--certificate {certificate}: {error}. Expected a PEM certificate, and its private "
            "key in the same file or in that of --key"
        ) from error


def _services(roots: tuple[Path, ...], access_policy: AccessPolicy) -> Services:
    from holdfast.api.hub import Hub
    from holdfast.api.services import Services
    from holdfast.api.store import IndexStore
    from holdfast.api.tokens import TokenStore
    from holdfast.api.watch import Watch
    from holdfast.lineage.index import Index

    store, hub = IndexStore(Index()), Hub()
    # Report an unusable database before the server accepts requests.
    store.ping()
    return Services(
        store=store,
        watch=Watch(store, hub, roots),
        hub=hub,
        access_policy=access_policy,
        tokens=TokenStore(),
        roots=roots,
        start=start_run,
        fork=begin_fork,
        check=check_secrets,
    )


def is_private(host: str, names: Sequence[str]) -> bool:
    """Return whether the server accepts requests from this machine only."""
    from holdfast.api.security import is_loopback

    return is_loopback(host) and not names


def _own_token(services: Services) -> str:
    """Return an operator token for the user who started the server. It is not stored."""
    from holdfast.api.tokens import Role

    return services.tokens.issue(index.user_name(), Role.OPERATOR)[1]


def _checked_prefix(prefix: str | None) -> str:
    """Return the prefix, or "". Raises `SpecError` for one that is not several plain names."""
    if prefix is not None and not PREFIX.fullmatch(prefix):
        raise SpecError(
            f"--prefix {prefix!r}: expected a path that begins with a slash and ends without one, "
            "of letters, digits, dots, dashes and underscores, such as /holdfast"
        )
    return prefix or ""


def _access_policy(host: str, names: Sequence[str]) -> AccessPolicy:
    """Return the server's access policy. Raises `SpecError` if it needs a token and has none."""
    from holdfast.api.security import AccessPolicy, is_loopback
    from holdfast.api.tokens import TokenStore

    if not is_private(host, names) and not TokenStore().tokens():
        raise SpecError(
            f"{host} can be reached from other machines, and there is no token yet. Create one "
            "with `holdfast token add NAME --role operator`, or serve on 127.0.0.1."
        )
    own = () if is_loopback(host) else (host, socket.gethostname(), socket.getfqdn())
    return AccessPolicy(
        hosts=frozenset(one.lower() for one in (*own, *names)),
        any_address=not is_loopback(host),
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that already listens, so that the printed address accepts requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # All connections get this. Otherwise the body of each response waits until the client has
    # acknowledged the headers, which takes 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        # A port cannot cause the first: the host's name or address is wrong.
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host, an address of this machine" if is_host else "--port, or 0 for a free one"
        raise SpecError(
            f"cannot listen on {host}, port {port}: {error.strerror}. Choose another {other}."
        ) from error
    return listening


def _address(host: str, listening: socket.socket, scheme: str, prefix: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listening.getsockname()[1]}{prefix}/"


def _facts(token: Token) -> dict[str, Any]:
    return {
        "name": token.name,
        "role": str(token.role),
        "id": token.id,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "has_expired": token.has_expired,
    }


def _render_tokens(found: list[dict[str, Any]]) -> None:
    rows = [
        (one["name"], one["role"], one["id"], time_text(one["created_at"]), _end_of(one))
        for one in found
    ]
    print_table(("name", "role", "id", "created", "expires"), rows)


def _end_of(token: Mapping[str, Any]) -> str:
    if token["expires_at"] is None:
        return "never"
    return ("expired " if token["has_expired"] else "") + time_text(token["expires_at"])
