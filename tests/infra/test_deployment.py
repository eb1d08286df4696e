"""The pages for a team, followed on a clean machine: docs/team-deployment.md and what it links.

The commands are the code blocks of the pages. The tests are the chapters of one story: each needs
those before it, so run the whole file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any, Final

import other_version
import pytest
from tests.infra.deployment_pages import Pages
from tests.infra.machine import NAME, Machine, wait_for
from tests.infra.team import API, PASSWORD, Team, source

SITE: Final = f"https://{NAME}"
FIRST_SCHEDULED_RUN_MIN: Final = 15.0
LONG: Final = 6000
ENDED: Final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
SPEC: Final = """\
name = "{name}"
command = ["train.py"]
[resources]
executor = "local"
gpus_per_node = 0
nproc_per_node = 2
[environment]
OMP_NUM_THREADS = "1"
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    other_version.check_prerequisites()
    folder = tmp_path_factory.mktemp("team")
    made = Team(Machine(folder / "tree", folder), Pages())
    try:
        made.prepare()
        made.switch_on()
        yield made
    finally:
        made.machine.stop()
        shutil.rmtree(folder)


def add_token(team: Team, words: str) -> str:
    """Add a token as the account; return it."""
    (token,) = re.findall(r"hold_\S+", team.as_account(f"holdfast token add {words}\n"))
    return str(token)


def wait_for_prefect(team: Team) -> None:
    healthy = f"curl -sf {API}/health || true"
    wait_for("Prefect", lambda: "true" in team.machine.run("sh", "-c", healthy), 180)


def is_ok(team: Team, check: str) -> bool:
    """Whether `holdfast doctor` prints `ok` for a check."""
    said = team.as_account("holdfast doctor || true\n")
    return f"ok    {check} " in said


def write_program(team: Team, name: str, steps: int, sleep_s: float = 0.0) -> str:
    """The smallest example and its spec, in a folder that everyone can read; the spec's path."""
    program = source("examples/minimal/train.py").replace("= 100, 4096, 32", f"= {steps}, 4096, 32")
    # Slow steps leave time to give orders, until the file `hurry` is there.
    program = program.replace("import torch\n", "import pathlib\nimport time\n\nimport torch\n", 1)
    wait = f'    time.sleep(0 if pathlib.Path(__file__).with_name("hurry").exists() else {sleep_s})'
    after = "    session.log(loss=loss.item())"
    program = program.replace(after, f"{wait}\n{after}")
    team.write(f"shared/{name}/train.py", program)
    team.write(f"shared/{name}/spec.toml", SPEC.format(name=name))
    return f"/shared/{name}/spec.toml"


def test_step_2_environment_root_and_home(team: Team) -> None:
    install = team.pages.block("first-run-on-slurm", "pip install")
    # As the page says: with the web UI.
    team.install("shared/holdfast", install.replace("HOLDFAST_WHEEL_WITHOUT_PAGE=1 ", ""))
    team.as_root(team.block("useradd"))
    one_account, each_person = team.block("/shared/runs              #").splitlines()
    team.as_root(one_account)
    # The tests of private runs need the other layout, too.
    team.as_root(each_person.replace("/shared/runs", "/shared/people"))
    team.as_root(team.block("0700 /var/lib/holdfast"))
    for person in ("ann", "ben"):
        team.machine.run("usermod", "--append", "--groups", "ml", person)
    made = ("/shared/runs", "/shared/people", "/var/lib/holdfast")
    found = team.machine.run("stat", "--format", "%U %G %a", *made).splitlines()
    assert found[:2] == ["holdfast ml 2750", "root ml 3770"]
    assert re.fullmatch(r"holdfast \w+ 700", found[2])


def test_step_3_index_in_postgresql(team: Team) -> None:
    create = team.block("createuser")
    typed = f"printf '{PASSWORD}\\n{PASSWORD}\\n' | \\g<0>"
    team.machine.type_in(re.sub(r"(?m)^.*--pwprompt", typed, create))
    team.write("etc/holdfast.env", team.block("HOLDFAST_DATABASE_URL=postgresql"))
    line = team.block(":PASSWORD").replace("PASSWORD", PASSWORD)
    team.as_account(f"umask 077\ncat > ~/.pgpass <<'END'\n{line}END\n")
    with pytest.raises(AssertionError, match="the database has no Holdfast schema yet"):
        team.as_account("holdfast runs\n")
    said = team.as_account(team.block("holdfast db upgrade          #"))
    assert "ok    database         postgresql" in said
    as_root = "export PATH=/shared/holdfast/bin:$PATH\nset -a; . /etc/holdfast.env; set +a\n"
    with pytest.raises(AssertionError, match="belongs to the account holdfast"):
        team.as_root(f"{as_root}holdfast token add mallory\n")


