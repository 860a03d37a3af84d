"""Tidevoy accepts the settings of the chart, and makes bootstraps of the settings for Envoys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from cli.main import run as run_command
from controlplane import address as addresses
from controlplane.config.loader import read_settings
from controlplane.config.settings import Settings
from tests.support.kubernetes.rendered_chart import Object, PodTemplate, RenderedChart
from tests.support.kubernetes.value_cases import CASES, rendered

TOKENS = f'[{{"name": "anna", "role": "operator", "sha256": "{"a" * 64}"}}]'
MOUNTED_FILE = re.compile(r"/run/tidevoy/[\w./-]+")
POD = "pod-0"
WITH_CONTROL_PLANE = [case for case in CASES if case != "only Envoys"]
WITH_ENVOYS = [case for case in CASES if case != "only control planes"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(directory / "ca")
    leaf.cert_chain_pems[0].write_to_path(directory / "crt")
    leaf.private_key_pem.write_to_path(directory / "key")
    return directory


def with_files_of(certificates: Path, text: str) -> str:
    """Replace mounted files by existing ones. Other files, such as of passwords, are not checked."""

    def replace(match: re.Match[str]) -> str:
        name = Path(match[0])
        kind = "ca" if name.stem in ("ca", "people") else name.suffix.lstrip(".")
        return str(certificates / kind)

    return MOUNTED_FILE.sub(replace, text)


def environment_of(container: Object) -> dict[str, str]:
    """Return the environment of a container, as the kubelet sets it."""
    variables: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            text = each["value"]
            for name, value in variables.items():
                text = text.replace(f"$({name})", value)
            variables[each["name"]] = text
        elif "secretKeyRef" in each["valueFrom"]:
            variables[each["name"]] = TOKENS
        else:
            variables[each["name"]] = POD
    return variables


def load_settings(case: str, certificates: Path, tmp_path: Path) -> Settings:
    chart = rendered(case)
    (name,) = [each["metadata"]["name"] for each in chart.of_kind("StatefulSet")]
    text = chart.get("ConfigMap", name)["data"]["tidevoy.yaml"]
    file = tmp_path / "tidevoy.yaml"
    file.write_text(with_files_of(certificates, text))
    return read_settings(file, environment_of(pods_of(chart, "control-plane").container("control-plane")))


def pods_of(chart: RenderedChart, component: str) -> PodTemplate:
    pod = chart.pods_of(component)
    assert pod is not None
    return pod


@pytest.mark.parametrize("case", WITH_CONTROL_PLANE)
def test_control_plane_accepts_settings(case: str, certificates: Path, tmp_path: Path) -> None:
    settings = load_settings(case, certificates, tmp_path)
    pod = pods_of(rendered(case), "control-plane")
    assert addresses.split(settings.xds.listen)[1] == pod.ports["xds"]
    is_exposed = "api" in pod.ports
    assert is_exposed == (not addresses.is_loopback(settings.api.listen))
    if is_exposed:
        assert addresses.split(settings.api.listen)[1] == pod.ports["api"]
    assert settings.replicas.enabled == bool(settings.pd.urls)
    mounts = [mount["mountPath"] for mount in pod.container("control-plane")["volumeMounts"]]
    assert str(settings.state_dir) in mounts


@pytest.mark.parametrize("case", WITH_CONTROL_PLANE)
def test_ports_beyond_loopback_are_authenticated(case: str, certificates: Path, tmp_path: Path) -> None:
    settings = load_settings(case, certificates, tmp_path)
    if settings.allow_unauthenticated:
        assert case == "no TLS"
        # Otherwise the server would reject the names of its Service.
        assert "tidevoy-api.db.svc.cluster.local" in settings.api.host_names
        return
    assert settings.xds.tls is not None
    assert settings.xds.tls.client_ca is not None
    if not addresses.is_loopback(settings.api.listen):
        assert settings.api.tokens
        assert settings.api.tls is not None or settings.api.allow_cleartext_tokens


@pytest.mark.parametrize("case", WITH_CONTROL_PLANE)
def test_container_has_the_files_that_settings_name(case: str) -> None:
    chart = rendered(case)
    pod = pods_of(chart, "control-plane")
    data = chart.get("ConfigMap", pod.owner.partition("/")[2])["data"]["tidevoy.yaml"]
    mounts = [
        mount["mountPath"]
        for component in ("control-plane", "envoy")
        if (each := chart.pods_of(component)) is not None
        for mount in each.containers[-1 if component == "envoy" else 0]["volumeMounts"]
    ]
    for file in MOUNTED_FILE.findall(data):
        assert str(Path(file).parent) in mounts


@pytest.mark.parametrize("case", WITH_CONTROL_PLANE)
def test_certificate_of_control_planes_has_their_names(case: str, certificates: Path, tmp_path: Path) -> None:
    chart = rendered(case)
    settings = load_settings(case, certificates, tmp_path)
    if not chart.of_kind("Certificate"):
        return
    (workload,) = chart.of_kind("StatefulSet")
    name, replicas = workload["metadata"]["name"], workload["spec"]["replicas"]
    certificate = chart.get("Certificate", name)["spec"]
    assert settings.replicas.advertise is not None
    for number in range(replicas):
        host = addresses.split(settings.replicas.advertise.replace(POD, f"{name}-{number}"))[0]
        assert host in certificate["dnsNames"]
    assert {"server auth", "client auth"} <= set(certificate["usages"])
    # An Envoy with such a name could read what control planes exchange.
    for other in chart.of_kind("Certificate"):
        if other["spec"]["secretName"] != certificate["secretName"]:
            assert not set(other["spec"].get("dnsNames", ())) & set(certificate["dnsNames"])


def make_bootstrap(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], zone: str = "zone-b"
) -> dict[str, Any]:
    """Run the init container's command."""
    pod = pods_of(rendered(case), "envoy")
    init = pod.container("bootstrap")
    script = init["command"][2]
    assert 'tidevoy bootstrap "$@"' in script
    file = tmp_path / "tidevoy.yaml"
    file.write_text(rendered(case).get("ConfigMap", pod.owner.partition("/")[2])["data"]["tidevoy.yaml"])
    arguments = [each.replace("/config/tidevoy.yaml", str(file)) for each in init["args"]]
    arguments = [each.replace("$(ZONE)", zone) for each in arguments]
    if '--zone "$zone"' in script:
        arguments += ["--zone", zone]
    assert run_command(["bootstrap", *arguments]) == 0
    bootstrap: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return bootstrap


