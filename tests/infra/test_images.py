"""The images, built with buildah, and the services of the compose file started from them."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from tests.infra.debian_tree import CHECKOUT
from tests.infra.images import Container, Images, network
from tests.prefect.test_team import redis
from tests.support.postgres import PostgresServer, postgres_server

IMAGES: Final = CHECKOUT / "infra" / "images"
COMPOSE: Final = CHECKOUT / "infra" / "compose"
UID: Final = 1500
# As in `.env`.
GIVEN: Final = {
    "SERVER_NAME": "runs.lab.example",
    "ACCOUNT_UID": str(UID),
    "DATABASE_PASSWORD": "a-password",
    "PREFECT_AUTH": "team:another",
}
HOSTS: Final = ("postgres", "redis", "prefect")
HEALTHY_S: Final = 240.0
ASK: Final = (
    "import sys, urllib.request as r; q = r.Request('http://127.0.0.1:8470' + sys.argv[1],"
    " headers={'Host': 'runs.lab.example', **dict([sys.argv[2:]] if sys.argv[2:] else [])});"
    " print(r.urlopen(q, timeout=20).read().decode())"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    made = Images(tmp_path_factory.mktemp("images"))
    try:
        made.make_base()
        yield made
    finally:
        made.remove()


def test_images_exclude_what_is_not_source_from_their_context() -> None:
    excluded = (CHECKOUT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".setup", "**/node_modules"} <= set(excluded)
    assert not any("static" in one for one in excluded), "the built page belongs to the image"
    for dockerfile in IMAGES.glob("*.Dockerfile"):
        assert "\nCOPY . /src\n" in dockerfile.read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_trainer_image_imports_torch_and_neither_prefect_nor_sql(images: Images) -> None:
    images.build("trainer.Dockerfile", "holdfast-trainer")
    with images.container("holdfast-trainer") as container:
        assert container.run(images.config_of("holdfast-trainer")["Cmd"]).startswith("2.")
        names = "[u.find_spec(n) for n in ('prefect', 'sqlalchemy')]"
        found = container.run(["python", "-c", f"import importlib.util as u; print({names})"])
        assert found.strip() == "[None, None]"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_services_of_the_compose_file_start_from_the_image(
    images: Images, tmp_path: Path
) -> None:
    images.build("server.Dockerfile", "holdfast-server")
    start = images.config_of("holdfast-server")
    assert start["Entrypoint"] == ["tini", "--"]
    assert start["User"] == str(UID)
    with images.container("holdfast-server", HOSTS) as container:
        assert "supervise" in container.run([*start["Entrypoint"], *start["Cmd"]])
        # Without the site's slurm.conf, Slurm's commands do nothing.
        assert "/sbatch" in container.run(["sh", "-c", "command -v sbatch"])
        absent = "import importlib.util as u; print(u.find_spec('torch'))"
        assert container.run(["python", "-c", absent]).strip() == "None"
        with network(), postgres_server({"port": "5432"}) as database, redis(tmp_path, 6379):
            create_databases(database)
            start_services(Services(container, tmp_path))


def create_databases(server: PostgresServer) -> None:
    """What the image of PostgreSQL does at its first start."""
    server.execute("CREATE ROLE holdfast LOGIN SUPERUSER")
    server.execute("CREATE DATABASE holdfast OWNER holdfast")
    for line in (COMPOSE / "databases.sql").read_text().splitlines():
        if not line.startswith("--"):
            server.execute(line)


class Services:
    """The services of the compose file, with its commands, variables, volumes and health checks."""

    def __init__(self, container: Container, folder: Path) -> None:
        self.container, self.folder = container, folder
        runs, home = folder / "runs", folder / "home"
        for one in (runs, home):
            one.mkdir()
            one.chmod(0o700)
            subprocess.run(["chown", str(UID), str(one)], check=True)
        text = (COMPOSE / "compose.yaml").read_text()
        given = {**GIVEN, "RUNS": str(runs)}
        text = re.sub(r"\$\{(\w+)(?::\?[^}]*)?\}", lambda match: given[match[1]], text)
        self.all: dict[str, Any] = yaml.safe_load(text)["services"]
        # The machine of the test is on no cluster.
        self.volumes = [f"{runs}:{runs}", f"{home}:/home/holdfast"]

    def options(self, name: str) -> dict[str, Any]:
        service = self.all[name]
        variables = {key: str(value) for key, value in service["environment"].items()}
        return {
            "environment": {**variables, "HOME": "/home/holdfast"},
            "volumes": self.volumes if "volumes" in service else [],
        }

    def command(self, name: str) -> list[str]:
        return ["tini", "--", *map(str, self.all[name]["command"])]

    def complete(self, name: str) -> str:
        return self.container.run(self.command(name), **self.options(name))

    def background(self, name: str) -> Any:
        log = self.folder / f"{name}.log"
        return self.container.background(log, self.command(name), **self.options(name))

    def wait_until_healthy(self, name: str) -> None:
        """Run the service's own health check until it succeeds."""
        words = [str(word) for word in self.all[name]["healthcheck"]["test"][1:]]
        check = self.container.words(words, **self.options(name))
        ends_at = time.monotonic() + HEALTHY_S
        while True:
            done = subprocess.run(check, capture_output=True, timeout=HEALTHY_S, check=False)
            if done.returncode == 0:
                return
            log = (self.folder / f"{name}.log").read_text()[-3000:]
            assert time.monotonic() < ends_at, f"{name}: {done.stderr.decode()}\n{log}"
            time.sleep(1)

    def run(self, name: str, *command: str) -> str:
        return self.container.run(command, **self.options(name))


def start_services(services: Services) -> None:
    """In the order of `depends_on`. Each becomes healthy, and the page shows itself."""
    with ExitStack() as stack:
        services.complete("schemas")
        stack.enter_context(services.background("prefect"))
        # It asks for the page too: the account cannot write into the installed packages, where
        # Prefect puts its page otherwise.
        services.wait_until_healthy("prefect")
        stack.enter_context(services.background("prefect-services"))
        assert "deployment train/holdfast" in services.complete("deployments")
        stack.enter_context(services.background("worker"))
        services.wait_until_healthy("worker")
        made = services.run("worker", "holdfast", "token", "add", "ann", "--role", "operator")
        token = re.search(r"hold_[\w-]+", made)
        assert token, made
        stack.enter_context(services.background("serve"))
        services.wait_until_healthy("serve")
        ask = ("python", "-c", ASK)
        assert '"ok":true' in services.run("serve", *ask, "/healthz")
        assert "<title>Holdfast" in services.run("serve", *ask, "/")
        header = ("Authorization", f"Bearer {token[0]}")
        assert '"items":[]' in services.run("serve", *ask, "/api/v1/runs", *header)
