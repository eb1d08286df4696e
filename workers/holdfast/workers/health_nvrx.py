"""The check `nvrx`: asks a health-check service of NVIDIA Resiliency Extension (NVRx).

    python -m holdfast.workers.health_nvrx /var/run/nvhcd.sock [ARGUMENTS]

The service runs on each node. It listens on a Unix socket and has one gRPC method, which takes
arguments for its check. The node is healthy if the service reports success and its output is JSON
with a `fail_count` of 0. These are the rules of NVRx's own launcher. The two messages have so few
fields that this module encodes and decodes them itself, without generated code.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

METHOD: Final = "/nvhcd.HealthCheckService/RunHealthCheck"
ARGUMENTS: Final = ("--no-slurm",)
SCHEME: Final = "unix://"
TIMEOUT_S: Final = 60.0
# Numbers of protobuf's wire types, and of the fields of the two messages.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
ASKED_ARGUMENT: Final = 1
SUCCESS, EXIT_CODE, OUTPUT, ERROR = 1, 2, 3, 4
VARINT_BITS_MAX: Final = 64


@dataclass(frozen=True, kw_only=True)
class ServiceAnswer:
    """What the service answered. `output` is JSON if the service is as expected."""

    success: bool = False
    exit_code: int = 0
    output: str = ""
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the node is unhealthy, or ''."""
        if not self.success:
            return f"the service's check ended with exit status {self.exit_code}: " + (
                self.error or self.output or "no output"
            )
        try:
            found = json.loads(self.output)
            failures = found["fail_count"]
        except (ValueError, LookupError, TypeError):
            return f"the service answered {self.output!r}, expected JSON with fail_count"
        if failures == 0:
            return ""
        return f"{failures} checks of the service failed: {found.get('failed_checks', '')}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.workers.health_nvrx", description=__doc__)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="time for the answer")
    parser.add_argument("--optional", action="store_true", help="healthy if there is no service")
    parser.add_argument("socket", help="path of the service's Unix socket, or unix://PATH")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="arguments for the service")
    given = parser.parse_args(arguments)
    try:
        import grpc  # Optional: only this check needs it.
    except ImportError as error:
        print(
            f"grpcio is not installed ({error}). Install Holdfast with the extra `nvrx` in this "
            "environment"
        )
        return 1
    path = Path(given.socket.removeprefix(SCHEME)).absolute()
    request = encode_request(given.words or ARGUMENTS)
    try:
        with grpc.insecure_channel(f"{SCHEME}{path}") as channel:
            answer = decode_answer(channel.unary_unary(METHOD)(request, timeout=given.timeout_s))
    except grpc.RpcError as error:
        is_absent = error.code() is grpc.StatusCode.UNAVAILABLE
        print(f"{path}: no answer from the service: {error.code().name}: {error.details()}")
        return 0 if given.optional and is_absent else 1
    except ValueError as error:
        print(f"{path}: expected an answer of the service RunHealthCheck: {error}")
        return 1
    print(answer.problem or "healthy")
    return 1 if answer.problem else 0


def encode_request(words: Sequence[str]) -> bytes:
    """Return the request with the arguments `words`."""
    message = bytearray()
    for word in words:
        text = word.encode()
        message += bytes([ASKED_ARGUMENT << 3 | BYTES]) + _varint(len(text)) + text
    return bytes(message)


def decode_answer(message: bytes) -> ServiceAnswer:
    """Return the answer in `message`. Raises `ValueError` for other bytes."""
    found: dict[int, Any] = dict(_fields(message))
    number = found.get(EXIT_CODE, 0)
    return ServiceAnswer(
        success=found.get(SUCCESS, 0) == 1,
        # Negative numbers are sent as if they had 64 bits.
        exit_code=number - (1 << 64) if isinstance(number, int) and number >> 63 else number,
        output=_text(found.get(OUTPUT, b"")),
        error=_text(found.get(ERROR, b"")),
    )


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a text field has a number")
    return value.decode(errors="replace")


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field. Raises `ValueError` for other bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == VARINT:
            number, at = _read_varint(message, at)
            yield key >> 3, number
            continue
        if kind not in {FIXED64, BYTES, FIXED32}:
            raise ValueError(f"wire type {kind} at byte {at}")
        if kind == BYTES:
            length, at = _read_varint(message, at)
        else:
            length = 8 if kind == FIXED64 else 4
        if at + length > len(message):
            raise ValueError(f"a field of {length} bytes at byte {at} of {len(message)}")
        yield key >> 3, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, VARINT_BITS_MAX, 7):
        if at >= len(message):
            raise ValueError(f"the message ends within a number at byte {at}")
        number |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return number, at
    raise ValueError(f"a number of more than {VARINT_BITS_MAX} bits at byte {at}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
