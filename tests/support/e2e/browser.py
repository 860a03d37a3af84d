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

from sandbox.local_cluster import Stack
from sandbox.mariadb import MariaDb
from sandbox.session_certificate import SessionCertificate

_SECONDS = 20.0
# What the browser, and htmx, report when a page is left, or a control plane is ended, during a request.
_ENDED = (
    *("net::ERR_CONNECTION_REFUSED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION_RESET"),
    *("net::ERR_EMPTY_RESPONSE", "htmx:sendError", "htmx:afterRequest"),
)


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
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
class Visit:
    """What a browser saw: complaints of its pages, and every host that they asked anything of."""

    context: BrowserContext
    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    outage: bool = False  # the control plane is away on purpose

    def listen(self, page: Page) -> None:
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if not (self.outage and any(each in message.text for each in _ENDED)):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    async def see(self, text: str, within: str = "body") -> None:
        """Returns when the page shows that text."""
        await self.page.locator(within).filter(has_text=text).first.wait_for(timeout=_SECONDS * 1000)


@asynccontextmanager
async def visit(
    browser: Browser, url: str, *, complains: Sequence[str] = (), **how: Any
) -> AsyncIterator[Visit]:
    """A browser of its own at the console, which may have no complaint but these and ask no other host."""
    context = await browser.new_context(base_url=url, **how)
    context.set_default_timeout(_SECONDS * 1000)
    try:
        page = await context.new_page()
        made = Visit(context, page, url)
        made.listen(page)
        yield made
        unexpected = [each for each in made.complaints if not any(known in each for known in complains)]
        assert unexpected == [], unexpected
        assert made.hosts <= {urlsplit(url).netloc}
    finally:
        await context.close()


@asynccontextmanager
async def cluster(
    directory: Path, mariadb: MariaDb | None, *, nodes: int = 3, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[Stack]:
    """Nodes whose sessions can move, behind an Envoy with the module."""
    quick = {"balance": {"slow_start": 1}, **(settings or {})}
    arguments = SessionCertificate.make(directory / "session-certificate").arguments
    async with Stack.start(
        directory, nodes=nodes, mariadb=mariadb, settings=quick, node_arguments=arguments, graceful_wait=3.0
    ) as stack:
        yield stack


@asynccontextmanager
async def sessions(port: int, count: int, rest: float = 0.02) -> AsyncIterator[None]:
    """So many clients that ask again and again; an error of any of them is raised at the end."""
    async with contextlib.AsyncExitStack() as held:
        connections = [
            await held.enter_async_context(asyncmy.connect(host="127.0.0.1", port=port, user="root"))
            for _ in range(count)
        ]
        asking = [asyncio.create_task(_ask(each, rest)) for each in connections]
        try:
            yield
            for task in asking:
                if task.done():
                    task.result()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def _ask(connection: Any, rest: float) -> None:
    while True:
        async with connection.cursor() as cursor:
            await cursor.execute("select 1")
            await cursor.fetchall()
        await asyncio.sleep(rest)