def test_step_4_prefect_with_postgresql(team: Team) -> None:
    settings = team.block("PREFECT_API_DATABASE_CONNECTION_URL")
    with team.machine.tree.joinpath("etc/holdfast.env").open("a") as stream:
        stream.write(settings)
    team.as_root(team.block("systemctl enable --now holdfast-prefect"))
    wait_for_prefect(team)
    said = team.as_account(team.block("holdfast deploy --type holdfast\n"))
    assert "deployment train/holdfast on pool holdfast" in said
    team.as_root(team.block("systemctl enable --now holdfast-worker"))
    wait_for("the worker", lambda: is_ok(team, "prefect"))
    tables = "sudo -u postgres psql -At prefect -c 'select count(*) from deployment'"
    assert int(team.machine.type_in(f"cd /\n{tables}\n")) > 5


def test_step_5_server_behind_nginx(team: Team) -> None:
    said = team.as_account(team.block("holdfast token add grafana                         #"))
    team.tokens["ann"], team.tokens["grafana"] = re.findall(r"hold_\S+", said)
    team.as_root(team.block("systemctl enable --now holdfast-serve"))
    location = team.block("location / {")
    for port in (8443, 443):
        team.configure_nginx(location, port)
        site = SITE if port == 443 else f"{SITE}:{port}"
        team.wait_for_health(f"{site}/healthz")
        assert team.get(f"{site}/metrics")[0] == 401
        status, text = team.get(f"{site}/metrics", team.tokens["grafana"])
        assert (status, "holdfast_index_up 1" in text) == (200, True)


def test_scheduled_runs_complete_one_after_another(team: Team) -> None:
    write_program(team, "nightly", steps=40)
    schedule = team.block("/schedules --data", "prefect")
    team.as_account(schedule.replace("0 3 * * *", "* * * * *"))

    def completed() -> list[dict[str, Any]]:
        found = team.flow_runs("train")
        bad = [one for one in found if one["state_type"] in ENDED - {"COMPLETED"}]
        assert not bad, f"{bad}\n{team.machine.services['holdfast-worker'].text()}"
        return [one for one in found if one["state_type"] == "COMPLETED"]

    wait_for("the first scheduled run", completed, 300)
    minutes = team.minutes()
    print(f"from nothing to a completed scheduled run: {minutes:.1f} min")
    assert minutes <= FIRST_SCHEDULED_RUN_MIN
    with (team.machine.tree / "shared/nightly/spec.toml").open("a") as spec:
        spec.write('DAY = "2"\n')
    again = team.machine.tree / "shared/runs/nightly.r2/spec.json"
    wait_for("the second scheduled run", again.is_file, 180)
    wait_for("its end", lambda: is_in_state(team, again.parent.name, "completed"), 180)
    completed()
    team.as_account("prefect deployment schedule clear train/holdfast -y\n")
    shown = team.holdfast("show", "nightly")
    assert (shown["state"], shown["step"]) == ("completed", 40)
    assert shown["created_by"].startswith("prefect schedule, flow run ")
    runs = {one["run"]: one["state"] for one in team.holdfast("runs")}
    assert runs == {"nightly": "completed", "nightly.r2": "completed"}


def start_long_run(team: Team, name: str) -> str:
    """Have ann start a run that trains until it is stopped; return its flow run."""
    spec = write_program(team, name, steps=LONG, sleep_s=0.05)
    order = f"prefect deployment run train/holdfast --param spec={spec} --param by=ann\n"
    team.machine.type_in(order, "ann")
    wait_for(f"training of {name}", lambda: steps_of(team, name) > 0, 180)
    return str(last_supervised(team, name)["flow_run"])


def journal(team: Team, name: str, writer: str, kind: str) -> list[dict[str, Any]]:
    """The data of one kind of lines in one of a run's journals."""
    path = team.machine.tree / f"shared/runs/{name}/journal/{writer}.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line["data"] for line in map(json.loads, lines) if line["kind"] == kind]


def last_supervised(team: Team, name: str) -> dict[str, Any]:
    return journal(team, name, "flow", "supervised")[-1]


def steps_of(team: Team, name: str) -> int:
    if not (team.machine.tree / f"shared/runs/{name}/spec.json").is_file():
        return 0
    return int(team.holdfast("show", name)["trained_step"] or 0)


