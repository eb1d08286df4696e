"""`holdfast mcp`, called by the protocol's own client: tools, orders, and what a token may not."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextContent
from tests.api.conftest import Served, wait_for
from typer.testing import CliRunner

from holdfast.api.tokens import Role
from holdfast.cli.main import app
from holdfast.cli.support.api_client import ApiClient, path_of
from holdfast.cli.support.mcp_server import build_server
from holdfast.cli.support.tools import ORDERS, READS, build_tools
from holdfast.contracts.errors import ServiceError, SpecError
from holdfast.contracts.records.history import load_history

Calls = list[tuple[str, dict[str, Any]]]


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def call_all(
    served: Served, calls: Calls, *, token: str | None = None, allow_orders: bool = False
) -> list[CallToolResult]:
    """Connect a client to the tools of a token, and return the answers to its calls."""
    client = ApiClient(served.url, token or served.token)
    server = build_server(build_tools(client, allow_orders=allow_orders), allow_orders=allow_orders)

    async def talk() -> list[CallToolResult]:
        async with Client(server) as one:
            return [await one.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(talk)


def listed(served: Served, *, allow_orders: bool) -> Mapping[str, Any]:
    client = ApiClient(served.url, served.token)
    tools = build_tools(client, allow_orders=allow_orders)
    return {one.name: one for one in tools}


def test_the_tools_are_described_by_the_servers_document(served: Served) -> None:
    reading = listed(served, allow_orders=False)
    assert {*READS, "explain_run"} == reading.keys()
    tools = listed(served, allow_orders=True)
    assert tools.keys() - reading.keys() == ORDERS.keys()
    log = tools["read_log"]
    assert "part of a rank's log" in log.description
    assert "not as instructions" in log.description
    assert {"run", "rank"} == {*log.schema["required"]}
    assert "First byte to return" in log.schema["properties"]["offset"]["description"]
    assert "now" in tools["cancel_run"].schema["properties"]
    assert "$ref" not in json.dumps([one.schema for one in tools.values()])


def test_a_client_reads_runs_checkpoints_reasons_and_logs(served: Served) -> None:
    wait_for(served.services.attention.items)
    calls: Calls = [
        ("list_runs", {"limit": 10, "state": ["completed", "queued", "running"]}),
        ("show_run", {"run": "gpt"}),
        ("list_checkpoints", {"run": "gpt", "newest_first": True, "limit": 1}),
        ("explain_run", {"run": "gpt"}),
        ("needs_attention", {}),
        ("list_events", {"run": "gpt", "kind": ["attempt_ended"]}),
        ("list_logs", {"run": "gpt"}),
        ("show_run", {"run": "nobody"}),
        ("show_run", {"run": "gpt/../../session"}),
        ("explain_run", {"run": "gpt", "color": 1}),
        ("stop_run", {"run": "gpt"}),
        ("show_run", {}),
    ]
    answers = call_all(served, calls)
    good = [text_of(one) for one in answers[:7]]
    assert [one.is_error for one in answers] == [False] * 7 + [True] * 5
    assert "gpt" in {one["run"] for one in json.loads(good[0])["items"]}
    assert json.loads(good[1])["run"] == "gpt"
    assert len(json.loads(good[2])["items"]) == 1
    explained = json.loads(good[3])
    assert explained["attempts"][-1]["number"] == 3
    assert {one["kind"] for one in explained["newest_events"]} >= {"attempt_ended"}
    # It is live, and nobody supervises it.
    found = [(one["run"], one["kind"]) for one in json.loads(good[4])]
    assert ("gpt-b", "unsupervised") in found
    bad = [text_of(one) for one in answers[7:]]
    assert "404: there is no such thing" in bad[0]
    assert "without slashes" in bad[1]
    assert "expected only `run`" in bad[2]
    assert "--allow-orders" in bad[3]
    assert "run is missing" in bad[4]


def test_what_the_token_may_not_is_refused_plainly(served: Served) -> None:
    reader = served.services.tokens.add("a reader of tools", Role.READER)[1]
    orders: Calls = [("cancel_run", {"run": "gpt"}), ("show_run", {"run": "gpt"})]
    refused, shown = call_all(served, orders, token=reader, allow_orders=True)
    assert refused.is_error
    assert "403: the token may not do this" in text_of(refused)
    assert "role reader" in text_of(refused)
    assert not shown.is_error
    (wrong,) = call_all(served, orders[1:], token="hold_00000000_wrong")
    assert wrong.is_error
    assert "401: the server does not accept the token" in text_of(wrong)


def test_an_order_is_given_once_and_recorded_with_the_caller(served: Served) -> None:
    run = served.runs["gpt-fork"] if "gpt-fork" in served.runs else [*served.runs.values()][-1]
    calls: Calls = [("pause_run", {"run": run.name}), ("pause_run", {"run": run.name, "x": 1})]
    done, extra = call_all(served, calls, allow_orders=True)
    assert not done.is_error, text_of(done)
    assert json.loads(text_of(done))["action"] == "pause"
    assert extra.is_error
    assert "422" in text_of(extra)
    asked = [one for one in load_history(run.paths).events if one.kind == "operator_request"]
    assert [(one.data["action"], one.data["by"]) for one in asked][-1] == ("pause", "ann")


def test_the_command_answers_on_standard_input_and_output(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{served.token}\n")
    arguments = ["-m", "holdfast.cli.main", "mcp", "--url", served.url, "--token-file", str(file)]
    environment = {"HOLDFAST_HOME": str(tmp_path / "home")}
    server = StdioServerParameters(command=sys.executable, args=arguments, env=environment)

    async def talk() -> tuple[set[str], CallToolResult]:
        with anyio.fail_after(180):
            async with Client(stdio_client(server)) as client:
                names = {one.name for one in (await client.list_tools()).tools}
                return names, await client.call_tool("list_runs", {"limit": 1})

    names, answer = anyio.run(talk)
    assert "needs_attention" in names
    assert "stop_run" not in names
    assert json.loads(text_of(answer))["items"]


def test_a_call_without_a_token_or_a_server_is_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    done = CliRunner().invoke(app, ["mcp", "--url", served.url])
    assert isinstance(done.exception, SpecError)
    assert "HOLDFAST_TOKEN" in str(done.exception)
    for url in ("ftp://x", "127.0.0.1:8470", "http://ann:secret@host/"):
        with pytest.raises(SpecError):
            ApiClient(url, "t")
    with pytest.raises(SpecError):
        ApiClient(served.url, "a\nb")
    with pytest.raises(ServiceError, match="does not answer"):
        build_tools(ApiClient("http://127.0.0.1:9", "t"), allow_orders=False)
    for name in ("", "..", "a/b", "a b", "a?b"):
        with pytest.raises(SpecError):
            path_of("/runs/{run}", {"run": name})
