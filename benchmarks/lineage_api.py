"""The same queries through the server's routes: JSON over HTTP, without a network."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx
from benchmarks.lineage_report import Took, computed_s
from fastapi import FastAPI

from holdfast.api.app import create_app
from holdfast.api.hub import Hub
from holdfast.api.security import AccessPolicy
from holdfast.api.services import Services
from holdfast.api.store import IndexStore
from holdfast.api.tokens import Role, TokenStore
from holdfast.api.watch import Watch
from holdfast.cli.shared.collector import return_free_memory
from holdfast.lineage.database.sqlite_file import URL_VARIABLE
from holdfast.lineage.index import Index

PREFIX: Final = "/api/v1"
HEADERS: Final = {"host": "127.0.0.1"}


def took_ms(url: str, asks: dict[str, list[list[str]]]) -> dict[str, Took]:
    """Return the time of each request by name. A request is all paths that a page gets at once."""
    os.environ[URL_VARIABLE] = url
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        tokens = TokenStore(Path(folder) / "tokens.json")
        HEADERS["authorization"] = f"Bearer {tokens.issue('bench', Role.READER)[1]}"
        app = _app(Path(folder), tokens)
        return_free_memory()
        return asyncio.run(_ask_all(app, asks))


def _app(home: Path, tokens: TokenStore) -> FastAPI:
    """Return the application without runs on disk to watch and without a way to start one."""

    def refuse(*_given: Any) -> NoReturn:
        raise RuntimeError("the benchmark does not start runs")

    store, hub = IndexStore(Index()), Hub()
    return create_app(
        Services(
            store=store,
            watch=Watch(store, hub, (home,)),
            hub=hub,
            access_policy=AccessPolicy(),
            tokens=tokens,
            roots=(home,),
            start=refuse,
            fork=refuse,
            check=refuse,
        )
    )


async def _ask_all(app: FastAPI, asks: dict[str, list[list[str]]]) -> dict[str, Took]:
    transport = httpx.ASGITransport(app=app)
    took: dict[str, Took] = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for name, samples in asks.items():
            await _get(client, samples[0])
            before_s = computed_s()
            by_clock = [await _get(client, paths) for paths in samples]
            took[name] = Took(by_clock, 1000 * (computed_s() - before_s) / len(samples))
    return took


async def _get(client: httpx.AsyncClient, paths: list[str]) -> float:
    """Get the paths one after another and return the milliseconds."""
    started = time.perf_counter()
    for path in paths:
        answer = await client.get(PREFIX + path, headers=HEADERS, timeout=120)
        answer.raise_for_status()
    return 1000 * (time.perf_counter() - started)
