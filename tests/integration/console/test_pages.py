"""The console's pages as a browser without JavaScript gets them, and the requests that their scripts send."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import httpx2
import pytest

from api.console.live_updates import iter_sse_updates
from controlplane.clock import monotonic_unix_clock
from controlplane.events.event_log import EventLog
from controlplane.model.comparison import VerificationReport
from controlplane.model.rollout import Rollout, RolloutPhase, RolloutSpec, Stage, Step, Verification
from controlplane.rollouts import state_machine
from controlplane.storage.file_store import FileStore
from controlplane.verification.verdict import judge
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.comparisons import FAST, SLOW, comparison_with, digest_comparison
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.waiting import wait_until

A, B = "10.0.0.1:4000", "10.0.0.2:4000"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGES = (
    *("/", f"/console/nodes/{A}", "/console/envoys", "/console/statements", "/console/rules"),
    *("/console/capture",),
    *("/console/rollouts", "/console/events"),
)
FORMS = (
    "/console/add",
    *(f"/console/nodes/{A}/{operation}" for operation in ("drain", "undrain", "remove", "weight")),
    "/console/start-rollout",
    "/console/start-rollout?nodes=all",
    *("/console/capture/start", "/console/capture/stop"),
)
POLLED_TOPICS = ["nodes", "envoys", "statements", "rules", "capture", "rollouts"]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
TOKENS = {"viewer": "tvy_viewer-of-the-tests", "operator": "tvy_operator-of-the-tests"}
# No servers run at these addresses, so they must not be probed.
UNCHECKED = {"health": {"sql": {"enabled": False}, "status": {"enabled": False}}}


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports, [A, B], **UNCHECKED)) as server:
        server.http.headers.update(BROWSER)
        await server.wait_for_state(A, "active")
        yield server


@pytest.fixture
async def server_with_tokens(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    """Yield a server that requires tokens."""
    tokens = [
        {"name": name, "role": name, "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for name, token in TOKENS.items()
    ]
    listen = settings(tmp_path, ports, [A, B], **UNCHECKED).api.listen
    with_tokens = {"api": {"listen": listen, "tokens": tokens}}
    async with run_api_server(settings(tmp_path, ports, [A, B], **UNCHECKED, **with_tokens)) as server:
        server.http.headers.update(BROWSER)
        yield server


def slower_node() -> Rollout:
    """Return a rollout that has paused, because a node is slower."""
    text = HOSTILE
    comparison = comparison_with(digest_comparison(SLOW, 2.1, text=text), digest_comparison(FAST, 0.5))
    report = VerificationReport(A, B, 1.0, "monday", 1.5, comparison, judge(comparison), 2)
    failed = Step(A, Stage.FAILED, f"it is worse than {B}", verification=Verification.FAILED)
    spec = RolloutSpec((A, B), verify="replay:monday")
    rollout = state_machine.create("r1", spec, "alice", 1.0).with_steps(failed)
    return replace(rollout, phase=RolloutPhase.PAUSED, reason="A failed", reports={A: report})


async def test_comparison_of_a_node_is_shown_and_may_be_accepted(tmp_path: Path, ports: Ports) -> None:
    config = settings(tmp_path, ports, [A, B], **UNCHECKED)
    store = FileStore(config.state_dir)
    async with store.lock():
        await store.save_rollout(slower_node(), 0)
    async with run_api_server(config) as server:
        server.http.headers.update(BROWSER)
        path = "/console/rollouts/r1"
        rollout = await server.http.get(path)
        assert f'href="{path}/verifications/{A}">Comparison with {B}</a>' in rollout.text
        page = await server.http.get(f"{path}/verifications/{A}")
        assert f"<h1>{A}, compared with {B}</h1>" in page.text
        assert HOSTILE not in page.text
        assert "takes 2.10 (2.00 to 2.20) times as long" in page.text
        assert page.text.count("<svg") == 3
        assert not re.search(r"<style|\sstyle=|<script(?![^>]* src=)", page.text)
        details = (await server.http.get(f"/v1/rollouts/r1/verifications/{A}")).json()
        assert (details["baseline"], details["has_passed"], details["digest_count"]) == (B, False, 2)
        assert [entry["digest"] for entry in details["digests"]] == [SLOW, FAST]
        assert details["findings"][0]["kind"] == "slower"
        missing = await server.http.get(f"{path}/verifications/{B}")
        assert (missing.status_code, alert_text(missing)[:38]) == (
            404,
            "the rollout r1 has no comparison of 10",
        )
        form = await server.http.get(f"{path}/resume")
        assert "to service without another verification" in form.text
        resumed = await server.http.post(f"{path}/resume", data={"skip_verification": "yes"})
        assert resumed.status_code == 303
        steps = (await server.http.get("/v1/rollouts/r1")).json()["steps"]
        assert steps[0]["verification"] == "skipped"


def alert_text(page: httpx2.Response) -> str:
    match = re.search(r'role="alert">(.*?)</p>', page.text, re.DOTALL)
    assert match is not None, page.text
    return unescape(match[1]).strip()


async def test_root_serves_html_to_browsers_and_json_to_programs(server: ApiServer) -> None:
    page = await server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "Accept" in page.headers["vary"]
    assert A in page.text
    about = await server.http.get("/", headers={"Accept": "*/*"})
    assert about.json()["name"] == "tidevoy"


@pytest.mark.parametrize("path", [*PAGES, *FORMS, "/login", "/console/nowhere", "/console/nodes/10.9.9.9:1"])
async def test_pages_have_no_inline_scripts_and_no_external_links(server: ApiServer, path: str) -> None:
    page = await server.http.get(path)
    assert page.status_code == (404 if "nowhere" in path or "10.9.9.9" in path else 200), page.text
    assert "unsafe" not in page.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page.text)
    links = re.findall(r'(?:src|href|action)="([^"]*)"', page.text)
    assert all(link.startswith(("/", "#", "?")) and not link.startswith("//") for link in links), links
    assets = [link for link in links if link.startswith("/static/")]
    assert len(assets) >= 5
    for asset in set(assets):
        response = await server.http.get(asset)
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
        assert hashlib.sha256(response.content).hexdigest()[:12] in asset


async def test_errors_are_pages_with_the_error_text(server: ApiServer) -> None:
    unknown = await server.http.get("/console/nodes/10.9.9.9:4000")
    assert unknown.status_code == 404
    assert alert_text(unknown).startswith("no node has the address 10.9.9.9:4000")
    missing_page = await server.http.get("/console/nowhere")
    assert missing_page.status_code == 404
    assert alert_text(missing_page) == "/console/nowhere does not exist."
    outdated_asset = await server.http.get("/static/console.000000000000.css")
    assert outdated_asset.status_code == 404


async def test_node_is_drained_and_undrained_without_javascript(server: ApiServer) -> None:
    form = await server.http.get(f"/console/nodes/{A}/drain")
    assert f"Drain {A}?" in form.text
    submitted = await server.http.post(
        f"/console/nodes/{A}/drain", data={"minutes": "2.5", "on_deadline": "keep"}
    )
    assert (submitted.status_code, submitted.headers["location"]) == (303, f"/console/nodes/{A}")
    node = await server.node(A)
    assert node["state"] in ("draining", "drained")
    assert node["drain"]["on_deadline"] == "keep"
    assert f"/console/nodes/{A}/undrain" in (await server.http.get("/")).text
    assert (await server.http.post(f"/console/nodes/{A}/undrain")).status_code == 303
    await server.wait_for_state(A, "active")


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        (f"/console/nodes/{A}/drain", {"minutes": "soon"}, "Minutes: enter a number, such as 10."),
        (f"/console/nodes/{A}/drain", {"minutes": "-1"}, "deadline_seconds"),
        (f"/console/nodes/{A}/drain", {"minutes": "nan"}, "deadline_seconds"),
        (f"/console/nodes/{A}/drain", {"on_deadline": "explode"}, "on_deadline"),
        (f"/console/nodes/{A}/weight", {"weight": "1.5"}, "Weight: enter a whole number, such as 1."),
        (f"/console/nodes/{A}/weight", {"weight": "0"}, "weight"),
        ("/console/nodes", {"address": "no address"}, "address"),
        ("/console/nodes", {"address": "10.0.0.9:4000", "labels": "zone"}, "Labels"),
    ],
)
async def test_invalid_form_is_redisplayed_with_the_error(
    server: ApiServer, path: str, fields: dict[str, str], error: str
) -> None:
    before = (await server.http.get("/v1/nodes")).json()["nodes"]
    response = await server.http.post(path, data=fields)
    assert response.status_code == 422
    assert error in alert_text(response)
    if "on_deadline" not in fields:
        assert f'value="{next(iter(fields.values()))}"' in response.text  # the submitted value
    after = (await server.http.get("/v1/nodes")).json()["nodes"]
    assert [(node["address"], node["state"], node["weight"]) for node in after] == [
        (node["address"], node["state"], node["weight"]) for node in before
    ]


async def test_node_is_added_reweighted_and_removed(server: ApiServer) -> None:
    new = "[fd00::9]:4000"
    fields = {"address": new, "status_address": "", "weight": "50", "labels": "zone=a, disk=ssd"}
    added = await server.http.post("/console/nodes", data=fields)
    assert added.status_code == 303
    assert (await server.http.get(added.headers["location"])).status_code == 200
    node = await server.node(new)
    assert (node["weight"], node["labels"]) == (50, {"zone": "a", "disk": "ssd"})
    repeated = await server.http.post("/console/nodes", data=fields)
    assert repeated.status_code == 409
    assert "exists already" in alert_text(repeated)
    assert (await server.http.post(f"/console/nodes/{new}/weight", data={"weight": "70"})).status_code == 303
    assert (await server.node(new))["weight"] == 70
    assert (await server.http.post(f"/console/nodes/{new}/remove")).headers["location"] == "/"
    await wait_until(lambda: is_removed(server, new))


async def is_removed(server: ApiServer, address: str) -> bool:
    return (await server.http.get(f"/v1/nodes/{address}")).status_code == 404


async def test_dialog_reports_success_and_shows_errors_in_place(server: ApiServer) -> None:
    dialog = {"HX-Request": "true", "HX-Target": "dialog-body"}
    form = await server.http.get(f"/console/nodes/{A}/drain", headers=dialog)
    assert "<html" not in form.text
    invalid = await server.http.post(f"/console/nodes/{A}/drain", headers=dialog, data={"minutes": "soon"})
    assert (invalid.status_code, "<html" in invalid.text) == (422, False)
    assert "enter a number" in alert_text(invalid)
    done = await server.http.post(f"/console/nodes/{A}/drain", headers=dialog, data={})
    assert json.loads(done.headers["hx-trigger"]) == {"done": {"text": f"{A} is being drained"}}
    removed = await server.http.post(f"/console/nodes/{B}/remove", headers=dialog, data={})
    assert (removed.status_code, removed.headers["hx-redirect"]) == (204, "/")


@pytest.mark.parametrize("path", PAGES)
async def test_unchanged_live_part_is_not_sent_again(server: ApiServer, path: str) -> None:
    def refresh_url(page: httpx2.Response) -> str:
        match = re.search(r'hx-get="([^"]*[?&]seen=[0-9a-f]+|[^"]*&amp;seen=[0-9a-f]+)"', page.text)
        assert match is not None
        return unescape(match[1])

    part = {"HX-Request": "true", "HX-Target": "live"}
    async with asyncio.timeout(20):
        while True:  # the content may have changed between the two requests
            page = await server.http.get(path)
            response = await server.http.get(refresh_url(page), headers=part)
            if response.status_code == 204:
                break
            assert "<html" not in response.text
    await server.http.patch(f"/v1/nodes/{A}", json={"weight": 31, "labels": {"new": "label"}})
    if path in ("/", f"/console/nodes/{A}"):
        changed = await server.http.get(refresh_url(page), headers=part)
        assert changed.status_code == 200
        assert 'id="live"' in changed.text
        assert "hx-push-url" not in changed.headers


async def test_envoys_page_shows_the_leading_replica(tmp_path: Path, ports: Ports, etcd: Etcd) -> None:
    shared = {"pd": {"urls": [etcd.url]}, "replicas": {"enabled": True, "name": "anna"}}
    async with run_api_server(settings(tmp_path, ports, [A], **UNCHECKED, **shared)) as server:

        async def shows_leader() -> bool:
            page = (await server.http.get("/console/envoys", headers=BROWSER)).text
            return "<b>anna</b> (this one) leader since <time" in page

        await wait_until(shows_leader)


async def test_search_changes_the_url(server: ApiServer) -> None:
    part = {"HX-Request": "true", "HX-Target": "live"}
    matching = await server.http.get(f"/?text={B}&state=&sort=sessions&order=descending", headers=part)
    assert matching.headers["hx-push-url"] == "/?text=10.0.0.2%3A4000&sort=sessions&order=descending"
    assert (A in matching.text, B in matching.text) == (False, True)
    no_match = await server.http.get("/?text=nowhere")
    assert "No node matches" in no_match.text


async def test_envoys_page_shows_only_envoys_with_problems_on_request(server: ApiServer) -> None:
    port = server.xds_port
    async with FakeEnvoy(port, "envoy-1") as envoy:
        await envoy.wait_for_endpoints(bool)

        async def is_listed(query: str) -> bool:
            return ">envoy-1<" in (await server.http.get(f"/console/envoys{query}")).text

        await wait_until(lambda: is_listed(""))

        async def has_no_problem() -> bool:
            return not await is_listed("?problems=true")

        await wait_until(has_no_problem)
    await wait_until(lambda: is_listed("?problems=true"))  # disconnected Envoys are a problem


async def test_hostile_texts_are_escaped(server: ApiServer) -> None:
    labels = {HOSTILE: HOSTILE, "zone": HOSTILE}
    (await server.http.patch(f"/v1/nodes/{A}", json={"labels": labels})).raise_for_status()
    port = server.xds_port
    async with FakeEnvoy(port, HOSTILE) as envoy:
        await envoy.wait_for_endpoints(bool)
        envoy.nack_message = HOSTILE
        (await server.http.patch(f"/v1/nodes/{A}", json={"weight": 3})).raise_for_status()

        async def has_nack() -> bool:
            envoys = (await server.http.get("/v1/envoys")).json()["envoys"]
            return bool(envoys) and envoys[0]["last_nack"] is not None

        await wait_until(has_nack)
        for path in (
            *PAGES,
            f"/?text={HOSTILE}",
            f"/console/events?text={HOSTILE}",
            f"/login?next={HOSTILE}",
        ):
            page = await server.http.get(path)
            assert "<script>alert" not in page.text, path
            assert "<img src=x" not in page.text, path
        envoys_page = await server.http.get("/console/envoys")
        assert unescape(envoys_page.text).count(HOSTILE) >= 2  # the Envoy's id and its NACK message
    for path, fields in (
        ("/console/nodes", {"address": HOSTILE, "labels": HOSTILE}),
        (f"/console/nodes/{A}/drain", {"minutes": HOSTILE}),
        ("/console/rollouts", {"nodes": HOSTILE, "action": HOSTILE, "version": HOSTILE}),
    ):
        page = await server.http.post(path, data=fields)
        assert page.status_code == 422
        assert "<script>alert" not in page.text
        assert "<img src=x" not in page.text


async def test_login_is_required_and_viewers_get_no_buttons(server_with_tokens: ApiServer) -> None:
    redirect = await server_with_tokens.http.get("/console/envoys")
    assert redirect.status_code == 303
    assert redirect.headers["location"].startswith("/login?next=")
    login = await server_with_tokens.http.get(redirect.headers["location"])
    assert 'type="password"' in login.text
    assert 'value="/console/envoys"' in login.text
    assert "/console/updates" not in login.text
    for path in set(re.findall(r'"(/static/[^"]*)"', login.text)):
        assert (await server_with_tokens.http.get(path)).status_code == 200

    server_with_tokens.http.headers["Authorization"] = f"Bearer {TOKENS['viewer']}"
    for path in PAGES:
        page = await server_with_tokens.http.get(path)
        assert page.status_code == 200
        assert "<b>viewer</b> viewer" in page.text
        texts = re.findall(r"<(?:button|a)\b[^>]*>([^<]*)<", page.text)
        assert not [text for text in texts if text.endswith("…")], texts
    denied = await server_with_tokens.http.post(
        f"/console/nodes/{A}/drain", headers={"Origin": server_with_tokens.url}
    )
    assert denied.status_code == 403

    server_with_tokens.http.headers["Authorization"] = f"Bearer {TOKENS['operator']}"
    assert "Drain …" in (await server_with_tokens.http.get("/")).text
    drained = await server_with_tokens.http.post(
        f"/console/nodes/{A}/drain", headers={"Origin": server_with_tokens.url}
    )
    assert drained.status_code == 303

    async def shows_audit_event() -> bool:
        page = (await server_with_tokens.http.get("/console/events?topic=audit")).text
        return "audit.drain_node" in page and "by operator" in page

    await wait_until(shows_audit_event)


async def test_thousand_nodes_are_paginated(tmp_path: Path, ports: Ports) -> None:
    addresses = [f"10.1.{number // 250}.{number % 250}:4000" for number in range(1000)]
    async with run_api_server(settings(tmp_path, ports, addresses, **UNCHECKED)) as server:
        server.http.headers.update(BROWSER)
        await server.wait_for_state(addresses[-1], "active")
        start = time.monotonic()
        first = await server.http.get("/")
        seconds = time.monotonic() - start
        assert len(re.findall(r"<tr>\s*<th scope=\"row\">", first.text)) == 50
        assert "1 of 20" in first.text
        assert len(first.content) < 150_000
        assert seconds < 5.0  # some tens of milliseconds on an idle machine
        last = await server.http.get("/?page=20")
        assert addresses[-1] in last.text
        matching = await server.http.get("/?text=10.1.3.24")
        assert set(re.findall(r'id="node-([^"]*)"', matching.text)) == {
            address for address in addresses if "10.1.3.24" in address
        }


def append(log: EventLog, number: int, kind: str) -> None:
    log.emit(kind, "sentence" if number % 2 else "subject", f"sentence {number}")


@pytest.mark.parametrize("path", PAGES)
async def test_live_part_of_each_page_is_refreshed(server: ApiServer, path: str) -> None:
    page = (await server.http.get(path)).text
    (topic,) = re.findall(r'hx-trigger="changed-(\w+) from:body, changed-all from:body"', page)
    assert topic in (*POLLED_TOPICS, "events")


async def test_pages_are_notified_of_changes_at_a_limited_rate() -> None:
    log, stopping = EventLog(monotonic_unix_clock()), asyncio.Event()
    append(log, 1, "node.state")
    messages = iter_sse_updates(log.subscribe(), stopping, poll_seconds=60.0, min_interval=0.05)
    assert (await anext(messages)).startswith(":")
    append(log, 2, "node.state")
    assert parse_message(await anext(messages)) == (
        [*POLLED_TOPICS, "events"],
        ["subject: sentence 2"],
    )
    start = time.monotonic()
    for number in range(3, 13):
        append(log, number, "envoy.nack")
    topics, announcements = parse_message(await anext(messages))
    assert time.monotonic() - start >= 0.04
    assert announcements == ["sentence 3", "subject: sentence 4", "sentence 5", "and 7 more events"]
    assert "events" in topics
    stopping.set()
    assert [message async for message in messages] == []


async def test_pages_are_refreshed_regularly_without_events() -> None:
    log, stopping = EventLog(monotonic_unix_clock()), asyncio.Event()
    messages = iter_sse_updates(log.subscribe(), stopping, poll_seconds=0.01, min_interval=0.0)
    await anext(messages)
    assert parse_message(await anext(messages)) == (
        POLLED_TOPICS,
        [],
    )
    await messages.aclose()


def parse_message(message: str) -> tuple[list[str], list[str]]:
    """Return the topics and announcements of one server-sent event."""
    name, data, *_ = message.split("\n")
    assert name == "event: changed"
    fields = json.loads(data.removeprefix("data: "))
    return fields["topics"], fields["announcements"]


async def test_traffic_history_is_kept_for_charts(server: ApiServer) -> None:
    async def columns() -> dict[str, list[float | None]]:
        history: dict[str, list[float | None]] = (await server.http.get(f"/console/history?node={A}")).json()
        return history

    async def has_points() -> bool:
        return bool((await columns())["at"])

    await wait_until(has_points)
    assert {name: len(column) for name, column in (await columns()).items()} == dict.fromkeys(
        ("at", "sessions", "rate", "p95"), len((await columns())["at"])
    )
    assert (await server.http.get("/console/history?node=nobody")).json()["at"] == []


async def test_rules_are_shown_with_hits(tmp_path: Path, ports: Ports) -> None:
    rules = [
        {"name": "no-reports", "user": "report", "block": {}, "dry_run": True},
        {"name": "old", "log": True, "enabled": False},
    ]
    async with run_api_server(settings(tmp_path, ports, statements={"rules": rules})) as server:
        page = (await server.http.get("/console/rules", headers=BROWSER)).text
        assert ">no-reports<" in page
        assert "user report" in page
        assert ">dry run<" in page
        assert ">off<" in page
        found = (await server.http.get("/console/rules?text=old", headers=BROWSER)).text
        assert ">old<" in found
        assert ">no-reports<" not in found
        none = (await server.http.get("/console/rules?text=nothing", headers=BROWSER)).text
        assert "No rule matches" in none
