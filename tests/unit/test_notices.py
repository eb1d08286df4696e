"""The watchers of cloud notices, tested with services in the clouds' formats and hostile ones."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.metadata_server import (
    AwsService,
    AzureService,
    GcpService,
    MetadataServer,
    json_reply,
    serving,
    text_reply,
)

from holdfast.contracts.errors import NoticeError
from holdfast.contracts.spec.sections import Supervision
from holdfast.workers.agent.notices import aws, metadata
from holdfast.workers.agent.notices.aws import Aws, read_action, read_rebalance
from holdfast.workers.agent.notices.azure import read_events
from holdfast.workers.agent.notices.metadata import Metadata, MetadataAnswer
from holdfast.workers.agent.notices.notice import Notice, deadline_of
from holdfast.workers.agent.notices.watch import NoticeWatch, build_clouds

WAIT_S = 40.0
NOW = 1_505_722_800.0  # 2017-09-18 08:20:00 UTC


def answer_of(text: str) -> MetadataAnswer:
    return MetadataAnswer(200, text.encode(), {})


def wait_for(look: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


@contextlib.contextmanager
def watching(mode: str, url: str, notes: list[str]) -> Iterator[NoticeWatch]:
    watch = NoticeWatch(mode, url, {}, notes.append)
    try:
        yield watch
    finally:
        watch.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2017-09-18T08:22:00Z", NOW + 120),
        ("Mon, 18 Sep 2017 08:20:30 GMT", NOW + 30),
        ("2017-09-18T08:22:00", NOW + 120),
        ("2017-09-18T08:19:00Z", NOW + 99),  # a clock is wrong
        ("2038-01-01T00:00:00Z", NOW + 99),
        ("", NOW + 99),
        ("soon", NOW + 99),
        (None, NOW + 99),
        (17, NOW + 99),
        ([], NOW + 99),
    ],
)
def test_a_deadline_is_parsed_or_falls_back_to_the_lead_time(text: object, expected: float) -> None:
    assert deadline_of(text, now=NOW, lead_s=99.0) == expected


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_ec2_interruption_asks_for_a_stop(action: str) -> None:
    text = f'{{"action": "{action}", "time": "2017-09-18T08:22:00Z"}}'
    notice = read_action(answer_of(text), NOW)
    assert (notice.wants, notice.deadline) == ("stop", NOW + 120)
    assert action in notice.detail


def test_an_ec2_rebalance_recommendation_asks_for_a_save() -> None:
    notice = read_rebalance(answer_of('{"noticeTime": "2020-10-27T08:22:00Z"}'))
    assert (notice.wants, notice.deadline) == ("save", None)


INVALID = [
    "",
    "<html>captive portal</html>",
    "[]",
    "null",
    "17",
    '{"action": 3}',
    '{"noticeTime": {}}',
    '{"Events": {}}',
    '{"action": ["terminate"]}',
    "[" * 50_000,
    "\x00\xff",
]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_answers_raise_notice_errors(text: str) -> None:
    with pytest.raises(NoticeError):
        read_action(answer_of(text), NOW)
    with pytest.raises(NoticeError):
        read_rebalance(answer_of(text))
    with pytest.raises(NoticeError):
        read_events(answer_of(text), machine="vm", now=NOW)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        ({"EventType": "Preempt", "Resources": ["vm"], "EventId": "e"}, 1),
        ({"EventType": "Terminate", "Resources": ["other", "vm"], "EventId": "e"}, 1),
        ({"EventType": "Preempt", "Resources": ["other"], "EventId": "e"}, 0),
        ({"EventType": "Freeze", "Resources": ["vm"], "EventId": "e"}, 0),
        ({"EventType": "Preempt", "Resources": "vm", "EventId": 5, "NotBefore": 7}, 1),
        ({"EventType": None}, 0),
        ({"EventType": []}, 0),
        ("Preempt", 0),
    ],
)
def test_azure_events_become_notices_of_this_machine(event: Any, count: int) -> None:
    answer = MetadataAnswer(200, json_reply({"DocumentLaunch": 1, "Events": [event]})[2], {})
    found = read_events(answer, machine="vm", now=NOW)
    assert len(found) == count
    assert all(notice.deadline == NOW + 30 for notice in found)


def test_ec2_is_watched_with_a_token_that_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aws, "every_s", 0.2)
    notes: list[str] = []
    with serving(AwsService()) as service:
        cloud = Aws(service.url)
        assert cloud.look(time.time()) == []
        service.token = "another"
        service.rebalance = {"noticeTime": "2020-10-27T08:22:00Z"}
        assert [notice.wants for notice in cloud.look(time.time())] == ["save"]
        assert service.paths().count(("PUT", aws.TOKEN)) == 2
        service.action = {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
        with watching("aws", service.url, notes) as watch:
            found = wait_for(watch.take, "the notices")
            assert [notice.wants for notice in found] == ["stop", "save"]
            asked = len(service.asked)
            wait_for(lambda: len(service.asked) > asked, "another look")
            assert watch.take() == [], "a notice was reported twice"
    assert notes == []


@pytest.mark.more
def test_gcp_is_watched_with_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # The proxy does not exist, so a request through it would fail.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    notes: list[str] = []
    with serving(GcpService()) as service, watching("gcp", service.url, notes) as watch:
        wait_for(lambda: len(service.asked) >= 4, "requests that wait")
        assert watch.take() == []
        service.change("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        time.sleep(0.3)
        assert watch.take() == [], "a live migration is no notice"
        before = time.time()
        service.change("preempted", "TRUE")
        (notice,) = wait_for(watch.take, "the notice")
        assert notice.wants == "stop"
        assert before + 29 < notice.deadline < time.time() + 30
        service.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        (notice,) = wait_for(watch.take, "the second notice")
        assert "TERMINATE_ON_HOST_MAINTENANCE" in notice.detail
    assert notes == []


def test_azure_is_watched_and_acknowledged_on_request() -> None:
    notes: list[str] = []
    with serving(AzureService()) as service:
        service.preempt("other", name="train_7")
        with watching("azure", service.url, notes) as watch:
            wait_for(lambda: len(service.asked) >= 2, "a look")
            assert watch.take() == [], "an event of another machine was reported"
            service.preempt("mine", name=service.name)
            (notice,) = wait_for(watch.take, "the notice")
            assert (notice.wants, notice.event_id) == ("stop", "mine")
            assert time.time() + 50 < notice.deadline < time.time() + 61
            assert service.started == []
            watch.acknowledge()
            assert [event for event, _ in service.started] == ["mine"]
    assert notes == ["azure: acknowledged mine"]


@pytest.mark.more
@pytest.mark.parametrize("service", [AwsService(), GcpService(), AzureService()])
def test_auto_detects_the_cloud_without_notes_about_the_others(service: Any) -> None:
    notes: list[str] = []
    with serving(service), watching("auto", service.url, notes) as watch:
        if isinstance(service, AwsService):
            service.action = {"action": "stop", "time": "x"}
        elif isinstance(service, GcpService):
            service.change("preempted", "TRUE")
        else:
            service.preempt("mine", name=service.name)
        (notice,) = wait_for(watch.take, "the notice")
        assert notice.cloud == type(service).__name__.removesuffix("Service").lower()
    assert notes == []


def test_the_metadata_service_addresses() -> None:
    def bases(mode: str, url: str = "", **variables: str) -> list[str]:
        clouds: list[Any] = list(build_clouds(mode, url, variables))
        return [f"{cloud.name} {cloud._service._base}" for cloud in clouds]

    local = "http://169.254.169.254"
    assert bases("auto") == [f"aws {local}", f"gcp {local}", f"azure {local}"]
    assert bases("off", "http://a:1") == []
    assert bases("azure", "http://a:1", HOLDFAST_NOTICES_URL="http://b:2") == ["azure http://a:1"]
    assert bases("gcp", HOLDFAST_NOTICES_URL="http://b:2") == ["gcp http://b:2"]
    assert bases("gcp", GCE_METADATA_HOST="c:3") == ["gcp http://c:3"]
    assert bases("aws", AWS_EC2_METADATA_SERVICE_ENDPOINT="http://d") == ["aws http://d"]
    assert bases("auto", AWS_EC2_METADATA_DISABLED="true")[0] == f"gcp {local}"


@pytest.mark.parametrize("url", ["https://a", "a:80", "http://", "http://a b", "file:///x"])
def test_an_invalid_notices_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected an HTTP address"):
        Supervision(notices_url=url)


# --- hostile services -------------------------------------------------------------------------


def hang(connection: socket.socket, over: threading.Event) -> None:
    over.wait(WAIT_S)


def close(connection: socket.socket, over: threading.Event) -> None:
    connection.close()


def drip(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b"x")


def drip_head(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not over.wait(0.05):
        connection.sendall(b"x")


def flood(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"x" * 65536)


def send_garbage(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"\x00\x01 I am no web server\r\n\r\n")
    over.wait(0.1)


HOSTILE = [hang, close, drip, drip_head, flood, send_garbage]


@contextlib.contextmanager
def listening(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The address of a service that answers every connection with `behave`."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            behave(connection, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_hostile_services_do_no_harm_and_are_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Aws, "every_s", 0.2)
    monkeypatch.setattr(metadata, "REQUEST_TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as stack:
        reported: dict[str, list[str]] = {}
        watches = []
        for behave in HOSTILE:
            notes = reported.setdefault(behave.__name__, [])
            url = stack.enter_context(listening(behave))
            watches.append(stack.enter_context(watching("aws", url, notes)))
        elsewhere = stack.enter_context(serving(AwsService()))
        elsewhere.answers["PUT " + aws.TOKEN] = text_reply("t")
        astray = stack.enter_context(serving(MetadataServer()))
        away = {"Location": elsewhere.url + aws.TOKEN}
        astray.answers["PUT " + aws.TOKEN] = (302, away, b"")
        notes = reported.setdefault("redirected", [])
        watches.append(stack.enter_context(watching("aws", astray.url, notes)))
        wait_for(lambda: all(reported.values()), f"a note about each of {list(reported)}")
        looks = len(astray.asked)
        wait_for(lambda: len(astray.asked) > looks, "another look")
        assert {name: len(words) for name, words in reported.items()} == dict.fromkeys(reported, 1)
        assert [watch.take() for watch in watches] == [[]] * len(watches)
        assert elsewhere.asked == [], "a redirect was followed"
        # The watcher uses a service again when it works again.
        astray.answers["PUT " + aws.TOKEN] = text_reply("t")
        later = {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
        astray.answers["GET " + aws.ACTION] = json_reply(later)
        (notice,) = wait_for(watches[-1].take, "the notice")
        assert notice == Notice(
            cloud="aws", wants="stop", deadline=notice.deadline, detail=notice.detail
        )


def test_a_request_ends_at_its_timeout_and_when_it_is_closed() -> None:
    for behave in (hang, drip, drip_head):
        with listening(behave) as url:
            with pytest.raises(NoticeError):
                Metadata(url).ask("GET", "/", {}, timeout_s=0.3)
            service, failed = Metadata(url), threading.Event()

            def wait(service: Metadata = service, failed: threading.Event = failed) -> None:
                with contextlib.suppress(NoticeError):
                    service.ask("GET", "/", {}, timeout_s=WAIT_S * 10)
                failed.set()

            threading.Thread(target=wait, daemon=True).start()
            time.sleep(0.1)
            service.close()
            assert failed.wait(WAIT_S)
