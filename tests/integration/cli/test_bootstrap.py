"""`tidevoy bootstrap`: a real Envoy that is started with its output connects to the control plane."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trustme
import yaml

from controlplane.xds.bootstrap import module_path
from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.conftest import StartEnvoy
from tests.support.controlplane.cli_process import minimal_configuration, run_tidevoy
from tests.support.waiting import wait_until

UNREACHABLE_URL = "http://127.0.0.1:1"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Return a directory with `ca.pem`, and certificates and keys of the control plane and of an Envoy."""
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


async def test_envoy_connects_with_mutual_tls(
    tmp_path: Path, ports: Ports, certificates: Path, tls: dict[str, str], envoy_process: StartEnvoy
) -> None:
    async with ControlPlaneProcess(
        tmp_path, minimal_configuration(tmp_path, ports, tls=tls)
    ) as control_plane:
        bootstrap = await run_tidevoy(
            UNREACHABLE_URL,
            *(
                "bootstrap",
                "--config",
                str(control_plane.config_file),
                "--id",
                "envoy-1",
                "--admin",
                "127.0.0.1:0",
            ),
            *("--ca", str(certificates / "ca.pem")),
            *("--cert", str(certificates / "envoy-1.pem"), "--key", str(certificates / "envoy-1.key")),
        )
        assert (bootstrap.exit_code, bootstrap.stderr) == (0, "")
        await envoy_process(bootstrap.stdout)
        async with http_client(control_plane.api_url) as api:

            async def has_envoys() -> bool:
                return bool((await api.get("/v1/envoys")).json()["envoys"])

            await wait_until(has_envoys, 30)
        envoys = json.loads((await run_tidevoy(control_plane.api_url, "envoys", "--json")).stdout)["envoys"]
        assert [envoy["id"] for envoy in envoys] == ["envoy-1"]


@pytest.mark.parametrize(
    ("tls_keys", "options", "missing"),
    [
        (("cert", "key"), (), "name the CA file with --ca"),
        (("cert", "key", "client_ca"), (), "name the CA file with --ca"),
        (("cert", "key", "client_ca"), ("--ca", "ca.pem"), "name its files with --cert and --key"),
    ],
)
async def test_rejects_an_envoy_without_required_tls_files(
    tmp_path: Path,
    ports: Ports,
    tls: dict[str, str],
    tls_keys: tuple[str, ...],
    options: tuple[str, ...],
    missing: str,
) -> None:
    settings = minimal_configuration(tmp_path, ports, tls={key: tls[key] for key in tls_keys})
    file = tmp_path / "tidevoy.yaml"
    file.write_text(json.dumps(settings))
    result = await run_tidevoy(UNREACHABLE_URL, "bootstrap", "--config", str(file), *options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert missing in result.stderr


async def test_rejects_a_public_admin_port() -> None:
    result = await run_tidevoy(UNREACHABLE_URL, "bootstrap", "--admin", "0.0.0.0:9901")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "anyone who reaches Envoy's admin port controls Envoy" in result.stderr


async def test_module_needs_an_absolute_path_or_auto() -> None:
    absolute = await run_tidevoy(UNREACHABLE_URL, "bootstrap", "--module", "/opt/libtidevoy.so")
    assert (absolute.exit_code, absolute.stderr) == (0, "")
    (extension,) = yaml.safe_load(absolute.stdout)["bootstrap_extensions"]
    module = extension["typed_config"]["dynamic_module_config"]["module"]
    assert module == {"local": {"filename": "/opt/libtidevoy.so"}}

    relative = await run_tidevoy(UNREACHABLE_URL, "bootstrap", "--module", "libtidevoy.so")
    assert (relative.exit_code, relative.stdout, relative.stderr.count("\n")) == (2, "", 1)
    assert "relative path" in relative.stderr

    auto = await run_tidevoy(UNREACHABLE_URL, "bootstrap", "--module", "auto")
    if (file := module_path.find_module()) is None:
        assert (auto.exit_code, auto.stdout) == (2, "")
        assert "cargo build --release" in auto.stderr
    else:
        assert auto.exit_code == 0
        assert str(file) in auto.stdout
