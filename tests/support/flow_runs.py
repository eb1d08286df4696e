"""Submits runs to a real Prefect server with a process worker, and watches them."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from examples.demo_service import PrefectService
from tests.support.forked import RANK_FORKS

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.documents import Claim, Request, Submission, read_document
from holdfast.contracts.records.history import load_events, load_history
from holdfast.flows.prefect_events import event_name
from holdfast.workers.nodes.heartbeats import newest_step, read_heartbeats
from holdfast.workers.nodes.processes import find_process
from holdfast.workers.schedulers import executor_for
from holdfast.workers.schedulers.flow_places import FlowPlaces

DEPLOYMENT: Final = "train/holdfast"
PROGRAM: Final = Path(__file__).parents[1] / "process" / "agent_program.py"
# Fast polling, and no warm standby, whose start takes seconds of two processors.
SUPERVISION: Final = {"poll_s": 0.5, "heartbeat_s": 0.3, "standby_after_s": "off"}
WAIT_S: Final = 240.0
POLL_S: Final = 0.2
ANSWER_S: Final = 60.0
SERVICE_UNAVAILABLE: Final = 503
# Number of events that a failed test prints.
EVENTS_TOLD: Final = 12
LINES_TOLD: Final = 5
LINE: Final = 300
EVENTS_PER_PAGE: Final = 50


def service_environment(folder: Path) -> dict[str, str]:
    """The environment of a Prefect server whose runs, home and index are in `folder`."""
    foreign = {"PREFECT_API_URL", "HOLDFAST_DATABASE_URL"}
    own = {"HOLDFAST_HOME": str(folder / "home"), "HOLDFAST_ROOT": str(folder / "runs")}
    return {key: value for key, value in os.environ.items() if key not in foreign} | own


@contextmanager
def deployed_service(folder: Path) -> Iterator[PrefectService]:
    """A real Prefect server with the deployments and a process worker."""
    service = PrefectService(folder, service_environment(folder))
    with service.serving():
        service.command("holdfast", "deploy")
        with service.working():
            yield service


class FlowRuns:
    """Submits runs to one Prefect server and queries them. `folder` has their specs."""

    def __init__(self, service: PrefectService, folder: Path) -> None:
        self.service = service
        self.folder = folder
        self.root = Path(service.environment["HOLDFAST_ROOT"])
        self.made: list[RunPaths] = []
        self._hurry = folder / "hurry"

    def hurry(self) -> None:
        """Stop all sleeping in the steps of these runs."""
        self._hurry.touch()

    def write_spec(self, name: str, settings: dict[str, Any], **more: Any) -> Path:
        """A spec of the small program on two ranks, which torchrun forks, with fast polling."""
        path = self.folder / f"{name}.yaml"
        spec = {
            "name": name,
            "command": [PROGRAM.name, json.dumps({"hurry": str(self._hurry), **settings})],
            "launch": {"working_directory": str(PROGRAM.parent)},
            "resources": {"gpus_per_node": 2},
            "environment": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANK_FORKS)},
            "checkpoint": {"interval": 10},
            **more,
            "supervision": {**SUPERVISION, **more.get("supervision", {})},
        }
        path.write_text(json.dumps(spec))
        return path

    def type_run(self, spec: Path) -> RunPaths:
        """Start the run with the command `prefect deployment run`, as a user would."""
        self.service.command("prefect", "deployment", "run", DEPLOYMENT, "--param", f"spec={spec}")
        return self._follow(spec.stem)

    def deploy_run(self, spec: Path, name: str = "", overrides: tuple[str, ...] = ()) -> RunPaths:
        """Send the request of `prefect deployment run` directly, which is faster."""
        deployment = self.ask(f"deployments/name/{DEPLOYMENT}")["id"]
        parameters = {"spec": str(spec), **({"overrides": list(overrides)} if overrides else {})}
        # With a key, a request that is sent again makes no second flow run.
        self.ask(
            f"deployments/{deployment}/create_flow_run",
            parameters=parameters,
            idempotency_key=uuid.uuid4().hex,
        )
        return self._follow(name or spec.stem)

    def _follow(self, name: str) -> RunPaths:
        paths = RunPaths(self.root / name)
        self.made.append(paths)
        return paths

    def ask(self, path: str, *items: Any, **body: Any) -> Any:
        """Call a path of the Prefect server's API; a POST if there is a list or a body."""
        sent = list(items) or body
        headers = {"Content-Type": "application/json"}
        if login := self.service.environment.get("PREFECT_API_AUTH_STRING"):
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        request = urllib.request.Request(
            f"{self.service.api}/{path}",
            data=json.dumps(sent).encode() if sent else None,
            headers=headers,
        )
        ends_at = time.monotonic() + WAIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                    return json.loads(answer.read() or b"null")
            except (urllib.error.HTTPError, TimeoutError) as error:
                # If its database is busy, the server returns 503, or nothing within a minute.
                # Prefect's client retries too.
                status = getattr(error, "code", SERVICE_UNAVAILABLE)
                if status != SERVICE_UNAVAILABLE or time.monotonic() > ends_at:
                    raise
            time.sleep(POLL_S)

    def create_block(self, kind: str, block: str, **data: Any) -> None:
        """Create a block as Prefect's UI does."""
        type_id = self.ask(f"block_types/slug/{kind}")["id"]
        chosen = {"block_type_id": {"any_": [type_id]}}
        (schema, *_) = self.ask("block_schemas/filter", block_schemas=chosen)
        ids = {"block_type_id": type_id, "block_schema_id": schema["id"]}
        self.ask("block_documents/", name=block, data=data, **ids)

    def holdfast(self, *arguments: str, check: bool = True) -> Any:
        """The JSON output of the command."""
        done = self.service.command("holdfast", *arguments, "--json", check=check)
        return json.loads(done.stdout)

    def flow_state(self, flow_run: str) -> str:
        """Prefect's state of a flow run."""
        return str(self.ask(f"flow_runs/{flow_run}")["state"]["type"])

    def end_flows(self) -> None:
        """End the supervisors that outlive their workers, and would relaunch the runs."""
        home = Path(self.service.environment["HOLDFAST_HOME"])
        for place in FlowPlaces(home / "flows").all():
            if (process := find_process(place.process)) is not None:
                process.kill()

    def end_all(self) -> None:
        """End all jobs, also those that a failed test left running."""
        for paths in self.made:
            for attempt in paths.list_attempts():
                request = read_document(Request, attempt.request)
                submission = read_document(Submission, attempt.submission)
                if request and submission and not attempt.outcome.exists():
                    executor_for(request.executor).cancel(request, submission)


