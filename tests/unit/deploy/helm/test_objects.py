"""The rendered objects are valid and fit together, for all kinds of values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kubernetes.object_schemas import is_foreign, problems
from tests.support.kubernetes.rendered_chart import PodTemplate, is_selected
from tests.support.kubernetes.value_cases import CASES, Values, rendered

pytestmark = pytest.mark.parametrize("case", CASES)

# Kubernetes creates it in each namespace.
CLUSTER_CONFIG_MAPS = {"kube-root-ca.crt"}


def values_named(values: Any, key: str) -> Iterator[Any]:
    """Yield what is below each key of this name."""
    if isinstance(values, dict):
        for name, value in values.items():
            if name == key:
                yield value
            yield from values_named(value, key)
    elif isinstance(values, list):
        for value in values:
            yield from values_named(value, key)


def external_secrets(values: Values) -> set[str]:
    """Return the Secrets that the values name: their users create them."""
    names = {name for name in values_named(dict(values), "secretName") if name}
    for secrets in values_named(dict(values), "secrets"):
        names |= set(secrets.values())
    names |= {each["name"] for each in values.get("imagePullSecrets", [])}
    if values["certificates"]["source"] == "secrets":
        names |= {f"tidevoy-{part}-tls" for part in ("control-plane", "envoy", "api")}
    return names


def test_objects_match_schemas_of_api(case: str) -> None:
    for each in rendered(case).objects:
        if not is_foreign(each):
            assert problems(each) == [], f"{each['kind']} {each['metadata']['name']}"


def test_names_are_unique_and_in_namespace(case: str) -> None:
    objects = rendered(case).objects
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    for each in objects:
        is_cluster_wide = each["kind"].startswith("Cluster")
        assert is_cluster_wide or each["metadata"].get("namespace", "db") == "db"
        # Otherwise two releases in different namespaces would conflict.
        assert not is_cluster_wide or each["metadata"]["name"].startswith("db-")


def test_workloads_select_their_own_pods_only(case: str) -> None:
    chart = rendered(case)
    workloads = [each for each in chart.objects if "template" in each.get("spec", {})]
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        selected = [pod.owner for pod in chart.pods if is_selected(selector, pod.labels)]
        assert selected == [f"{workload['kind']}/{workload['metadata']['name']}"]


def test_pods_change_only_if_they_must(case: str) -> None:
    """Pods and claims have no labels that a new version of the chart would change."""
    chart = rendered(case)
    templates = [each["spec"]["template"] for each in chart.objects if "template" in each.get("spec", {})]
    for each in chart.of_kind("StatefulSet"):
        templates += each["spec"].get("volumeClaimTemplates", [])
    assert templates
    for template in templates:
        changing = {"helm.sh/chart", "app.kubernetes.io/version", "team"}
        assert not changing & template["metadata"]["labels"].keys()


def test_services_lead_to_ports_of_pods(case: str) -> None:
    chart = rendered(case)
    for service in chart.of_kind("Service"):
        targets = [pod for pod in chart.pods if is_selected(service["spec"]["selector"], pod.labels)]
        assert len(targets) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in targets[0].ports
            assert len(port["name"]) <= 15
    for workload in chart.of_kind("StatefulSet"):
        assert chart.get("Service", workload["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


def test_budgets_autoscalers_and_accounts_refer_to_existing_objects(case: str) -> None:
    chart = rendered(case)
    for budget in chart.of_kind("PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [pod.owner for pod in chart.pods if is_selected(selector, pod.labels)]
    for scaler in chart.of_kind("HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        # Helm would otherwise reset the number of Pods.
        assert "replicas" not in chart.get(target["kind"], target["name"])["spec"]
    for pod in chart.pods:
        if (account := pod.spec.get("serviceAccountName")) is not None:
            assert chart.get("ServiceAccount", account)["automountServiceAccountToken"] is False
    for binding in chart.of_kind("ClusterRoleBinding"):
        assert chart.get("ClusterRole", binding["roleRef"]["name"])
        for subject in binding["subjects"]:
            assert chart.get("ServiceAccount", subject["name"])


def test_mounted_volumes_config_maps_and_secrets_exist(case: str) -> None:
    chart = rendered(case)
    config_maps = {each["metadata"]["name"] for each in chart.of_kind("ConfigMap")} | CLUSTER_CONFIG_MAPS
    secrets = {each["spec"]["secretName"] for each in chart.of_kind("Certificate")}
    secrets |= external_secrets(CASES[case])
    for pod in chart.pods:
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        assert len(volumes) == len(pod.spec.get("volumes", []))
        claims = {
            claim["metadata"]["name"]
            for each in chart.of_kind("StatefulSet")
            if pod.owner == f"StatefulSet/{each['metadata']['name']}"
            for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        assert not claims & volumes.keys()
        mounted = set()
        for container in pod.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            # A volume inside of another one, which is read-only, cannot be mounted.
            assert not [one for one in paths for other in paths if one.startswith(f"{other}/")]
            mounted |= {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == volumes.keys() | claims
        for name in [*values_named(pod.spec, "secretName"), *_secrets_of_environment(pod)]:
            assert name in secrets, f"{pod.owner}: the Secret {name} is neither made nor named in the values"
        for volume in (*values_named(pod.spec, "configMap"),):
            assert volume["name"] in config_maps
    for monitor in chart.of_kind("ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["authorization"]["credentials"]["name"] in secrets
            assert endpoint["tlsConfig"]["ca"]["secret"]["name"] in secrets


def _secrets_of_environment(pod: PodTemplate) -> Iterator[str]:
    for reference in values_named(pod.spec, "secretKeyRef"):
        yield reference["name"]


def test_probes_use_existing_ports_and_programs(case: str) -> None:
    for pod in rendered(case).pods:
        for container in pod.spec["containers"]:
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                if (probe := container.get(name)) is None:
                    assert container["name"] in ("reloader", "connection")
                elif "httpGet" in probe:
                    assert probe["httpGet"]["port"] in {port["name"] for port in container["ports"]}
                    path = "/readyz" if name == "readinessProbe" else "/healthz"
                    assert probe["httpGet"]["path"] == path
                else:
                    assert probe["exec"]["command"][0] == "python"


def test_config_maps_contain_no_secrets(case: str) -> None:
    for each in rendered(case).of_kind("ConfigMap"):
        for text in each["data"].values():
            assert not re.search(r"PRIVATE KEY|sha256:|password:", text)
    assert rendered(case).of_kind("Secret") == []


def test_pods_are_confined(case: str) -> None:
    for pod in rendered(case).pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "sysctls" not in pod.spec["securityContext"]
        assert "hostNetwork" not in pod.spec
        for container in pod.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert not re.search(r":latest$|^[^:]+$", container["image"])


def test_only_init_container_gets_token_of_node_reader(case: str) -> None:
    pod = rendered(case).pods_of("envoy")
    if pod is None:
        return
    with_token = [
        container["name"]
        for container in pod.containers
        for mount in container["volumeMounts"]
        if mount["name"] == "node-reader"
    ]
    assert with_token == (["bootstrap"] if case == "zone of the node" else [])
    assert len(rendered(case).of_kind("ClusterRole")) == len(with_token)


def test_envoys_have_time_to_end_and_no_gap_in_updates(case: str) -> None:
    pod = rendered(case).pods_of("envoy")
    if pod is None:
        return
    end = {"wait": 10, "timeout": 30} | dict(CASES[case].get("config", {}).get("end", {}))
    assert pod.spec["terminationGracePeriodSeconds"] >= end["wait"] + end["timeout"] + 15
    kind, name = pod.owner.split("/")
    spec = rendered(case).get(kind, name)["spec"]
    update = spec["strategy" if kind == "Deployment" else "updateStrategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0
    assert update["maxSurge"] == 1
    assert "preStop" not in str(pod.spec)


def test_spread_constraints_select_the_pods_themselves(case: str) -> None:
    for pod in rendered(case).pods:
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            selector = constraint.get("labelSelector", {}).get("matchLabels", {})
            assert is_selected(selector, pod.labels)