def is_in_state(team: Team, name: str, state: str) -> bool:
    return bool(team.holdfast("show", name)["state"] == state)


def test_orders_through_prefect_name_the_person(team: Team) -> None:
    flow_run = start_long_run(team, "long")
    suspended: dict[str, Any] = {
        "type": "PAUSED",
        "name": "Suspended",
        "message": "ann: needs the node",
    }
    suspended |= {"state_details": {"pause_reschedule": True}}
    team.ask_prefect(f"flow_runs/{flow_run}/set_state", state=suspended)
    wait_for("the pause", lambda: is_in_state(team, "long", "paused"))
    order = "prefect deployment run resume/holdfast --param run=long --param by=ben\n"
    team.machine.type_in(order, "ben")
    wait_for("the second attempt", lambda: is_in_state(team, "long", "running"))
    flow_run = str(last_supervised(team, "long")["flow_run"])
    team.machine.type_in(f"prefect flow-run cancel {flow_run}\n", "ann")
    wait_for("the cancellation", lambda: is_in_state(team, "long", "cancelled"))
    shown = team.holdfast("show", "long")
    assert shown["created_by"].startswith("ann (prefect flow run ")
    paused, resumed, cancelled = shown["orders"]
    assert (paused["action"], paused["reason"]) == ("pause", "ann: needs the node")
    assert resumed["action"] == "resume"
    assert resumed["by"].startswith("ben (prefect flow run ")
    assert cancelled["action"] == "cancel"
    # The command of Prefect gives no name.
    assert cancelled["by"].startswith("prefect flow run ")
    named = [one["by"] for one in journal(team, "long", "orders", "operator_request")]
    assert named == [one["by"] for one in shown["orders"]]


def as_person(team: Team, person: str, text: str) -> str:
    """Have a person without Prefect use the root of all people, with the team's index."""
    line = team.block(":PASSWORD").replace("PASSWORD", PASSWORD)
    url = re.search("(?m)^HOLDFAST_DATABASE_URL=.*$", team.block("DATABASE_URL=postgresql:"))
    assert url
    profile = f"unset PREFECT_API_URL\nexport HOLDFAST_ROOT=/shared/people {url[0]}\n"
    password = f"(umask 077; echo '{line.strip()}' > ~/.pgpass)\n"
    return team.machine.type_in(profile + password + text, person)


def test_private_run_is_shown_only_to_its_owner(team: Team) -> None:
    for name, mask in (("hidden", "077"), ("open", "027")):
        spec = write_program(team, name, steps=5)
        as_person(team, "ann", f"umask {mask}\nholdfast submit {spec} --wait\n")
    team.start_service("holdfast-serve", "--root /shared/runs --root /shared/people")
    team.wait_for_health(f"{SITE}/healthz")
    seen = {
        "ann": as_person(team, "ann", "holdfast runs\n"),
        "ben": as_person(team, "ben", "holdfast runs\n"),
        "server": team.get(f"{SITE}/api/v1/runs", team.tokens["ann"])[1],
    }
    assert "hidden" in seen["ann"]
    assert "hidden" not in seen["ben"] + seen["server"]
    assert "open" in seen["ben"]
    assert '"open"' in seen["server"]
    with pytest.raises(AssertionError, match="hidden"):
        as_person(team, "ben", "holdfast show hidden\n")
    assert team.get(f"{SITE}/api/v1/runs/hidden", team.tokens["ann"])[0] == 404
    team.start_service("holdfast-serve")
    team.wait_for_health(f"{SITE}/healthz")


def test_tokens_are_replaced_expire_and_end(team: Team) -> None:
    metrics = f"{SITE}/metrics"
    old, new = team.tokens["grafana"], add_token(team, "grafana-2")
    assert {team.get(metrics, one)[0] for one in (old, new)} == {200}
    team.as_account("holdfast token revoke grafana\n")
    wait_for("the end of the old token", lambda: team.get(metrics, old)[0] == 401, 20)
    assert team.get(metrics, new)[0] == 200
    team.tokens["grafana"] = new
    brief = add_token(team, "guest --days 1")
    assert team.get(metrics, brief)[0] == 200
    store = team.machine.tree / "var/lib/holdfast/tokens.json"
    # A day is over.
    past = re.sub(r'("expires_at": ?)[0-9.e+]+', r"\g<1>1.0", store.read_text())
    assert past != store.read_text()
    store.write_text(past)
    wait_for("the end of the day", lambda: team.get(metrics, brief)[0] == 401, 20)
    assert team.get(metrics, new)[0] == 200


