"""The console in headless Chromium, at a real cluster: what operators do in it, and what they see of it."""

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
TOKEN, OTHER = "tvy_of-a-viewer", "tvy_of-an-operator"
PHONE = {"width": 390, "height": 844}
LONG = 60_000  # milliseconds
expect.set_options(timeout=20_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with run_chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDb) -> AsyncIterator[LocalCluster]:
    async with run_console_cluster(tmp_path_factory.mktemp("console"), mariadb) as started:
        yield started
        assert started.violations() == []


@pytest_asyncio.fixture(loop_scope="module")
async def there(browser: Browser, stack: LocalCluster) -> AsyncIterator[ConsoleVisit]:
    """A browser at the console of the cluster."""
    async with open_console(browser, stack.control_plane.api_url) as made:
        yield made


def row(page: Page, address: str) -> str:
    """The selector of a node's row."""
    return f'tr:has(a[id="node-{address}"])'


async def all_active(stack: LocalCluster) -> bool:
    return set((await stack.states()).values()) == {"active"}


async def test_a_node_is_drained_and_its_sessions_are_seen_to_leave(
    there: ConsoleVisit, stack: LocalCluster
) -> None:
    page, node = there.page, stack.tidb[0].address
    async with run_client_sessions(stack.sql_port, SESSIONS):
        await page.goto("/")
        mine = page.locator(row(page, node))
        await expect(mine.locator("td[data-label=Sessions]")).to_have_text("3")
        await mine.get_by_role("link", name="Drain …").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog.get_by_role("heading")).to_have_text(f"Drain {node}?")
        await expect(dialog).to_contain_text("Its 3 sessions move to the other 2 nodes")
        await dialog.get_by_label("Minutes").fill("-1")
        # The server decides, whatever the browser would say.
        await dialog.locator("form").evaluate("form => form.noValidate = true")
        await dialog.get_by_role("button", name="Drain").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("greater than or equal to 0")
        there.complaints.clear()  # browsers report each answer of 4xx
        await dialog.get_by_label("Minutes").fill("5")
        await dialog.get_by_role("button", name="Drain").click()
        await expect(dialog).to_be_hidden()
        await expect(mine.locator(".badge")).to_have_text("drained")
        await expect(mine.locator("td[data-label=Sessions]")).to_have_text("0")
        await expect(page.locator("#told")).to_contain_text(node)

        await mine.get_by_role("link", name=node).click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(node)
        await expect(page.locator("#sessions")).to_contain_text("0")
        await expect(page.locator(".chart canvas")).to_have_count(3)
        await page.get_by_role("link", name="Undrain …").click()
        await page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
        await expect(page.locator("h1 + .badge")).to_have_text("active")
    await wait_until(lambda: all_active(stack))


async def test_a_rollout_is_previewed_started_and_seen_to_its_end(
    there: ConsoleVisit, stack: LocalCluster
) -> None:
    page, node = there.page, stack.tidb[1]
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
    await expect(step.locator(".badge")).to_have_text("returning", timeout=LONG)
    await page.get_by_role("link", name="Pause …").click()
    await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    await expect(page.locator("h1 + .badge")).to_have_text("paused")
    await page.get_by_role("link", name="Resume …").click()
    await page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    await expect(page.locator("h1 + .badge")).to_have_text("running")
    await node.terminate()
    await node.launch()
    await expect(step.locator(".badge")).to_have_text("done", timeout=LONG)
    await expect(page.locator("h1 + .badge")).to_have_text("done")
    assert await page.locator("progress").first.evaluate("each => each.value === each.max")
    await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Rollouts").click()
    await expect(page.locator(".list .badge").first).to_have_text("done")
    await wait_until(lambda: all_active(stack))


async def test_a_refusal_of_an_envoy_appears_by_itself(there: ConsoleVisit, stack: LocalCluster) -> None:
    page = there.page
    await page.goto("/console/envoys")
    await expect(page.get_by_role("rowheader", name="envoy-1")).to_be_visible()
    async with FakeEnvoy(stack.advertised.xds, "envoy-that-refuses") as envoy:
        await envoy.wait_for_endpoints(bool)
        await expect(page.get_by_role("rowheader", name="envoy-that-refuses")).to_be_visible()
        envoy.nack_message = "<b>no</b> such <img src=x onerror=alert(1)> cluster"
        await stack.api.patch(f"/v1/nodes/{stack.tidb[0].address}", json={"weight": 400})
        await expect(page.locator(".nack pre")).to_have_text(envoy.nack_message)
        await expect(page.locator("main img")).to_have_count(0)
        await page.get_by_role("navigation", name="Pages").get_by_role("link", name="Events").click()
        await expect(page.locator(".kind", has_text="envoy.nack").first).to_be_visible()
    await stack.api.patch(f"/v1/nodes/{stack.tidb[0].address}", json={"weight": 100})


