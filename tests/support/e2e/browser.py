"""Headless Chromium at the console, and a cluster with clients for it to look at."""

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
# What the browser, and htmx, report when a page is left, or a control plane is ended, during a request.
_DISCONNECT_MESSAGES = (
    *("net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET"),
    *("net::ERR_EMPTY_RESPONSE", "htmx:sendError", "htmx:afterRequest"),
)


@asynccontextmanager
async def run_chromium() -> AsyncIterator[Browser]:
    """Debian's Chromium, without a window."""
    program = shutil.which("chromium")
    assert program, "install Chromium: apt-get install --no-install-recommends chromium"
    async with async_playwright() as playwright:
        # A container seldom lets a browser make its own sandbox; it shows nothing but our own pages here.
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass  # without slots: playwright keeps something of its own in whose methods it calls
class ConsoleVisit:
    """What a browser saw: complaints of its pages, and every host that they asked anything of."""

    context: BrowserContext
    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    expects_outage: bool = False  # the control plane is away on purpose

    def listen(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if not (self.expects_outage and any(each in message.text for each in _DISCONNECT_MESSAGES)):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    async def wait_for_text(self, text: str, within: str = "body") -> None:
        """Returns when the page shows that text."""
        await (
            self.page.locator(within)
            .filter(has_text=text)
            .first.wait_for(timeout=_WAIT_TIMEOUT_SECONDS * 1000)
        )


@asynccontextmanager
async def open_console(
    browser: Browser, url: str, *, allowed_complaints: Sequence[str] = (), **context_options: Any
) -> AsyncIterator[ConsoleVisit]:
    """A browser of its own at the console, which may have no complaint but these and ask no other host."""
    context = await browser.new_context(base_url=url, **context_options)
    context.set_default_timeout(_WAIT_TIMEOUT_SECONDS * 1000)
    try:
        page = await context.new_page()
        made = ConsoleVisit(context, page, url)
        made.listen(page)
        yield made
        unexpected = [
            each for each in made.complaints if not any(known in each for known in allowed_complaints)
        ]
        assert unexpected == [], unexpected
        assert made.hosts <= {urlsplit(url).netloc}
    finally:
        await context.close()


@asynccontextmanager
async def run_console_cluster(
    directory: Path, mariadb: MariaDb | None, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[LocalCluster]:
    """Nodes whose sessions can move, behind an Envoy with the module."""
    quick = {"balance": {"slow_start": 1}, **(settings or {})}
    arguments = SessionCertificate.load_or_create(directory / "session-certificate").arguments
    async with LocalCluster.start(
        directory, nodes=nodes, mariadb=mariadb, settings=quick, node_arguments=arguments, graceful_wait=3.0
    ) as stack:
        yield stack


@asynccontextmanager
async def run_client_sessions(port: int, count: int, pause_seconds: float = 0.02) -> AsyncIterator[None]:
    """So many clients that ask again and again; an error of any of them is raised at the end."""
    async with contextlib.AsyncExitStack() as held:
        connections = [
            await held.enter_async_context(asyncmy.connect(host="127.0.0.1", port=port, user="root"))
            for _ in range(count)
        ]
        asking = [asyncio.create_task(_query_repeatedly(each, pause_seconds)) for each in connections]
        try:
            yield
            for task in asking:
                if task.done():
                    task.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def _query_repeatedly(connection: Any, rest: float) -> None:
    while True:
        async with connection.cursor() as cursor:
            await cursor.execute("select 1")
            await cursor.fetchall()
        await asyncio.sleep(rest)
