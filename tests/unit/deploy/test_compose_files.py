"""docker-compose.yml and the files that it mounts are consistent with each other and with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.config import loader as settings_file
from controlplane.xds.bootstrap import bootstrap

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MODULE = "/usr/lib/tidevoy/libtidevoy.so"
TIDB = [name for name in SERVICES if name.startswith("tidb")]


def test_image_bootstrap_matches_command_output() -> None:
    """The command is `tidevoy bootstrap --control-plane controlplane:18000 --module MODULE`."""
    settings = settings_file.read_settings(ROOT / "deploy/tidevoy.yaml", {})
    printed = bootstrap.render_bootstrap(
        settings, control_planes=["controlplane:18000"], node_id=None, module=MODULE
    )
    assert (ROOT / "envoy/bootstrap.yaml").read_text() == printed


def test_envoy_image_contains_module() -> None:
    dockerfile = (ROOT / "envoy/Dockerfile").read_text()
    workspace = tomllib.loads((ROOT / "filters/Cargo.toml").read_text())["workspace"]
    minimum = tuple(map(int, workspace["package"]["rust-version"].split(".")))
    compiler = re.search(r"^FROM rust:(\d+)\.(\d+)-slim-bookworm AS build$", dockerfile, re.MULTILINE)
    assert compiler is not None
    assert (int(compiler[1]), int(compiler[2])) >= minimum
    copied = re.search(r"^COPY --from=build --chown=0:0 \S+ (\S+)$", dockerfile, re.MULTILINE)
    assert copied is not None
    assert copied[1] == MODULE


def test_tidb_servers_have_time_for_graceful_shutdown() -> None:
    """`stop_grace_period` must cover a graceful stop of TiDB, with 20 s in reserve.

    A stop takes `graceful-wait-before-shutdown`, up to 15 s for transactions, and 1 s more (pingcap/tidb
    pkg/server/server.go).
    """
    wait = tomllib.loads((ROOT / "deploy/tidb.toml").read_text())["graceful-wait-before-shutdown"]
    interval = settings_file.read_settings(ROOT / "deploy/tidevoy.yaml", {}).health.status.interval
    assert wait >= 3 * interval
    assert len(TIDB) == 3
    for name in TIDB:
        grace = SERVICES[name]["stop_grace_period"]
        assert grace.endswith("s")
        assert int(grace.removesuffix("s")) >= wait + 15 + 1 + 20, name


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_health_check_and_pinned_version(name: str) -> None:
    service = SERVICES[name]
    if service.get("restart") == "no":
        dependents = [other for other in SERVICES.values() if name in other.get("depends_on", {})]
        assert dependents, "no service depends on its result"
        for other in dependents:
            assert other["depends_on"][name] == {"condition": "service_completed_successfully"}
    elif "build" in service:
        build = service["build"]
        assert "\nHEALTHCHECK " in (ROOT / build["context"] / build["dockerfile"]).read_text()
    else:
        assert service["healthcheck"]["test"][0] == "CMD"
    assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), service["image"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), (
            f"{port}: publish on 127.0.0.1 only, the services do not authenticate clients"
        )


def test_mounted_files_exist() -> None:
    mounted = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    sources = {volume.partition(":")[0] for volume in mounted}
    files = {source for source in sources if source.startswith(".")}
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert sources - files == set(COMPOSE["volumes"])


def test_prometheus_scrapes_existing_services() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    targets = [
        target
        for job in config["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    assert {target.partition(":")[0] for target in targets} == {"controlplane", "pd", "tikv", *TIDB}


def test_grafana_home_dashboard_exists() -> None:
    environment = SERVICES["grafana"]["environment"]
    page = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert f"./deploy/grafana/dashboards:{page.parent}:ro" in SERVICES["grafana"]["volumes"]
    assert (ROOT / "deploy/grafana/dashboards" / page.name).exists()
