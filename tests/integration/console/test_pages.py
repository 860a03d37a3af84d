"""The console's pages as a browser without JavaScript sees them, and what their scripts ask for."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import httpx2
import pytest

from api.console.feed import RecentEvents
from api.console.live_updates import iter_sse_changes
from controlplane.model.events import Event
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.waiting import wait_until

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGES = ("/", f"/console/nodes/{A}", "/console/envoys", "/console/rollouts", "/console/events")
FORMS = (
    "/console/add",
    *(f"/console/nodes/{A}/{deed}" for deed in ("drain", "undrain", "remove", "weight")),
    "/console/start-rollout",
    "/console/start-rollout?nodes=all",
)
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
TOKENS = {"viewer": "tvy_viewer-of-the-tests", "operator": "tvy_operator-of-the-tests"}
# Nobody is at these addresses, and nobody is to be called there.
UNCHECKED = {"health": {"sql": {"enabled": False}, "status": {"enabled": False}}}


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [A, B], **UNCHECKED)) as plane:
        plane.http.headers.update(BROWSER)
        await plane.wait_for_state(A, "active")
        yield plane


@pytest.fixture
async def guarded(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    """One that asks for tokens."""
    tokens = [
        {"name": name, "role": name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for name, token in TOKENS.items()
    ]
    wanted = settings(tmp_path, ports, [A, B], **UNCHECKED)
    changed = {"api": {"listen": wanted.api.listen, "tokens": tokens}}
    async with run_api_server(settings(tmp_path, ports, [A, B], **UNCHECKED, **changed)) as plane:
        plane.http.headers.update(BROWSER)
        yield plane


def said(page: httpx2.Response) -> str:
    """What the page says was wrong."""
    found = re.search(r'role="alert">(.*?)</p>', page.text, re.DOTALL)
    assert found is not None, page.text
    return unescape(found[1]).strip()


async def test_browsers_get_the_console_at_the_root_and_programs_get_json(plane: ApiServer) -> None:
    page = await plane.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "Accept" in page.headers["vary"]
    assert A in page.text
    about = await plane.http.get("/", headers={"Accept": "*/*"})
    assert about.json()["name"] == "tidevoy"


@pytest.mark.parametrize("path", [*PAGES, *FORMS, "/login", "/console/nowhere", "/console/nodes/10.9.9.9:1"])
async def test_pages_need_nothing_inline_and_nothing_from_elsewhere(plane: ApiServer, path: str) -> None:
    page = await plane.http.get(path)
    assert page.status_code == (404 if "nowhere" in path or "10.9.9.9" in path else 200), page.text
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page.text)
    links = re.findall(r'(?:src|href|action)="([^"]*)"', page.text)
    assert all(link.startswith(("/", "#", "?")) and not link.startswith("//") for link in links), links
    assets = [link for link in links if link.startswith("/static/")]
    assert len(assets) >= 5
    for asset in set(assets):
        answer = await plane.http.get(asset)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert hashlib.sha256(answer.content).hexdigest()[:12] in asset


async def test_what_is_refused_is_a_page_with_a_sentence(plane: ApiServer) -> None:
    unknown = await plane.http.get("/console/nodes/10.9.9.9:4000")
    assert unknown.status_code == 404
    assert said(unknown).startswith("no node has the address 10.9.9.9:4000")
    nowhere = await plane.http.get("/console/nowhere")
    assert nowhere.status_code == 404
    assert said(nowhere) == "there is no page at /console/nowhere."
    old = await plane.http.get("/static/console.000000000000.css")
    assert old.status_code == 404


async def test_a_node_is_drained_and_undrained_without_a_script(plane: ApiServer) -> None:
    form = await plane.http.get(f"/console/nodes/{A}/drain")
    assert f"Drain {A}?" in form.text
    sent = await plane.http.post(f"/console/nodes/{A}/drain", data={"minutes": "2.5", "on_deadline": "keep"})
    assert (sent.status_code, sent.headers["location"]) == (303, f"/console/nodes/{A}")
    drained = await plane.node(A)
    assert drained["state"] in ("draining", "drained")
    assert drained["drain"]["on_deadline"] == "keep"
    assert f"/console/nodes/{A}/undrain" in (await plane.http.get("/")).text
    assert (await plane.http.post(f"/console/nodes/{A}/undrain")).status_code == 303
    await plane.wait_for_state(A, "active")


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (f"/console/nodes/{A}/drain", {"minutes": "soon"}, "Minutes: write a number, such as 10."),
        (f"/console/nodes/{A}/drain", {"minutes": "-1"}, "deadline_seconds"),
        (f"/console/nodes/{A}/drain", {"minutes": "nan"}, "deadline_seconds"),
        (f"/console/nodes/{A}/drain", {"on_deadline": "explode"}, "on_deadline"),
        (f"/console/nodes/{A}/weight", {"weight": "1.5"}, "Weight: write a whole number, such as 1."),
        (f"/console/nodes/{A}/weight", {"weight": "0"}, "weight"),
        ("/console/nodes", {"address": "no address"}, "address"),
        ("/console/nodes", {"address": "10.0.0.9:4000", "labels": "zone"}, "Labels"),
    ],
)
async def test_a_form_that_cannot_be_used_comes_back_with_what_is_wrong(
    plane: ApiServer, path: str, fields: dict[str, str], sentence: str
) -> None:
    before = (await plane.http.get("/v1/nodes")).json()["nodes"]
    answer = await plane.http.post(path, data=fields)
    assert answer.status_code == 422
    assert sentence in said(answer)
    if "on_deadline" not in fields:
        assert f'value="{next(iter(fields.values()))}"' in answer.text  # what was filled in is still there
    after = (await plane.http.get("/v1/nodes")).json()["nodes"]
    assert [(node["address"], node["state"], node["weight"]) for node in after] == [
        (node["address"], node["state"], node["weight"]) for node in before
    ]


async def test_nodes_are_added_weighed_and_removed(plane: ApiServer) -> None:
    new = "[fd00::9]:4000"
    fields = {"address": new, "status_address": "", "weight": "50", "labels": "zone=a, disk=ssd"}
    added = await plane.http.post("/console/nodes", data=fields)
    assert added.status_code == 303
    assert (await plane.http.get(added.headers["location"])).status_code == 200
    node = await plane.node(new)
    assert (node["weight"], node["labels"]) == (50, {"zone": "a", "disk": "ssd"})
    again = await plane.http.post("/console/nodes", data=fields)
    assert again.status_code == 409
    assert "is there already" in said(again)
    assert (await plane.http.post(f"/console/nodes/{new}/weight", data={"weight": "70"})).status_code == 303
    assert (await plane.node(new))["weight"] == 70
    assert (await plane.http.post(f"/console/nodes/{new}/remove")).headers["location"] == "/"
    await wait_until(lambda: gone(plane, new))


async def gone(plane: ApiServer, address: str) -> bool:
    return (await plane.http.get(f"/v1/nodes/{address}")).status_code == 404


async def test_in_a_dialog_a_deed_is_told_and_a_failure_stays_there(plane: ApiServer) -> None:
    dialog = {"HX-Request": "true", "HX-Target": "dialog-body"}
    form = await plane.http.get(f"/console/nodes/{A}/drain", headers=dialog)
    assert "<html" not in form.text
    wrong = await plane.http.post(f"/console/nodes/{A}/drain", headers=dialog, data={"minutes": "soon"})
    assert (wrong.status_code, "<html" in wrong.text) == (422, False)
    assert "write a number" in said(wrong)
    done = await plane.http.post(f"/console/nodes/{A}/drain", headers=dialog, data={})
    assert json.loads(done.headers["hx-trigger"]) == {"done": {"text": f"{A} is being drained"}}
    left = await plane.http.post(f"/console/nodes/{B}/remove", headers=dialog, data={})
    assert (left.status_code, left.headers["hx-redirect"]) == (204, "/")


@pytest.mark.parametrize("path", PAGES)
async def test_a_part_that_has_not_changed_does_not_come_again(plane: ApiServer, path: str) -> None:
    async def again() -> str:
        found = re.search(r'hx-get="([^"]*[?&]seen=[0-9a-f]+|[^"]*&amp;seen=[0-9a-f]+)"', page.text)
        assert found is not None
        return unescape(found[1])

    part = {"HX-Request": "true", "HX-Target": "live"}
    async with asyncio.timeout(20):
        while True:  # what is on it may have changed meanwhile
            page = await plane.http.get(path)
            answer = await plane.http.get(await again(), headers=part)
            if answer.status_code == 204:
                break
            assert "<html" not in answer.text
    await plane.http.patch(f"/v1/nodes/{A}", json={"weight": 31, "labels": {"new": "label"}})
    if path in ("/", f"/console/nodes/{A}"):
        changed = await plane.http.get(await again(), headers=part)
        assert changed.status_code == 200
        assert 'id="live"' in changed.text
        assert "hx-push-url" not in changed.headers


async def test_the_page_of_envoys_says_who_leads(tmp_path: Path, ports: Ports, etcd: Etcd) -> None:
    shared = {"pd": {"urls": [etcd.url]}, "replicas": {"enabled": True, "name": "anna"}}
    async with run_api_server(settings(tmp_path, ports, [A], **UNCHECKED, **shared)) as plane:

        async def leads() -> bool:
            page = (await plane.http.get("/console/envoys", headers=BROWSER)).text
            return "<b>anna</b> (this one) leads since <time" in page

        await wait_until(leads)


async def test_finding_is_an_address_of_its_own(plane: ApiServer) -> None:
    part = {"HX-Request": "true", "HX-Target": "live"}
    found = await plane.http.get(f"/?text={B}&state=&sort=sessions&order=descending", headers=part)
    assert found.headers["hx-push-url"] == "/?text=10.0.0.2%3A4000&sort=sessions&order=descending"
    assert (A in found.text, B in found.text) == (False, True)
    nothing = await plane.http.get("/?text=nowhere")
    assert "No node fits" in nothing.text


async def test_texts_from_outside_are_only_text(plane: ApiServer) -> None:
    labels = {HOSTILE: HOSTILE, "zone": HOSTILE}
    (await plane.http.patch(f"/v1/nodes/{A}", json={"labels": labels})).raise_for_status()
    port = int(plane.next_settings.xds.listen.rpartition(":")[2])
    async with FakeEnvoy(port, HOSTILE) as envoy:
        await envoy.wait_for_endpoints(bool)
        envoy.nack_message = HOSTILE
        (await plane.http.patch(f"/v1/nodes/{A}", json={"weight": 3})).raise_for_status()

        async def refused() -> bool:
            listed = (await plane.http.get("/v1/envoys")).json()["envoys"]
            return bool(listed) and listed[0]["last_nack"] is not None

        await wait_until(refused)
        for path in (
            *PAGES,
            f"/?text={HOSTILE}",
            f"/console/events?text={HOSTILE}",
            f"/login?next={HOSTILE}",
        ):
            page = await plane.http.get(path)
            assert "<script>alert" not in page.text, path
            assert "<img src=x" not in page.text, path
        fleet = await plane.http.get("/console/envoys")
        assert unescape(fleet.text).count(HOSTILE) >= 2  # its name, and why it refused
    for path, fields in (
        ("/console/nodes", {"address": HOSTILE, "labels": HOSTILE}),
        (f"/console/nodes/{A}/drain", {"minutes": HOSTILE}),
        ("/console/rollouts", {"nodes": HOSTILE, "action": HOSTILE, "version": HOSTILE}),
    ):
        page = await plane.http.post(path, data=fields)
        assert page.status_code == 422
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


async def test_who_is_not_known_is_led_to_the_login_and_a_viewer_sees_no_buttons(guarded: ApiServer) -> None:
    asked = await guarded.http.get("/console/envoys")
    assert asked.status_code == 303
    assert asked.headers["location"].startswith("/login?next=")
    login = await guarded.http.get(asked.headers["location"])
    assert 'type="password"' in login.text
    assert 'value="/console/envoys"' in login.text
    assert "/console/changes" not in login.text
    for path in set(re.findall(r'"(/static/[^"]*)"', login.text)):
        assert (await guarded.http.get(path)).status_code == 200

    guarded.http.headers["Authorization"] = f"Bearer {TOKENS['viewer']}"
    for path in PAGES:
        page = await guarded.http.get(path)
        assert page.status_code == 200
        assert "<b>viewer</b> viewer" in page.text
        words = re.findall(r"<(?:button|a)\b[^>]*>([^<]*)<", page.text)
        assert not [word for word in words if word.endswith("…")], words
    refused = await guarded.http.post(f"/console/nodes/{A}/drain", headers={"Origin": guarded.url})
    assert refused.status_code == 403

    guarded.http.headers["Authorization"] = f"Bearer {TOKENS['operator']}"
    assert "Drain …" in (await guarded.http.get("/")).text
    drained = await guarded.http.post(f"/console/nodes/{A}/drain", headers={"Origin": guarded.url})
    assert drained.status_code == 303

    async def audited() -> bool:
        page = (await guarded.http.get("/console/events?topic=audit")).text
        return "audit.drain_node" in page and "by operator" in page

    await wait_until(audited)


async def test_a_thousand_nodes_come_in_pages(tmp_path: Path, ports: Ports) -> None:
    many = [f"10.1.{number // 250}.{number % 250}:4000" for number in range(1000)]
    async with run_api_server(settings(tmp_path, ports, many, **UNCHECKED)) as plane:
        plane.http.headers.update(BROWSER)
        await plane.wait_for_state(many[-1], "active")
        began = time.monotonic()
        first = await plane.http.get("/")
        took = time.monotonic() - began
        assert len(re.findall(r"<tr>\s*<th scope=\"row\">", first.text)) == 50
        assert "1 of 20" in first.text
        assert len(first.content) < 150_000
        assert took < 1.0  # some tens of milliseconds on a machine that has nothing else to do
        last = await plane.http.get("/?page=20")
        assert many[-1] in last.text
        found = await plane.http.get("/?text=10.1.3.24")
        assert set(re.findall(r'id="node-([^"]*)"', found.text)) == {
            each for each in many if "10.1.3.24" in each
        }


def event(number: int, kind: str) -> Event:
    return Event(number, 0.0, kind, "sentence" if number % 2 else "subject", f"sentence {number}")


async def test_pages_are_told_what_changed_and_not_too_often() -> None:
    feed, stopping = RecentEvents(), asyncio.Event()
    feed.append(event(1, "node.state"))
    text = iter_sse_changes(feed, stopping, poll_seconds=60.0, min_interval=0.05)
    assert (await anext(text)).startswith(":")
    feed.append(event(2, "node.state"))
    assert word(await anext(text)) == (["nodes", "envoys", "rollouts", "events"], ["subject: sentence 2"])
    began = time.monotonic()
    for number in range(3, 13):
        feed.append(event(number, "envoy.nack"))
    topics, told = word(await anext(text))
    assert time.monotonic() - began >= 0.04
    assert told == ["sentence 3", "subject: sentence 4", "sentence 5", "and 7 more events"]
    assert "events" in topics
    stopping.set()
    assert [each async for each in text] == []


async def test_counts_are_looked_at_again_although_nothing_happened() -> None:
    feed, stopping = RecentEvents(), asyncio.Event()
    text = iter_sse_changes(feed, stopping, poll_seconds=0.01, min_interval=0.0)
    await anext(text)
    assert word(await anext(text)) == (["nodes", "envoys", "rollouts"], [])
    await text.aclose()


def word(chunk: str) -> tuple[list[str], list[str]]:
    """Topics and sentences of one server-sent event."""
    name, data, *_ = chunk.split("\n")
    assert name == "event: changed"
    told = json.loads(data.removeprefix("data: "))
    return told["topics"], told["told"]


async def test_what_a_node_carried_is_kept_for_charts(plane: ApiServer) -> None:
    async def columns() -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = (await plane.http.get(f"/console/history?node={A}")).json()
        return found

    async def begun() -> bool:
        return bool((await columns())["at"])

    await wait_until(begun)
    assert {name: len(column) for name, column in (await columns()).items()} == dict.fromkeys(
        ("at", "sessions", "rate", "p95"), len((await columns())["at"])
    )
    assert (await plane.http.get("/console/history?node=nobody")).json()["at"] == []
