"""Calls that change an Envoy: switches of its module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.version import VERSION
from sandbox.ports import Ports
from tests.support.controlplane.api_server import ApiServer, problem_kind, run_api_server, settings
from tests.support.controlplane.cli_process import run_tidevoy
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.waiting import wait_until


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports)) as server:
        yield server


async def run_envoy(server: ApiServer, name: str, module: str = VERSION) -> FakeEnvoy:
    return FakeEnvoy(server.xds_port, name, module=module)


async def test_switches_of_an_envoy_are_set_and_reset(server: ApiServer) -> None:
    async with await run_envoy(server, "zone a/1") as envoy:
        await wait_until(lambda: bool(envoy.live_configs))
        path, unset = "/v1/envoys/zone%20a%2F1", dict.fromkeys(("offload", "migration", "ready", "drain"))
        changed = (await server.http.patch(path, json={"offload": "off"})).raise_for_status().json()
        assert (changed["id"], changed["offload"], changed["migration"]) == ("zone a/1", "off", "on")
        assert changed["overrides"] == unset | {"offload": "off"}
        await wait_until(lambda: envoy.switched_off == {"offload"})
        changed = (await server.http.patch(path, json={"migration": "off"})).raise_for_status().json()
        assert changed["overrides"] == unset | {"offload": "off", "migration": "off"}
        changed = (await server.http.patch(path, json={"offload": None})).raise_for_status().json()
        assert changed["overrides"] == unset | {"migration": "off"}
        (listed,) = (await server.http.get("/v1/envoys")).json()["envoys"]
        assert (listed["offload"], listed["migration"]) == ("on", "off")
        page = (await server.http.get("/console/envoys", headers={"Accept": "text/html"})).text
        assert "migration is switched off" in page
        assert "offload is switched off" not in page


async def test_unknown_envoys_and_values_are_rejected(server: ApiServer) -> None:
    unknown = await server.http.patch("/v1/envoys/nobody", json={"offload": "off"})
    assert (unknown.status_code, problem_kind(unknown)) == (404, "unknown-envoy")
    for body in ({"offload": False}, {"offload": "no"}, {"speed": "off"}):
        response = await server.http.patch("/v1/envoys/nobody", json=body)
        assert (response.status_code, problem_kind(response)) == (422, "invalid-request"), body


async def test_envoy_without_module_has_no_switches(server: ApiServer) -> None:
    async with await run_envoy(server, "one", module="") as envoy:
        await envoy.wait_for_endpoints(lambda _: True)
        (listed,) = (await server.http.get("/v1/envoys")).json()["envoys"]
        assert (listed["offload"], listed["migration"]) == (None, None)


async def test_command_line_sets_and_shows_switches(server: ApiServer) -> None:
    async with await run_envoy(server, "one") as envoy:
        await wait_until(lambda: bool(envoy.live_configs))
        changed = await run_tidevoy(server.url, "envoys", "set", "one", "--offload", "off")
        assert changed.stdout == "one: offload is switched off by an operator\n"
        assert (
            "one: offload is switched off by an operator" in (await run_tidevoy(server.url, "envoys")).stderr
        )
        changed = await run_tidevoy(server.url, "envoys", "set", "one", "--offload", "default")
        assert changed.stdout == "one: nothing is switched off\n"
        assert (await run_tidevoy(server.url, "envoys", "set", "one")).exit_code == 2
        assert (await run_tidevoy(server.url, "envoys", "set", "two", "--migration", "on")).exit_code == 1


async def test_console_sets_readiness(server: ApiServer) -> None:
    async with await run_envoy(server, "zone a/1") as envoy:
        await wait_until(lambda: bool(envoy.live_configs))
        page, link = "/console/envoys", "/console/envoys/zone%20a%2F1"
        browser = {"Accept": "text/html"}
        assert f'href="{link}/not-ready"' in (await server.http.get(page, headers=browser)).text
        form = await server.http.get(f"{link}/not-ready", headers=browser)
        assert "send new clients to other Envoys" in form.text
        sent = await server.http.post(f"{link}/not-ready", headers=browser)
        assert (sent.status_code, sent.headers["location"]) == (303, page)
        await wait_until(lambda: envoy.switched_off == {"ready"})
        shown = (await server.http.get(f"{page}?problems=true", headers=browser)).text
        assert "an operator has set it to not ready for new clients" in shown
        assert f'href="{link}/ready"' in shown
        assert f'href="{link}/drain"' in shown
        form = await server.http.get(f"{link}/drain", headers=browser)
        assert "each session ends when it is idle" in form.text
        await server.http.post(f"{link}/drain", headers=browser)
        await wait_until(lambda: envoy.live_configs[-1].get("drain") is True)
        shown = (await server.http.get(f"{page}?problems=true", headers=browser)).text
        assert "an operator has requested its drain" in shown
        await server.http.post(f"{link}/ready", headers=browser)
        await wait_until(lambda: envoy.live_configs[-1]["drain"] is False)
        await wait_until(lambda: envoy.switched_off == set())
        unknown = await server.http.get("/console/envoys/unknown/ready", headers=browser)
        assert unknown.status_code == 404
