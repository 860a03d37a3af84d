"""The console in headless Chromium on a real cluster: operations, live updates, accessibility, login."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from tests.support.controlplane.api_server import run_api_server, settings
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.e2e.browser import (
    ConsoleVisit,
    open_console,
    run_chromium,
    run_client_sessions,
    run_console_cluster,
)
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SESSIONS = 9
VIEWER_TOKEN, OPERATOR_TOKEN = "tvy_of-a-viewer", "tvy_of-an-operator"
PHONE = {"width": 390, "height": 844}
LONG_TIMEOUT_MILLISECONDS = 60_000
expect.set_options(timeout=20_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with run_chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[LocalCluster]:
    async with run_console_cluster(tmp_path_factory.mktemp("console"), mariadb) as started:
        yield started
        assert started.violations() == []


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Browser, cluster: LocalCluster) -> AsyncIterator[ConsoleVisit]:
    """Open the cluster's console in a browser."""
    async with open_console(browser, cluster.control_plane.api_url) as console_visit:
        yield console_visit


def row_selector(address: str) -> str:
    return f'tr:has(a[id="node-{address}"])'


async def all_active(cluster: LocalCluster) -> bool:
    return set((await cluster.states()).values()) == {"active"}


async def test_drained_node_shows_its_sessions_leaving(visit: ConsoleVisit, cluster: LocalCluster) -> None:
    page, node = visit.page, cluster.tidb[0].address
    async with run_client_sessions(cluster.sql_port, SESSIONS):
        await page.goto("/")
        node_row = page.locator(row_selector(node))
        await expect(node_row.locator("td[data-label=Sessions]")).to_have_text("3")
        await node_row.get_by_role("link", name="Drain …").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_role("heading")).to_have_text(f"Drain {node}?")
        await expect(dialog).to_contain_text("Its 3 sessions migrate to the other 2 nodes")
        await dialog.get_by_label("Minutes").fill("-1")
        # Disable the browser's own validation to test the server's.
        await dialog.locator("form").evaluate("form => form.noValidate = true")
        await dialog.get_by_role("button", name="Drain").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("greater than or equal to 0")
        visit.complaints.clear()  # browsers report each 4xx response
        await dialog.get_by_label("Minutes").fill("5")
        await dialog.get_by_role("button", name="Drain").click()
        await expect(dialog).to_be_hidden()
        await expect(node_row.locator(".badge")).to_have_text("drained")
        await expect(node_row.locator("td[data-label=Sessions]")).to_have_text("0")
        await expect(page.locator("#announcement")).to_contain_text(node)

        await node_row.get_by_role("link", name=node).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(node)
        await expect(page.locator("#sessions")).to_contain_text("0")
        await expect(page.locator(".chart canvas")).to_have_count(3)
        await page.get_by_role("link", name="Undrain …").click()
        await page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
        await expect(page.locator("h1 + .badge")).to_have_text("active")
    await wait_until(lambda: all_active(cluster))


async def test_rollout_is_previewed_started_paused_and_completed(
    visit: ConsoleVisit, cluster: LocalCluster
) -> None:
    page, node = visit.page, cluster.tidb[1]
    await page.goto("/console/rollouts")
    await page.get_by_role("link", name="Start a rollout …").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Nodes all").fill(node.address)
    await dialog.get_by_text("Deadlines and failures").click()
    await dialog.get_by_label("Seconds healthy").fill("1")
    await dialog.get_by_role("button", name="Preview").click()
    await expect(dialog.get_by_role("heading", name="1 node in this order")).to_be_visible()
    await expect(dialog.locator("ol")).to_contain_text(node.address)
    await dialog.get_by_role("button", name="Start").click()
    await page.wait_for_url("**/console/rollouts/*")
    step = page.locator("tr", has=page.get_by_role("link", name=node.address))
    await expect(step.locator(".badge")).to_have_text("returning", timeout=LONG_TIMEOUT_MILLISECONDS)
    await page.get_by_role("link", name="Pause …").click()
    await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    await expect(page.locator("h1 + .badge")).to_have_text("paused")
    await page.get_by_role("link", name="Resume …").click()
    await page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    await expect(page.locator("h1 + .badge")).to_have_text("running")
    await node.terminate()
    await node.launch()
    await expect(step.locator(".badge")).to_have_text("done", timeout=LONG_TIMEOUT_MILLISECONDS)
    await expect(page.locator("h1 + .badge")).to_have_text("done")
    assert await page.locator("progress").first.evaluate("bar => bar.value === bar.max")
    await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Rollouts").click()
    await expect(page.locator(".list .badge").first).to_have_text("done")
    await wait_until(lambda: all_active(cluster))


