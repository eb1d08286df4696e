"""The check `nvrx` against a real gRPC server on a Unix socket."""

from __future__ import annotations

import builtins
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.workers import health_nvrx
from holdfast.workers.health_nvrx import ServiceAnswer, decode_answer, encode_request

SERVICE, METHOD = "nvhcd.HealthCheckService", "RunHealthCheck"
SLOW_S = 2.0


def text(field: int, value: str) -> bytes:
    """A text field of a protobuf message, with a length below 16384."""
    content = value.encode()
    length = [len(content) & 0x7F | 0x80, len(content) >> 7] if len(content) > 127 else None
    return bytes([field << 3 | 2, *(length or [len(content)])]) + content


# Written by hand from the schema: `success` is field 1, `exit_code` 2, `output` 3 and `error` 4.
HEALTHY = bytes([0x08, 1]) + text(3, '{"fail_count": 0, "failed_checks": []}')
BAD_CHECK = bytes([0x08, 1]) + text(3, '{"fail_count": 2, "failed_checks": ["nvlink", "ib"]}')
FAILED = bytes([0x10, 42]) + text(3, "a dump") + text(4, "the script failed" + "!" * 200)
KILLED = bytes([0x10, *[0xF7], *[0xFF] * 8, 0x01]) + text(4, "killed")
NO_COUNT = bytes([0x08, 1]) + text(3, '{"detail": "fine"}')
NO_JSON = bytes([0x08, 1]) + text(3, "fine")


@contextlib.contextmanager
def serving(path: Path, answer: Callable[[bytes], bytes]) -> Iterator[list[bytes]]:
    """A real server; yields the requests that it got, as bytes."""
    asked: list[bytes] = []

    def reply(request: bytes, context: Any) -> bytes:
        asked.append(request)
        return answer(request)

    handler = grpc.unary_unary_rpc_method_handler(reply)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    server.add_insecure_port(f"unix://{path}")
    server.start()
    try:
        yield asked
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("answer", "code", "output"),
    [
        (HEALTHY, 0, "healthy"),
        (BAD_CHECK, 1, "2 checks of the service failed: ['nvlink', 'ib']"),
        (FAILED, 1, "exit status 42: the script failed!"),
        (KILLED, 1, "exit status -9: killed"),
        (NO_COUNT, 1, "expected JSON with fail_count"),
        (NO_JSON, 1, "the service answered 'fine', expected JSON"),
        (b"", 1, "exit status 0: no output"),
        (b"\x0a", 1, "expected an answer of the service RunHealthCheck"),
    ],
)
def test_the_services_answer_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes, code: int, output: str
) -> None:
    path = tmp_path / "nvhcd.sock"
    with serving(path, lambda _: answer) as asked:
        assert health_nvrx.main([str(path)]) == code
    assert output in capsys.readouterr().out
    assert asked == [b"\x0a\x0a--no-slurm"]


def test_arguments_reach_the_service(tmp_path: Path) -> None:
    path = tmp_path / "nvhcd.sock"
    with serving(path, lambda _: HEALTHY) as asked:
        assert health_nvrx.main([f"unix://{path}", "--group", "gpu"]) == 0
    assert asked == [b"\x0a\x07--group\x0a\x03gpu"]


def test_a_service_that_is_absent_or_late_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nvhcd.sock"
    assert health_nvrx.main([str(path)]) == 1
    assert "no answer from the service: UNAVAILABLE" in capsys.readouterr().out
    assert health_nvrx.main(["--optional", str(path)]) == 0

    def answer_late(_: bytes) -> bytes:
        time.sleep(SLOW_S)
        return HEALTHY

    # Another path: for a second, gRPC does not connect again to one that it could not reach.
    late = tmp_path / "late.sock"
    with serving(late, answer_late):
        assert health_nvrx.main(["--timeout-s=0.2", "--optional", str(late)]) == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().out


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'")
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert health_nvrx.main([str(tmp_path / "nvhcd.sock")]) == 1
    said = capsys.readouterr().out
    assert "grpcio is not installed (No module named 'grpc'). Install Holdfast with" in said


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_refused(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(decode_answer(message), ServiceAnswer)


def test_long_texts_are_encoded_and_decoded() -> None:
    output = json.dumps({"fail_count": 0, "detail": "é" * 1000})
    answer = decode_answer(bytes([0x08, 1]) + text(3, output))
    assert (answer.success, answer.output, answer.problem) == (True, output, "")
    long = "x" * 300
    assert encode_request([long]) == b"\x0a\xac\x02" + long.encode()
