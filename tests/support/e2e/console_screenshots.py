"""Take the screenshots of docs/operate/console.md: `python -m tests.support.e2e.console_screenshots`."""

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

SCREENSHOT_DIRECTORY = Path("docs/images/console")
DESKTOP, PHONE = {"width": 1200, "height": 760}, {"width": 390, "height": 780}
CLIENTS = 60
CHART_SECONDS = 100.0  # duration of client traffic in the charts
NACK_MESSAGE = (
    "malformed IP address: tidb-0.tidb-peer. Consider setting resolver_name or setting cluster type to"
    " 'STRICT_DNS' or 'LOGICAL_DNS'"
)
PageAction = Callable[[Page], Awaitable[None]]


async def main() -> None:
    SCREENSHOT_DIRECTORY.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - no other task runs yet
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncExitStack() as exit_stack:
            cluster = await exit_stack.enter_async_context(
                run_console_cluster(Path(directory), None, nodes=5)
            )
            for number, node in enumerate(cluster.tidb):
                labels = {"zone": "abc"[number % 3]}
                await cluster.api.patch(f"/v1/nodes/{node.address}", json={"labels": labels})
            browser = await exit_stack.enter_async_context(run_chromium())
            for seed in range(4):
                pause_seconds = random.Random(seed).uniform(0.05, 0.3)
                await exit_stack.enter_async_context(
                    run_client_sessions(cluster.sql_port, CLIENTS // 4, pause_seconds=pause_seconds)
                )
                await asyncio.sleep(CHART_SECONDS / 4)
            await _take_screenshot(browser, cluster, "nodes", "/", prepare=_with_drained_node(cluster))
            await _take_screenshot(browser, cluster, "nodes-phone", "/", size=PHONE)
            await _take_screenshot(
                browser, cluster, "node", f"/console/nodes/{cluster.tidb[1].address}", dark=True
            )
            await _take_screenshot(browser, cluster, "drain", "/", prepare=_with_drain_dialog(cluster))
            await _take_screenshot(
                browser,
                cluster,
                "rollout",
                "/console/rollouts",
                prepare=_with_running_rollout(cluster),
                dark=True,
            )
            rejecting_envoy = await exit_stack.enter_async_context(
                FakeEnvoy(cluster.advertised.xds, "envoy-2")
            )
            await rejecting_envoy.wait_for_endpoints(bool)
            rejecting_envoy.nack_message = NACK_MESSAGE
            await cluster.api.post(f"/v1/nodes/{cluster.tidb[4].address}/drain")
            await _take_screenshot(browser, cluster, "envoys", "/console/envoys")


async def _take_screenshot(
    browser: Browser,
    cluster: LocalCluster,
    name: str,
    path: str,
    *,
    prepare: PageAction | None = None,
    size: dict[str, int] = DESKTOP,
    dark: bool = False,
) -> None:
    context = await browser.new_context(
        base_url=cluster.control_plane.api_url,
        viewport={"width": size["width"], "height": size["height"]},
        color_scheme="dark" if dark else "light",
    )
    page = await context.new_page()
    await page.goto(path)
    if prepare is not None:
        await prepare(page)
    await page.locator("#pulse").filter(has_text="live").wait_for()
    await asyncio.sleep(3.0)  # until the announcements and charts have appeared
    await page.screenshot(path=SCREENSHOT_DIRECTORY / f"{name}.png")
    await context.close()


def _with_drained_node(cluster: LocalCluster) -> PageAction:
    async def prepare(page: Page) -> None:
        await cluster.api.post(f"/v1/nodes/{cluster.tidb[3].address}/drain")
        await page.locator(".state-drained").wait_for(timeout=60_000)

    return prepare


def _with_drain_dialog(cluster: LocalCluster) -> PageAction:
    async def prepare(page: Page) -> None:
        await page.locator(f'[id="drain-{cluster.tidb[0].address}"]').click()
        await page.get_by_role("dialog").wait_for()

    return prepare


def _with_running_rollout(cluster: LocalCluster) -> PageAction:
    async def prepare(page: Page) -> None:
        await cluster.api.post(f"/v1/nodes/{cluster.tidb[3].address}/undrain")
        request = {"nodes": "all", "healthy_for_seconds": 1, "force": True}
        rollout = (await cluster.api.post("/v1/rollouts", json=request)).raise_for_status().json()
        await page.goto(f"/console/rollouts/{rollout['id']}")
        for index, address in enumerate(rollout["spec"]["nodes"][:2]):
            step = page.locator("tr", has=page.get_by_role("link", name=address))
            await step.locator(".badge", has_text="returning").wait_for(timeout=120_000)
            if index == 0:
                (node,) = [server for server in cluster.tidb if server.address == address]
                await node.terminate()
                await node.launch()

    return prepare


if __name__ == "__main__":
    asyncio.run(main())
