"""A team on one machine, set up by the blocks of docs/team-deployment.md."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import other_version
import trustme
from tests.infra.debian_tree import CHECKOUT, PATH, as_words, copy_context, make_base, run_in
from tests.infra.deployment_pages import Pages
from tests.infra.machine import NAME, Machine, wait_for

TEAM: Final = "team-deployment"
PEOPLE: Final = ("ann", "ben")
PACKAGES: Final = ("postgresql", "nginx", "sudo", "curl", "iproute2", "procps")
PASSWORD: Final = "a password"
API: Final = "http://127.0.0.1:4200/api"
SYSTEMCTL: Final = re.compile(r"(?m)^systemctl (enable --now|restart) (\S+).*\n")
# The shell of a person who uses this environment of Holdfast.
PROFILE: Final = f"export PATH=/shared/holdfast/bin:$PATH PREFECT_API_URL={API} NO_COLOR=1\n"


@dataclass
class Team:
    """The machine, the pages, and what was given to people. `started` is the time of nothing."""

    machine: Machine
    pages: Pages = field(default_factory=Pages)
    started: float = field(default_factory=time.monotonic)
    tokens: dict[str, str] = field(default_factory=dict)

    def minutes(self) -> float:
        """The time since there was nothing."""
        return (time.monotonic() - self.started) / 60

    def prepare(self) -> None:
        """Install Debian, and what the pages expect: PostgreSQL, nginx, sudo, people."""
        tree = make_base(self.machine.tree)
        policy = tree / "usr/sbin/policy-rc.d"
        # Debian's scripts would otherwise start the services in the test's own namespaces.
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        # Neither this machine's environment nor its certificates: Debian's scripts write to them.
        given = as_words({"PATH": PATH, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"})
        apt = ["env", "-i", *given, "apt-get", "-q", "-y"]
        for words in (["update"], ["install", "--no-install-recommends", *PACKAGES]):
            other_version.call(
                other_version.entering(tree, [*apt, *words]), self.machine.logs / "apt"
            )
        copy_context(tree / "src")

    def switch_on(self) -> None:
        """Start the machine, PostgreSQL and its accounts."""
        self.machine.start()
        self.machine.run("pg_ctlcluster", "15", "main", "start")
        for person in PEOPLE:
            self.machine.run("useradd", "--create-home", "--shell", "/bin/bash", person)
            self.write(f"home/{person}/.profile", PROFILE)

    def install(self, folder: str, text: str) -> None:
        """Run a page's block that installs packages, which needs the network and pip's settings."""
        run_in(self.machine.tree, ["sh", "-ec", f"cd /src\n{text}"])
        assert (self.machine.tree / folder / "bin/holdfast").is_file()

    def write(self, place: str, text: str) -> Path:
        """Write a file of the machine; return its path on the host."""
        path = self.machine.tree / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def block(self, containing: str, page: str = TEAM) -> str:
        return self.pages.block(page, containing)

    def as_root(self, text: str) -> str:
        """Have root type a script in the checkout; `systemctl` starts services of the machine."""
        said, at = "", 0
        for match in SYSTEMCTL.finditer(text):
            said += self._typed(text[at : match.start()])
            self.start_service(match[2])
            at = match.end()
        return said + self._typed(text[at:])

    def as_account(self, text: str, timeout: float = 300.0) -> str:
        """Have root start a shell of the account, as step 3 does, and type a script in it."""
        login = self.block("sudo -u holdfast bash")
        return self.machine.type_in(f"{login}{text}", timeout=timeout)

    def start_service(self, name: str, extra: str = "") -> None:
        """Start a unit of /etc/systemd/system, or start it again."""
        if name in self.machine.services:
            self.machine.stop_service(name)
        path = self.machine.tree / f"etc/systemd/system/{name}.service"
        self.machine.start_unit(path, extra)

    def ask_prefect(self, path: str, **body: Any) -> Any:
        """The answer of Prefect's API; a POST if there is a body."""
        sent = ["--json", json.dumps(body)] if body else []
        return json.loads(self.machine.run("curl", "-sS", "--fail", *sent, f"{API}/{path}"))

    def flow_runs(self, deployment: str) -> list[dict[str, Any]]:
        """The flow runs of a deployment that have started, the oldest first."""
        made = self.ask_prefect(f"deployments/name/{deployment}/holdfast")["id"]
        asked = {"deployments": {"id": {"any_": [made]}}}
        found = self.ask_prefect("flow_runs/filter", **asked)
        started = [one for one in found if one["start_time"]]
        return sorted(started, key=lambda one: str(one["start_time"]))

    def holdfast(self, *words: str) -> Any:
        """What a command of the account prints as JSON."""
        return json.loads(self.as_account(f"holdfast {' '.join(words)} --json\n"))

    def get(self, address: str, token: str = "") -> tuple[int, str]:
        """The status and the text of a page, by curl."""
        bearer = ["-H", f"Authorization: Bearer {token}"] if token else []
        said = self.machine.run("curl", "-sS", "-w", "\n%{http_code}", *bearer, address)
        text, _, status = said.rpartition("\n")
        return int(status), text

    def configure_nginx(self, location: str, port: int = 443) -> None:
        """Serve the page's location over TLS, with a certificate that the machine trusts."""
        tree = self.machine.tree
        if not (tree / "etc/nginx/tls.key").exists():
            authority = trustme.CA()
            made = authority.issue_cert(NAME)
            made.private_key_pem.write_to_path(tree / "etc/nginx/tls.key")
            made.cert_chain_pems[0].write_to_path(tree / "etc/nginx/tls.pem")
            trusted = tree / "usr/local/share/ca-certificates/site.crt"
            authority.cert_pem.write_to_path(trusted)
            self.machine.run("update-ca-certificates")
        tls = "ssl_certificate /etc/nginx/tls.pem; ssl_certificate_key /etc/nginx/tls.key;"
        server = f"listen {port} ssl; server_name {NAME}; {tls}\n{location}"
        is_first = not (tree / "etc/nginx/sites-enabled/runs").exists()
        (tree / "etc/nginx/sites-enabled/default").unlink(missing_ok=True)
        self.write("etc/nginx/sites-enabled/runs", f"server {{\n{server}}}\n")
        self.machine.run("nginx", "-t")
        self.machine.run("nginx", *([] if is_first else ["-s", "reload"]))

    def wait_for_health(self, address: str) -> None:
        """Wait until the server behind the proxy is healthy, as step 5 checks it."""
        wait_for(address, lambda: '"ok":true' in self.get(address)[1], 60)

    def _typed(self, text: str) -> str:
        return self.machine.type_in(f"cd /src\n{text}") if text.strip() else ""


def source(path: str) -> str:
    """The text of a file of the checkout."""
    return (CHECKOUT / path).read_text()
