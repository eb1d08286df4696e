"""The compose file's Prefect: a server and its services as two processes, PostgreSQL and Redis."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from examples.demo_service import PrefectService, end_session, free_port
from tests.prefect.test_automations import emit
from tests.support.flow_runs import FlowRuns, service_environment, step_of, wait_for, wait_for_end
from tests.support.postgres import postgres_server

COMPOSE = Path(__file__).parents[2] / "infra" / "compose" / "compose.yaml"
START_S = 120.0


class TeamService(PrefectService):
    """Prefect as `compose.yaml` runs it: with the commands and the variables of the file."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(folder, environment)
        self.compose: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())

    def command_of(self, name: str) -> list[str]:
        """A service's command, on this test's address."""
        words = [str(word) for word in self.compose["services"][name]["command"]]
        here = {"0.0.0.0": "127.0.0.1"}
        return [here.get(word, word) for word in words]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        api = [*self.command_of("prefect"), "--port", str(self.port)]
        with (
            self.background("server", api) as process,
            self.background("services", self.command_of("prefect-services")),
        ):
            self._wait_for_answer(process)
            yield


@contextlib.contextmanager
def redis(folder: Path, port: int = 0) -> Iterator[int]:
    """A Redis server on loopback; its port. 0 is any free one."""
    port = port or free_port()
    command = [shutil.which("redis-server") or "redis-server", "--port", str(port)]
    command += ["--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes"]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        ends_at = time.monotonic() + START_S
        ping = ["redis-cli", "-p", str(port), "ping"]
        while b"PONG" not in subprocess.run(ping, capture_output=True, check=False).stdout:
            assert time.monotonic() < ends_at, (folder / "redis.log").read_text()
            time.sleep(0.1)
        yield port
    finally:
        end_session(process, 20)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[TeamService]:
    with postgres_server() as postgres, redis(tmp_path) as port, postgres.database() as url:
        made = TeamService(tmp_path, service_environment(tmp_path))
        given = {
            key: str(value)
            for key, value in made.compose["x-prefect"].items()
            if key.startswith("PREFECT_") and "${" not in str(value)
        }
        made.environment |= given | {
            "PREFECT_API_DATABASE_CONNECTION_URL": url.replace("://", "+asyncpg://"),
            "PREFECT_REDIS_MESSAGING_HOST": "127.0.0.1",
            "PREFECT_REDIS_MESSAGING_PORT": str(port),
            "PREFECT_SERVER_API_AUTH_STRING": "team:a-password",
            "PREFECT_API_AUTH_STRING": "team:a-password",
        }
        made.command("prefect", "server", "database", "upgrade", "-y")
        yield made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_completes_and_an_automation_fires_with_postgresql_and_redis(
    service: TeamService, tmp_path: Path
) -> None:
    runs = FlowRuns(service, tmp_path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(service.serving())
        done = service.command(*service.command_of("deployments"))
        assert "automation holdfast-resume-paused" in done.stdout
        stack.callback(runs.end_all)
        with service.background("worker", service.command_of("worker")):
            paths = runs.deploy_run(runs.write_spec("team", {"steps": 3000, "sleep_s": 0.1}))
            wait_for("step 12", lambda: step_of(paths) >= 12)
            runs.holdfast("pause", "team", "--until-capacity")
            wait_for("the end of the attempt", paths.attempt(1).outcome.exists)
            emit(runs, "holdfast.capacity.returned", {}, {})
            wait_for("the second attempt", lambda: len(paths.list_attempts()) == 2, 120)
            runs.hurry()
            wait_for_end(paths)