@pytest.mark.parametrize("case", WITH_ENVOYS)
def test_bootstrap_fits_control_planes_and_probes(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = rendered(case)
    pod = pods_of(chart, "envoy")
    resources = make_bootstrap(case, tmp_path, capsys)["static_resources"]
    (health,) = resources["listeners"]
    assert health["address"]["socket_address"]["port_value"] == pod.ports["health"]

    (cluster,) = resources["clusters"]
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    if chart.of_kind("StatefulSet"):
        (workload,) = chart.of_kind("StatefulSet")
        service = chart.get("Service", workload["metadata"]["name"])
        assert address["address"] == f"{service['metadata']['name']}.db.svc.cluster.local"
        assert address["port_value"] == pods_of(chart, "control-plane").ports["xds"]
        if chart.of_kind("Certificate"):
            certificate = chart.get("Certificate", workload["metadata"]["name"])
            assert address["address"] in certificate["spec"]["dnsNames"]
    if case == "no TLS":
        assert "transport_socket" not in cluster
    else:
        tls = cluster["transport_socket"]["typed_config"]["common_tls_context"]
        files = MOUNTED_FILE.findall(str(tls))
        mounts = [mount["mountPath"] for mount in pod.container("envoy")["volumeMounts"]]
        assert len(files) == 3
        assert all(str(Path(file).parent) in mounts for file in files)


@pytest.mark.parametrize(
    ("case", "zone", "expected"),
    [
        ("minimal", "zone-b", "zone-b"),
        ("minimal", "", None),  # the Pod has no such label
        ("zone of the node", "zone-b", "zone-b"),
        ("zone of the node", "", None),
        ("fixed zone", "", "a"),
    ],
)
def test_bootstrap_has_zone(
    case: str, zone: str, expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = make_bootstrap(case, tmp_path, capsys, zone)["node"]
    assert node.get("locality", {}).get("zone") == expected


def test_bootstrap_has_group_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = make_bootstrap("one group", tmp_path, capsys)["node"]["metadata"]
    assert metadata["tidevoy.group"] == "olap"
    bootstrap = make_bootstrap("all options", tmp_path, capsys)
    assert bootstrap["stats_flush_interval"] == "5s"
    assert "stats_matcher" in bootstrap["stats_config"]
    (heap, _) = bootstrap["overload_manager"]["resource_monitors"]
    assert heap["typed_config"]["max_heap_size_bytes"] == 2147483648


def test_default_heap_limit_is_that_of_the_settings() -> None:
    values = yaml.safe_load((Path(__file__).parents[4] / "deploy/helm/tidevoy/values.yaml").read_text())
    assert values["config"]["overload"]["max_heap_bytes"] == Settings().overload.max_heap_bytes
