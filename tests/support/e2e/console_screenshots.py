"""Makes the pictures of docs/operate/console.md: `python -m tests.support.e2e.console_screenshots`."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from playwright.async_api import Browser, Page

from sandbox.local_cluster import LocalCluster
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.e2e.browser import run_chromium, run_client_sessions, run_console_cluster

PICTURES = Path("docs/images/console")
DESKTOP, PHONE = {"width": 1200, "height": 760}, {"width": 390, "height": 780}
CLIENTS = 60
CHART_SECONDS = 100.0  # seconds of clients' work that the charts show
NACK_MESSAGE = (
    "malformed IP address: tidb-0.tidb-peer. Consider setting resolver_name or setting cluster type to"
    " 'STRICT_DNS' or 'LOGICAL_DNS'"
)
PageAction = Callable[[Page], Awaitable[None]]


async def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncExitStack() as held:
            stack = await held.enter_async_context(run_console_cluster(Path(directory), None, nodes=5))
            for number, node in enumerate(stack.tidb):
                labels = {"zone": "abc"[number % 3]}
                await stack.api.patch(f"/v1/nodes/{node.address}", json={"labels": labels})
            browser = await held.enter_async_context(run_chromium())
            for part in range(4):
                slow = random.Random(part).uniform(0.05, 0.3)
                await held.enter_async_context(
                    run_client_sessions(stack.sql_port, CLIENTS // 4, pause_seconds=slow)
                )
                await asyncio.sleep(CHART_SECONDS / 4)
            await _take_screenshot(browser, stack, "nodes", "/", prepare=_with_drained_node(stack))
            await _take_screenshot(browser, stack, "nodes-phone", "/", size=PHONE)
            await _take_screenshot(
                browser, stack, "node", f"/console/nodes/{stack.tidb[1].address}", dark=True
            )
            await _take_screenshot(browser, stack, "drain", "/", prepare=_with_drain_dialog(stack))
            await _take_screenshot(
                browser,
                stack,
                "rollout",
                "/console/rollouts",
                prepare=_with_running_rollout(stack),
                dark=True,
            )
            refusing = await held.enter_async_context(FakeEnvoy(stack.advertised.xds, "envoy-2"))
            await refusing.wait_for_endpoints(bool)
            refusing.nack_message = NACK_MESSAGE
            await stack.api.post(f"/v1/nodes/{stack.tidb[4].address}/drain")
            await _take_screenshot(browser, stack, "envoys", "/console/envoys")


async def _take_screenshot(
    browser: Browser,
    stack: LocalCluster,
    name: str,
    path: str,
    *,
    prepare: PageAction | None = None,
    size: dict[str, int] = DESKTOP,
    dark: bool = False,
) -> None:
    context = await browser.new_context(
        base_url=stack.control_plane.api_url,
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if dark else "light",
    )
    page = await context.new_page()
    await page.goto(path)
    if prepare is not None:
        await prepare(page)
    await page.locator("#pulse").filter(has_text="live").wait_for()
    await asyncio.sleep(3.0)  # what is said at the bottom of the page, and charts, have come
    await page.screenshot(path=PICTURES / f"{name}.png")
    await context.close()


def _with_drained_node(stack: LocalCluster) -> PageAction:
    async def drained(page: Page) -> None:
        await stack.api.post(f"/v1/nodes/{stack.tidb[3].address}/drain")
        await page.locator(".state-drained").wait_for(timeout=60_000)

    return drained


def _with_drain_dialog(stack: LocalCluster) -> PageAction:
    async def asked(page: Page) -> None:
        await page.locator(f'[id="drain-{stack.tidb[0].address}"]').click()
        await page.get_by_role("dialog").wait_for()

    return asked


def _with_running_rollout(stack: LocalCluster) -> PageAction:
    async def rolling(page: Page) -> None:
        await stack.api.post(f"/v1/nodes/{stack.tidb[3].address}/undrain")
        order = {"nodes": "all", "healthy_for_seconds": 1, "force": True}
        started = (await stack.api.post("/v1/rollouts", json=order)).raise_for_status().json()
        await page.goto(f"/console/rollouts/{started['id']}")
        for turn, address in enumerate(started["order"]["nodes"][:2]):
            step = page.locator("tr", has=page.get_by_role("link", name=address))
            await step.locator(".badge", has_text="returning").wait_for(timeout=120_000)
            if turn == 0:
                (node,) = [each for each in stack.tidb if each.address == address]
                await node.terminate()
                await node.launch()

    return rolling


if __name__ == "__main__":
    asyncio.run(main())