async def test_the_keyboard_is_enough(there: ConsoleVisit, stack: LocalCluster) -> None:
    page, node = there.page, stack.tidb[2].address
    keyboard = page.keyboard
    await page.goto("/")
    await keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await keyboard.press("Enter")
    drain = page.locator(f'[id="drain-{node}"]')
    for _ in range(60):
        await keyboard.press("Tab")
        if await drain.evaluate("each => each === document.activeElement"):
            break
    await expect(drain).to_be_focused()
    assert await drain.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
    await keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Minutes")).to_be_focused()
    # Drawn anew beneath the dialog, and still where the keyboard comes back to.
    await stack.api.patch(f"/v1/nodes/{node}", json={"weight": 99})
    await expect(page.locator(row(page, node)).get_by_title("configured: 99")).to_be_visible()
    await keyboard.press("Escape")
    await expect(drain).to_be_focused()
    await keyboard.press("Enter")
    await expect(page.get_by_role("dialog").get_by_label("Minutes")).to_be_focused()
    await keyboard.press("Enter")
    # Whether it is empty, the Envoy that refused and has left cannot be asked.
    await expect(page.locator(row(page, node)).locator(".badge")).to_have_text(re.compile("drain"))
    for name in ("#text", "#state"):
        await page.locator(name).focus()
        await keyboard.type("dra")
    await expect(page.locator(".list tbody tr")).to_have_count(1)
    await stack.api.post(f"/v1/nodes/{node}/undrain")
    await stack.api.patch(f"/v1/nodes/{node}", json={"weight": 100})
    await wait_until(lambda: all_active(stack))


async def test_colours_are_those_of_the_system_until_others_are_chosen(
    browser: Browser, stack: LocalCluster
) -> None:
    async def brightness(page: Page) -> int:
        text = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(","))

    async with open_console(browser, stack.control_plane.api_url, color_scheme="dark") as there:
        page = there.page
        await page.goto(f"/console/nodes/{quote(stack.tidb[0].address)}")
        assert await brightness(page) < 150
        await page.get_by_role("button", name="Use light colours").click()
        assert await brightness(page) > 600
        await page.reload()
        assert await brightness(page) > 600
        await page.get_by_role("button", name="Use dark colours").click()
        assert await brightness(page) < 150


async def test_a_phone_shows_all_of_it(browser: Browser, stack: LocalCluster) -> None:
    node = quote(stack.tidb[0].address)
    pages = (
        "/",
        f"/console/nodes/{node}",
        f"/console/nodes/{node}/drain",
        "/console/envoys",
        "/console/events",
    )
    async with open_console(
        browser, stack.control_plane.api_url, viewport=PHONE, is_mobile=True, has_touch=True
    ) as there:
        for path in (*pages, "/console/rollouts", "/console/start-rollout", "/login"):
            await there.page.goto(path)
            width = await there.page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], path


async def test_without_scripts_everything_still_works(browser: Browser, stack: LocalCluster) -> None:
    node = stack.tidb[0].address
    async with open_console(browser, stack.control_plane.api_url, java_script_enabled=False) as there:
        page = there.page
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
    await wait_until(lambda: all_active(stack))


async def test_a_control_plane_that_is_away_is_told_and_found_again(
    browser: Browser, stack: LocalCluster
) -> None:
    async with open_console(browser, stack.control_plane.api_url) as there:
        page = there.page
        await page.goto("/")
        await expect(page.locator("#pulse")).to_have_text("live")
        there.expects_outage = True
        await stack.control_plane.kill()
        await expect(page.locator("#pulse")).to_have_text("not connected")
        await expect(page.locator(".list tbody tr")).to_have_count(3)
        await stack.control_plane.launch()
        await expect(page.locator("#pulse")).to_have_text("live")
    await stack.wait_until(lambda: all_active(stack), "active nodes again")


async def test_a_viewer_signs_in_sees_no_buttons_and_signs_out(
    browser: Browser, tmp_path: Path, ports: Ports
) -> None:
    vera, anna = (hashlib.sha256(token.encode()).hexdigest() for token in (TOKEN, OTHER))
    unchecked = {"health": {"sql": {"enabled": False}, "status": {"enabled": False}}}
    wanted = settings(tmp_path, ports, ["10.0.0.1:4000"], **unchecked)
    tokens = [
        {"name": "vera", "role": "viewer", "sha256": vera},
        {"name": "anna", "role": "operator", "sha256": anna},
    ]
    guarded = wanted.model_dump(exclude={"api"}, exclude_unset=True)
    guarded["api"] = {"listen": wanted.api.listen, "tokens": tokens}
    async with (
        run_api_server(type(wanted).model_validate(guarded)) as plane,
        open_console(browser, plane.url) as there,
    ):
        page = there.page
        await page.goto("/console/events")
        await page.get_by_label("Token").fill("tvy_wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_have_text("This token is not known.")
        await page.get_by_label("Token").fill(TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url("**/console/events")
        await expect(page.locator(".caller")).to_have_text("vera viewer")
        for path in ("/", "/console/nodes/10.0.0.1:4000", "/console/envoys", "/console/rollouts"):
            await page.goto(path)
            await expect(page.locator("#pulse")).to_have_text("live")
            await expect(page.locator("main a[aria-haspopup], main button:visible")).to_have_count(0)
        status = await page.evaluate(
            "fetch('/console/nodes/10.0.0.1:4000/drain', {method: 'POST'}).then(answer => answer.status)"
        )
        assert status == 403
        there.complaints.clear()  # of that refusal
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("status").first).to_have_text("You are signed out.")
        await page.goto("/")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        # A token that is taken back leads there, too, from a page that only looks on.
        await page.get_by_label("Token").fill(TOKEN)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator("#pulse")).to_have_text("live")
        guarded["api"] = {"listen": wanted.api.listen, "tokens": tokens[1:]}
        plane.next_settings = type(wanted).model_validate(guarded)
        shown = {"Authorization": f"Bearer {OTHER}"}
        (await plane.http.post("/v1/config/reload", headers=shown)).raise_for_status()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")
        there.complaints.clear()  # of that refusal