def test_server_below_a_path(team: Team) -> None:
    team.start_service("holdfast-serve", "--prefix /holdfast")
    team.configure_nginx(
        team.block("location / {").replace("location / {", "location /holdfast/ {")
    )
    team.wait_for_health(f"{SITE}/holdfast/healthz")
    assert team.get(f"{SITE}/holdfast/metrics")[0] == 401
    assert team.get(f"{SITE}/holdfast/metrics", team.tokens["grafana"])[0] == 200
    assert team.get(f"{SITE}/healthz")[0] == 404
    team.start_service("holdfast-serve")
    team.configure_nginx(team.block("location / {"))
    team.wait_for_health(f"{SITE}/healthz")


def test_backup_and_restore_of_index_and_tokens(team: Team) -> None:
    before = team.holdfast("runs")
    assert before
    tokens, copy = "/var/lib/holdfast/tokens.json", "/home/holdfast/tokens.json"
    team.as_account(f"cp --preserve {tokens} {copy}\nrm {tokens}\n")
    metrics = f"{SITE}/metrics"
    wait_for("no tokens", lambda: team.get(metrics, team.tokens["grafana"])[0] == 401, 20)
    createdb = re.findall(r"(?m)^sudo -u postgres createdb .*$", team.block("createuser"))[0]
    team.machine.type_in(f"cd /\nsudo -u postgres dropdb --force holdfast\n{createdb}\n")
    each_root = "".join(f"holdfast reindex --root /shared/{one}\n" for one in ("runs", "people"))
    team.as_account(f"holdfast db upgrade\n{each_root}")
    team.as_account(f"cp --preserve {copy} {tokens}\n")
    assert team.holdfast("runs") == before
    wait_for("the tokens", lambda: team.get(metrics, team.tokens["grafana"])[0] == 200, 60)
    team.wait_for_health(f"{SITE}/healthz")


def has_ranks(team: Team, environment: str) -> bool:
    """Whether a process of the program runs with this environment's Python."""
    running = team.machine.run("ps", "-eo", "args").splitlines()
    return any(one.startswith(environment) and "train.py" in one for one in running)


def test_upgrade_moves_a_live_run(team: Team) -> None:
    page = "upgrading"
    team.as_account(team.block("holdfast --version", page))
    install = team.block("/shared/holdfast-new/bin/pip", page)
    team.install("shared/holdfast-new", install.replace(".[trainer]", ".[server,trainer]"))
    start_long_run(team, "moved")
    assert has_ranks(team, "/shared/holdfast/")
    old = last_supervised(team, "moved")["pid"]
    use_new = "export PATH=/shared/holdfast-new/bin:$PATH\n"
    team.as_account(use_new + team.block("exits with status 0 when", page))
    for unit in (team.machine.tree / "etc/systemd/system").glob("holdfast-*.service"):
        unit.write_text(unit.read_text().replace("/shared/holdfast/", "/shared/holdfast-new/"))
    team.as_account(f"{use_new}holdfast deploy\n")
    team.as_root("systemctl restart holdfast-prefect\n")
    wait_for_prefect(team)
    team.as_root("systemctl restart holdfast-worker\n")
    find, kill, take_up = team.block("kill PID", page).replace("RUN/", "moved/").splitlines()
    assert f'"pid": {old}' in team.as_account(f"{find}\n")
    team.as_account(f"{use_new}{kill.replace('PID', str(old))}\n{take_up}\n")
    wait_for("the next supervisor", lambda: last_supervised(team, "moved")["pid"] != old)
    now = str(last_supervised(team, "moved")["pid"])
    assert "/shared/holdfast-new/bin/" in team.machine.run("ps", "-o", "args=", "-p", now)
    assert len(team.holdfast("show", "moved")["attempts"]) == 1
    team.as_root("systemctl restart holdfast-serve\n")
    team.wait_for_health(f"{SITE}/healthz")
    check = team.block("holdfast relaunch RUN", page).replace("RUN", "moved")
    team.as_account(use_new + check)
    wait_for("ranks of the new environment", lambda: has_ranks(team, "/shared/holdfast-new/"))
    team.write("shared/moved/hurry", "")
    wait_for("the end", lambda: is_in_state(team, "moved", "completed"), 180)
    shown = team.holdfast("show", "moved")
    assert (shown["step"], len(shown["attempts"])) == (LONG, 2)


def test_every_block_of_the_pages_was_followed(team: Team) -> None:
    assert not [str(block) for block in team.pages.left()]
