"""The files of the chart agree with Tidevoy's version, settings, images and monitoring."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from cli.main import run as run_command
from controlplane.config import schema
from controlplane.config.settings import Settings
from release.chart import build_chart
from tests.support.kubernetes.rendered_chart import render, run_helm
from tests.support.kubernetes.value_cases import BASE, CASES, merged, rendered
from tests.support.kubernetes.values_schema import CHART, SET_BY_CHART, VALUES_SCHEMA, render_schema

ROOT = Path(__file__).resolve().parents[4]
README = (CHART / "README.md").read_text()


def settings_that_take_effect(when: str) -> set[str]:
    return {
        schema.format_path(path)
        for path, field in schema.iter_settings(Settings)
        if schema.takes_effect(field) == when
    }


def test_version_is_that_of_tidevoy() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
    assert chart["description"].rstrip(".") in project["description"].replace(": Envoy", ". Envoy")


def test_schema_of_config_is_current() -> None:
    """Otherwise run `python -m tests.support.kubernetes.values_schema`."""
    text = VALUES_SCHEMA.read_text()
    assert render_schema(text) == text


def test_restart_checksum_covers_settings_that_a_reload_does_not_apply() -> None:
    template = (CHART / "templates/_settings.tpl").read_text()
    (paths,) = re.findall(r'define "tidevoy.restartSettings".*?\$paths := list (.*?) -}}', template, re.S)
    assert set(re.findall(r'"([^"]+)"', paths)) == settings_that_take_effect("restart")


def test_readme_lists_settings_that_running_envoys_do_not_apply() -> None:
    """The bootstrap has some of them, the chart sets others, and the README names the rest."""
    pods = rendered("all options").get("ConfigMap", "balancer-envoy")
    bootstrap = yaml.safe_load(pods["data"]["tidevoy.yaml"])
    in_bootstrap = {f"{section}.{key}" for section, keys in bootstrap.items() for key in keys}
    in_bootstrap |= {"overload.max_connections"}  # not in the values of this case
    chart_sets = {path for path in settings_that_take_effect("new envoys") if _is_set_by_chart(path)}
    rest = settings_that_take_effect("new envoys") - in_bootstrap - chart_sets
    assert rest == {"sql.access_log", "xds.filter"}
    for path in (*rest, "groups.*.listen"):
        assert f"`config.{path}`" in README


def _is_set_by_chart(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in SET_BY_CHART)


def test_readme_lists_settings_that_the_chart_sets() -> None:
    listed = re.findall(r"^\| `((?!config\.)[a-z_.]+)` \|", README, re.M)
    assert set(listed) == SET_BY_CHART


def test_readme_names_only_existing_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    sections = "certificates|controlPlane|envoy|networkPolicy|monitoring"
    for name in re.findall(rf"`((?:{sections})\.[\w.]+)`", README):
        section = values
        for key in name.split("."):
            assert key in section, name
            section = section[key]


def test_readme_issues_certificates_for_the_names_that_are_used(tmp_path: Path) -> None:
    (host,) = re.findall(r"^host=(\S+)$", README, re.M)
    command, for_api = re.findall(r"^tidevoy (certificates init (?:.*\\\n)*.*)$", README, re.M)
    arguments = command.replace("\\\n", " ").replace("./ca", str(tmp_path)).replace("$host", host).split()
    assert run_command(arguments) == 0
    certificate = x509.load_pem_x509_certificate((tmp_path / "control-plane.pem").read_bytes())
    issued = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    used = rendered("minimal").get("Certificate", "tidevoy-control-plane")["spec"]["dnsNames"]
    assert set(issued.get_values_for_type(x509.DNSName)) == {name.replace(".db.", ".tidb.") for name in used}
    assert (tmp_path / "envoy-tidevoy-envoy.pem").exists()
    (api,) = [
        name
        for name in rendered("exposed API").get("Certificate", "tidevoy-api")["spec"]["dnsNames"]
        if ".svc." in name
    ]
    assert api.replace(".db.", ".tidb.") in for_api.split()


@pytest.mark.parametrize("page", [CHART / "README.md", ROOT / "docs/operate/kubernetes.md"], ids=str)
def test_values_in_documentation_are_accepted(page: Path) -> None:
    blocks = re.findall(r"^( *)```yaml\n(.*?)^\1```", page.read_text(), re.M | re.S)
    documents = [each for _, block in blocks for each in yaml.safe_load_all(textwrap.dedent(block))]
    values = [each for each in documents if "apiVersion" not in each]
    assert len(values) >= 3
    for each in values:
        render(merged(BASE, each))


@pytest.mark.parametrize("case", ["minimal", "monitoring", "all options"])
def test_lint_finds_nothing(case: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(dict(CASES[case])))
    result = run_helm("lint", "--strict", str(CHART), "--values", str(file), "--kube-version", "1.34.0")
    assert "0 chart(s) failed" in result
    assert "[WARNING]" not in result
    assert "[ERROR]" not in result


def test_package_makes_the_same_objects_as_the_directory(tmp_path: Path) -> None:
    """The directory has links to the alerts and dashboards, and the package has these files."""
    package = build_chart(ROOT, "1.2.3", tmp_path)
    for case in ("minimal", "monitoring"):
        assert render(CASES[case], chart=package).objects == rendered(case).objects


def test_users_and_paths_are_those_of_the_images() -> None:
    pods = (CHART / "templates/_pods.tpl").read_text()
    dockerfile = (ROOT / "controlplane/Dockerfile").read_text()
    uid = re.search(r"--uid (\d+)", dockerfile)
    assert uid is not None
    assert f'"tidevoy.controlPlaneUser" -}}}}{uid[1]}{{{{' in pods
    control_plane = rendered("minimal").pods_of("control-plane")
    assert control_plane is not None
    container = control_plane.container("control-plane")
    command = re.search(r"^CMD (\[.*\])$", dockerfile, re.M)
    assert command is not None
    assert container["args"] == yaml.safe_load(command[1])

    envoy = rendered("minimal").pods_of("envoy")
    assert envoy is not None
    entrypoint = (ROOT / "envoy/entrypoint.sh").read_text()
    (directory,) = [
        mount["mountPath"]
        for mount in envoy.container("envoy")["volumeMounts"]
        if mount["name"] == "bootstrap"
    ]
    assert f"bootstrap={directory}/bootstrap.yaml\n" in entrypoint
    assert "TIDEVOY_NODE_ID" in entrypoint
    (module,) = [each for each in envoy.container("bootstrap")["args"] if each.startswith("--module=")]
    assert f" {module.removeprefix('--module=')}" in (ROOT / "envoy/Dockerfile").read_text()
