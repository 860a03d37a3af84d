"""`tidevoy bootstrap`: a real Envoy that starts with what it prints is one of the fleet."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import trustme
import yaml

from controlplane.xds.bootstrap import module_path
from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from tests.conftest import StartEnvoy
from tests.support.controlplane.cli_process import minimal_configuration, run_tidevoy

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A directory with `ca.pem`, and a certificate and a key of the control plane and of an Envoy."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, identity in (("control-plane", "127.0.0.1"), ("envoy-1", "envoy-1")):
        issued = authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    return tmp_path


@pytest.fixture
def tls(certificates: Path) -> dict[str, str]:
    return {
        "cert": str(certificates / "control-plane.pem"),
        "key": str(certificates / "control-plane.key"),
        "client_ca": str(certificates / "ca.pem"),
    }


async def test_an_envoy_joins_by_mutual_tls(
    tmp_path: Path, ports: Ports, certificates: Path, tls: dict[str, str], envoy_process: StartEnvoy
) -> None:
    async with ControlPlaneProcess(tmp_path, minimal_configuration(tmp_path, ports, tls=tls)) as plane:
        printed = await run_tidevoy(
            NOWHERE,
            *("bootstrap", "--config", str(plane.config_file), "--id", "envoy-1", "--admin", "127.0.0.1:0"),
            *("--ca", str(certificates / "ca.pem")),
            *("--cert", str(certificates / "envoy-1.pem"), "--key", str(certificates / "envoy-1.key")),
        )
        assert (printed.exit_code, printed.stderr) == (0, "")
        await envoy_process(printed.stdout)
        async with asyncio.timeout(30):
            while not (
                fleet := json.loads((await run_tidevoy(plane.api_url, "envoys", "--json")).stdout)["envoys"]
            ):
                pass
        assert [envoy["id"] for envoy in fleet] == ["envoy-1"]


@pytest.mark.parametrize(
    ("demanded", "given", "missing"),
    [
        (("cert", "key"), (), "name its CA file with --ca"),
        (("cert", "key", "client_ca"), (), "name its CA file with --ca"),
        (("cert", "key", "client_ca"), ("--ca", "ca.pem"), "name its files with --cert and --key"),
    ],
)
async def test_an_envoy_that_could_never_connect_is_refused(
    tmp_path: Path,
    ports: Ports,
    tls: dict[str, str],
    demanded: tuple[str, ...],
    given: tuple[str, ...],
    missing: str,
) -> None:
    wanted = minimal_configuration(tmp_path, ports, tls={key: tls[key] for key in demanded})
    file = tmp_path / "tidevoy.yaml"
    file.write_text(json.dumps(wanted))
    refused = await run_tidevoy(NOWHERE, "bootstrap", "--config", str(file), *given)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert missing in refused.stderr


async def test_an_admin_port_for_everyone_is_refused() -> None:
    refused = await run_tidevoy(NOWHERE, "bootstrap", "--admin", "0.0.0.0:9901")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "Envoy's admin port obeys whoever reaches it" in refused.stderr


async def test_a_module_is_named_by_an_absolute_path_or_found() -> None:
    named = await run_tidevoy(NOWHERE, "bootstrap", "--module", "/opt/libtidevoy.so")
    assert (named.exit_code, named.stderr) == (0, "")
    (extension,) = yaml.safe_load(named.stdout)["bootstrap_extensions"]
    module = extension["typed_config"]["dynamic_module_config"]["module"]
    assert module == {"local": {"filename": "/opt/libtidevoy.so"}}

    relative = await run_tidevoy(NOWHERE, "bootstrap", "--module", "libtidevoy.so")
    assert (relative.exit_code, relative.stdout, relative.stderr.count("\n")) == (2, "", 1)
    assert "relative path" in relative.stderr

    found = await run_tidevoy(NOWHERE, "bootstrap", "--module", "auto")
    if (file := module_path.find_module()) is None:
        assert (found.exit_code, found.stdout) == (2, "")
        assert "cargo build --release" in found.stderr
    else:
        assert found.exit_code == 0
        assert str(file) in found.stdout
