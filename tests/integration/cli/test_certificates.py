"""`tidevoy certificates`: real Envoys and a real control plane use the files, also after renewals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.migration.rolling_restart import parse_samples
from sandbox.control_plane import ControlPlaneProcess
from sandbox.envoy import EnvoyProcess
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.conftest import StartEnvoy
from tests.support.controlplane.api_server import stored_events
from tests.support.controlplane.cli_process import minimal_configuration, run_tidevoy
from tests.support.waiting import wait_until

UNREACHABLE_URL = "http://127.0.0.1:1"
_SECONDS_PER_DAY = 86_400
ENVOYS = ("envoy-1", "zone a/2")


async def run_certificates(*arguments: str) -> Any:
    result = await run_tidevoy(UNREACHABLE_URL, "certificates", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


async def bootstrap(control_plane: ControlPlaneProcess, envoy: str, files: Mapping[str, str]) -> str:
    """Return the bootstrap that `tidevoy bootstrap` prints with the options that `init` has printed."""
    options = [text for name, value in files.items() for text in (f"--{name}", value)]
    arguments = ("--config", str(control_plane.config_file), "--id", envoy, "--admin", "127.0.0.1:0")
    result = await run_tidevoy(UNREACHABLE_URL, "bootstrap", *arguments, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


class ControlPlaneView:
    """What the control plane reports about Envoys and certificates."""

    def __init__(self, api: httpx2.AsyncClient) -> None:
        self._api = api

    async def connected_since(self) -> dict[str, str]:
        """Return since when each Envoy is connected."""
        envoys = (await self._api.get("/v1/envoys")).raise_for_status().json()["envoys"]
        return {envoy["id"]: since for envoy in envoys if (since := envoy["connected_since"]) is not None}

    async def wait_for_envoys(self) -> dict[str, str]:
        async def are_connected() -> bool:
            return (await self.connected_since()).keys() == set(ENVOYS)

        await wait_until(are_connected, 30)
        return await self.connected_since()

    async def restart(self, envoy: EnvoyProcess, name: str) -> str:
        """Restart an Envoy and return since when it is connected."""
        before = (await self.connected_since())[name]
        await envoy.restart()

        async def is_connected_again() -> bool:
            return (await self.connected_since()).get(name, before) != before

        await wait_until(is_connected_again, 30)
        return (await self.wait_for_envoys())[name]

    async def events(self, kind: str) -> list[str]:
        return [event["subject"] for event in await stored_events(self._api) if event["kind"] == kind]

    async def certificate_expiry(self) -> dict[str, float]:
        """Return when the certificate expires that each Envoy has presented."""
        page = (await self._api.get("/metrics")).raise_for_status().text
        samples = parse_samples(page, "tidevoy_envoy_certificate_expiry_timestamp_seconds")
        return {sample.labels["envoy"]: sample.value for sample in samples}

    async def renew(self, directory: Path, *options: str) -> dict[str, Any]:
        """Run `tidevoy certificates renew` and wait until the control plane has loaded new files."""
        reloads = len(await self.events("xds.certificates_reloaded"))
        result: dict[str, Any] = await run_certificates("renew", str(directory), *options)

        async def are_loaded() -> bool:
            return len(await self.events("xds.certificates_reloaded")) > reloads

        await wait_until(are_loaded)
        return result


@pytest.mark.timeout(240)
async def test_envoys_and_control_plane_use_the_files(
    tmp_path: Path, ports: Ports, envoy_process: StartEnvoy
) -> None:
    directory = tmp_path / "certificates"
    envoy_options = [text for envoy in ENVOYS for text in ("--envoy", envoy)]
    usage = await run_certificates("init", str(directory), "--control-plane", "127.0.0.1", *envoy_options)
    settings = minimal_configuration(tmp_path, ports, tls=usage["xds"]["tls"])
    async with (
        ControlPlaneProcess(tmp_path, settings) as control_plane,
        http_client(control_plane.api_url) as api,
    ):
        view = ControlPlaneView(api)
        envoys = {
            name: await envoy_process(await bootstrap(control_plane, name, usage["bootstrap"][name]))
            for name in ENVOYS
        }
        connected_since = await view.wait_for_envoys()
        assert await view.events("envoy.denied") == []

        # The certificate of another Envoy is no use.
        impostor = await envoy_process(
            await bootstrap(control_plane, "envoy-3", usage["bootstrap"]["zone a/2"])
        )
        await wait_until(lambda: is_denied(view, "envoy-3"))
        assert (await view.wait_for_envoys()) == connected_since
        await impostor.terminate()

        assert len((await view.renew(directory, "--all", "--days", "100"))["files"]) == 6
        assert await view.connected_since() == connected_since
        first = await view.restart(envoys["envoy-1"], "envoy-1")
        assert await view.connected_since() == {**connected_since, "envoy-1": first}
        expiry = await view.certificate_expiry()
        assert expiry["zone a/2"] - expiry["envoy-1"] > 260 * _SECONDS_PER_DAY

        # A new CA. The Envoy zone a/2, which has read ca.pem before that, keeps its stream.
        await view.renew(directory, "--within", "4000d")
        await view.restart(envoys["envoy-1"], "envoy-1")
        await view.renew(directory, "--use-new-ca")
        last = await view.restart(envoys["envoy-1"], "envoy-1")
        assert await view.connected_since() == {**connected_since, "envoy-1": last}
        await view.restart(envoys["zone a/2"], "zone a/2")
        assert await view.events("xds.certificates_rejected") == []
        assert set(await view.events("envoy.denied")) == {"envoy-3"}


async def is_denied(view: ControlPlaneView, envoy: str) -> bool:
    return envoy in await view.events("envoy.denied")