async def test_nack_of_an_envoy_appears_without_a_reload(visit: ConsoleVisit, cluster: LocalCluster) -> None:
    page = visit.page
    await page.goto("/console/envoys")
    await expect(page.get_by_role("rowheader", name="envoy-1")).to_be_visible()
    async with FakeEnvoy(cluster.advertised.xds, "envoy-that-rejects") as envoy:
        await envoy.wait_for_endpoints(bool)
        await expect(page.get_by_role("rowheader", name="envoy-that-rejects")).to_be_visible()
        envoy.nack_message = "<b>no</b> such <img src=x onerror=alert(1)> cluster"
        await cluster.api.patch(f"/v1/nodes/{cluster.tidb[0].address}", json={"weight": 400})
        await expect(page.locator(".nack pre")).to_have_text(envoy.nack_message)
        await expect(page.locator("main img")).to_have_count(0)
        await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Events").click()
        await expect(page.locator(".kind", has_text="envoy.nack").first).to_be_visible()
    await cluster.api.patch(f"/v1/nodes/{cluster.tidb[0].address}", json={"weight": 100})


async def test_console_is_usable_with_the_keyboard_alone(visit: ConsoleVisit, cluster: LocalCluster) -> None:
    page, node = visit.page, cluster.tidb[2].address
    keyboard = page.keyboard
    await page.goto("/")
    await keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await keyboard.press("Enter")
    drain = page.locator(f'[id="drain-{node}"]')
    for _ in range(60):
        await keyboard.press("Tab")
        if await drain.evaluate("link => link === document.activeElement"):
            break
    await expect(drain).to_be_focused()
    assert await drain.evaluate("link => getComputedStyle(link).outlineStyle") == "solid"
    await keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Minutes")).to_be_focused()
    # A live update replaces the link behind the dialog. Closing the dialog must focus the new link.
    await cluster.api.patch(f"/v1/nodes/{node}", json={"weight": 99})
    await expect(page.locator(row_selector(node)).get_by_title("configured: 99")).to_be_visible()
    await keyboard.press("Escape")
    await expect(drain).to_be_focused()
    await keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Minutes")).to_be_focused()
    await keyboard.press("Enter")
    # The node may stay "draining": the disconnected Envoy of an earlier test no longer reports its sessions.
    await expect(page.locator(row_selector(node)).locator(".badge")).to_have_text(re.compile("drain"))
    for name in ("#text", "#state"):
        await page.locator(name).focus()
        await keyboard.type("dra")
    await expect(page.locator(".list tbody tr")).to_have_count(1)
    await cluster.api.post(f"/v1/nodes/{node}/undrain")
    await cluster.api.patch(f"/v1/nodes/{node}", json={"weight": 100})
    await wait_until(lambda: all_active(cluster))


async def test_theme_follows_the_system_until_one_is_chosen(browser: Browser, cluster: LocalCluster) -> None:
    async def brightness(page: Page) -> int:
        text = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(","))

    async with open_console(browser, cluster.control_plane.api_url, color_scheme="dark") as visit:
        page = visit.page
        await page.goto(f"/console/nodes/{quote(cluster.tidb[0].address)}")
        assert await brightness(page) < 150
        await page.get_by_role("button", name="Use light colours").click()
        assert await brightness(page) > 600
        await page.reload()
        assert await brightness(page) > 600
        await page.get_by_role("button", name="Use dark colours").click()
        assert await brightness(page) < 150