def wait_for(what: str, is_so: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """Wait until `is_so()` is true and return its value; fails with `what` after `wait_s`."""
    ends_at = time.monotonic() + wait_s
    while time.monotonic() < ends_at:
        if value := is_so():
            return value
        time.sleep(POLL_S)
    raise AssertionError(f"{what} did not come within {wait_s} s")


def step_of(paths: RunPaths, attempt: int = 1) -> int:
    """The last step that any rank of the attempt finished, according to the heartbeats."""
    return newest_step(read_heartbeats(paths.attempt(attempt))) or 0


def state_of(paths: RunPaths) -> str:
    """The run's state on disk, empty before the run exists."""
    return load_history(paths).state.value if paths.spec.is_file() else ""


def wait_for_end(paths: RunPaths, state: str = "completed", wait_s: float = WAIT_S) -> None:
    """Wait for the run's state; fails with a report, at once if the run ended in another state."""

    def is_over() -> bool:
        return bool(state_of(paths)) and (
            state_of(paths) == state or not load_history(paths).state.is_live
        )

    try:
        wait_for(f"the state {state}", is_over, wait_s)
        assert state_of(paths) == state
    except AssertionError as error:
        raise AssertionError(f"{error}\n{story_of(paths)}") from None


def story_of(paths: RunPaths) -> str:
    """A report of the run's last events, heartbeats and output."""
    lines = [f"{paths.name}: {state_of(paths) or 'not begun'} at {time.time():.1f}"]
    for event in load_events(paths)[-EVENTS_TOLD:]:
        lines.append(f"{event.time:.1f} {event.writer} {event.kind} {event.data}"[:LINE])
    for attempt in paths.list_attempts():
        lines += [f"{attempt.directory.name} {beat}"[:LINE] for beat in read_heartbeats(attempt)]
        for log in sorted(attempt.directory.rglob("*.err")):
            lines += [f"{log.name}: {text}" for text in log.read_text().splitlines()[-LINES_TOLD:]]
    return "\n".join(lines)


def claim_of(paths: RunPaths, attempt: int = 1) -> Claim:
    """The claim of the attempt."""
    claim = read_document(Claim, paths.attempt(attempt).claim)
    assert claim is not None, f"attempt {attempt} should have been claimed"
    return claim


def supervisions(paths: RunPaths) -> list[dict[str, Any]]:
    """The data of each `supervised` event of the run."""
    return [e.data for e in load_events(paths) if e.kind is EventKind.SUPERVISED]


def submissions(paths: RunPaths) -> int:
    """The number of jobs ever submitted for the run, according to its journal."""
    return sum(e.kind is EventKind.ATTEMPT_SUBMITTED for e in load_events(paths))


def events_of(runs: FlowRuns, paths: RunPaths) -> list[dict[str, Any]]:
    """All events of the run on the server, oldest first."""
    uid = load_history(paths).record.uid
    name = {"prefix": ["holdfast."]}
    chosen = {"event": name, "any_resource": {"id": [f"holdfast.run.{uid}"]}, "order": "ASC"}
    answer = runs.ask("events/filter", filter=chosen, limit=EVENTS_PER_PAGE)
    found: list[dict[str, Any]] = answer["events"]
    while answer["next_page"]:
        answer = runs.ask(answer["next_page"].partition("/api/")[2])
        found += answer["events"]
    return found


def expected_events(paths: RunPaths) -> list[tuple[str, float]]:
    """The name and time of each journal line that Prefect gets."""
    return [(name, one.time) for one in load_events(paths) if (name := event_name(one))]
