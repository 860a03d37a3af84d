"""Headless Chromium for tests of the console, and a cluster with clients that the console shows."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncmy
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request, async_playwright

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate

_WAIT_TIMEOUT_SECONDS = 20.0
# Messages of the browser and of htmx when a page is left or the control plane stops during a request.
_DISCONNECT_MESSAGES = (
    *("net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET"),
    *("net::ERR_EMPTY_RESPONSE", "htmx:sendError", "htmx:afterRequest"),
)


@asynccontextmanager
async def run_chromium() -> AsyncIterator[Browser]:
    """Run Debian's Chromium in headless mode."""
    program = shutil.which("chromium")
    assert program, "install Chromium: apt-get install --no-install-recommends chromium"
    async with async_playwright() as playwright:
        # In most containers a browser cannot create a sandbox. It needs none for the console's own pages.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass  # without slots, because playwright sets an attribute on the object
class ConsoleVisit:
    """A browser context for the console. It records errors, warnings and all requested hosts."""

    context: BrowserContext
    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    expects_outage: bool = False  # The test stops the control plane.

    def listen(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if not (self.expects_outage and any(text in message.text for text in _DISCONNECT_MESSAGES)):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)


@asynccontextmanager
async def open_console(
    browser: Browser, url: str, *, allowed_complaints: Sequence[str] = (), **context_options: Any
) -> AsyncIterator[ConsoleVisit]:
    """Visit the console in a new context. Requests to other hosts and unexpected complaints fail the test."""
    context = await browser.new_context(base_url=url, **context_options)
    context.set_default_timeout(_WAIT_TIMEOUT_SECONDS * 1000)
    try:
        page = await context.new_page()
        visit = ConsoleVisit(context, page, url)
        visit.listen(page)
        yield visit
        unexpected = [
            complaint
            for complaint in visit.complaints
            if not any(allowed in complaint for allowed in allowed_complaints)
        ]
        assert unexpected == [], unexpected
        assert visit.hosts <= {urlsplit(url).netloc}
    finally:
        await context.close()


@asynccontextmanager
async def run_console_cluster(
    directory: Path, mariadb: MariaDb | None, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[LocalCluster]:
    """Run nodes whose sessions can migrate, behind an Envoy with the module."""
    fast_settings = {"balance": {"slow_start": 1}, **(settings or {})}
    arguments = SessionCertificate.load_or_create(directory / "session-certificate").arguments
    async with LocalCluster.start(
        directory,
        nodes=nodes,
        mariadb=mariadb,
        settings=fast_settings,
        node_arguments=arguments,
        graceful_wait=3.0,
    ) as cluster:
        yield cluster


@asynccontextmanager
async def run_client_sessions(port: int, count: int, pause_seconds: float = 0.02) -> AsyncIterator[None]:
    """Run `count` clients that query repeatedly. At the end, raise the error of a failed client."""
    async with contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(asyncmy.connect(host="127.0.0.1", port=port, user="root"))
            for _ in range(count)
        ]
        tasks = [
            asyncio.create_task(_query_repeatedly(connection, pause_seconds)) for connection in connections
        ]
        try:
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _query_repeatedly(connection: Any, pause_seconds: float) -> None:
    while True:
        async with connection.cursor() as cursor:
            await cursor.execute("select 1")
            await cursor.fetchall()
        await asyncio.sleep(pause_seconds)