async def test_pages_fit_on_a_phone(browser: Browser, cluster: LocalCluster) -> None:
    node = quote(cluster.tidb[0].address)
    pages = (
        "/",
        f"/console/nodes/{node}",
        f"/console/nodes/{node}/drain",
        "/console/envoys",
        "/console/events",
    )
    async with open_console(
        browser, cluster.control_plane.api_url, viewport=PHONE, is_mobile=True, has_touch=True
    ) as visit:
        for path in (*pages, "/console/rollouts", "/console/start-rollout", "/login"):
            await visit.page.goto(path)
            width = await visit.page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], path


async def test_console_works_without_javascript(browser: Browser, cluster: LocalCluster) -> None:
    node = cluster.tidb[0].address
    async with open_console(browser, cluster.control_plane.api_url, java_script_enabled=False) as visit:
        page = visit.page
        await page.goto("/")
        await page.get_by_label("Find nodes").fill(node)
        await page.get_by_role("button", name="Find").click()
        await expect(page.locator(".list tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="Drain …").click()
        await page.get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(node)
        await page.get_by_role("link", name="Undrain …").click()
        await page.get_by_role("button", name="Undrain").click()
        await expect(page.get_by_role("link", name="Drain …")).to_be_visible()
    await wait_until(lambda: all_active(cluster))


async def test_console_shows_an_outage_and_reconnects(browser: Browser, cluster: LocalCluster) -> None:
    async with open_console(browser, cluster.control_plane.api_url) as visit:
        page = visit.page
        await page.goto("/")
        await expect(page.locator("#pulse")).to_have_text("live")
        visit.expects_outage = True
        await cluster.control_plane.kill()
        await expect(page.locator("#pulse")).to_have_text("not connected")
        await expect(page.locator(".list tbody tr")).to_have_count(3)
        await cluster.control_plane.launch()
        await expect(page.locator("#pulse")).to_have_text("live")
    await cluster.wait_until(lambda: all_active(cluster), "active nodes again")


async def test_viewer_signs_in_gets_no_buttons_and_signs_out(
    browser: Browser, tmp_path: Path, ports: Ports
) -> None:
    vera_hash, anna_hash = (
        hashlib.sha256(token.encode()).hexdigest() for token in (VIEWER_TOKEN, OPERATOR_TOKEN)
    )
    unchecked = {"health": {"sql": {"enabled": False}, "status": {"enabled": False}}}
    open_settings = settings(tmp_path, ports, ["10.0.0.1:4000"], **unchecked)
    tokens = [
        {"name": "vera", "role": "viewer", "sha256": vera_hash},
        {"name": "anna", "role": "operator", "sha256": anna_hash},
    ]
    guarded_settings = open_settings.model_dump(exclude={"api"}, exclude_unset=True)
    guarded_settings["api"] = {"listen": open_settings.api.listen, "tokens": tokens}
    async with (
        run_api_server(type(open_settings).model_validate(guarded_settings)) as plane,
        open_console(browser, plane.url) as visit,
    ):
        page = visit.page
        await page.goto("/console/events")
        await page.get_by_label("Token").fill("tvy_wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_have_text("This token is unknown.")
        await page.get_by_label("Token").fill(VIEWER_TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url("**/console/events")
        await expect(page.locator(".caller")).to_have_text("vera viewer")
        for path in ("/", "/console/nodes/10.0.0.1:4000", "/console/envoys", "/console/rollouts"):
            await page.goto(path)
            await expect(page.locator("#pulse")).to_have_text("live")
            await expect(page.locator("main a[aria-haspopup], main button:visible")).to_have_count(0)
        status = await page.evaluate(
            "fetch('/console/nodes/10.0.0.1:4000/drain', {method: 'POST'}).then(response => response.status)"
        )
        assert status == 403
        visit.complaints.clear()  # about the denied request
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("status").first).to_have_text("You are signed out.")
        await page.goto("/")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        # When a token is revoked, a page that only receives live updates also leads to the login page.
        await page.get_by_label("Token").fill(VIEWER_TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator("#pulse")).to_have_text("live")
        guarded_settings["api"] = {"listen": open_settings.api.listen, "tokens": tokens[1:]}
        plane.next_settings = type(open_settings).model_validate(guarded_settings)
        operator = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
        (await plane.http.post("/v1/config/reload", headers=operator)).raise_for_status()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        visit.complaints.clear()  # about the denied request
