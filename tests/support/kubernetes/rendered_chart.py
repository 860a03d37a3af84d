"""Render the Helm chart, and look at the objects that it makes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.kubernetes.go_program import HELM
from tests.support.kubernetes.values_schema import CHART

Object = dict[str, Any]
Labels = Mapping[str, str]

NAMESPACE = "db"
# A Helm that `go install` has built takes an old version of Kubernetes as default.
KUBERNETES_VERSION = "1.34.0"
# Longer than any `--timeout` of Helm.
_TIMEOUT_SECONDS = 600.0


class HelmFailed(Exception):
    """Helm rejects the values or a template. The text is Helm's."""


def find_helm() -> str:
    """Return the path of Helm, in the version of `HELM`. Raises LanguageNotPackaged if it needs Go.

    `make test` builds Helm before the tests.
    """
    return str(HELM.install())


def run_helm(*arguments: str, input: str | None = None) -> str:
    """Run Helm and return its output. Raises HelmFailed."""
    # Without the plugins and repositories of the user.
    environment = {**os.environ, "HELM_PLUGINS": "/nonexistent", "HELM_NAMESPACE": NAMESPACE}
    result = subprocess.run(
        [find_helm(), *arguments],
        input=input,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    if result.returncode != 0:
        raise HelmFailed(result.stderr)
    return result.stdout


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """The Pods of a workload, or a Pod. `owner` is `KIND/NAME`."""

    owner: str
    labels: Labels
    annotations: Mapping[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """All containers, also those that run before the others."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """The ports of the containers by name."""
        return {
            port["name"]: port["containerPort"]
            for container in self.spec["containers"]
            for port in container.get("ports", [])
        }

    def container(self, name: str) -> Object:
        """Return the container of this name."""
        (found,) = [container for container in self.containers if container["name"] == name]
        return found


class RenderedChart:
    """The objects of a release."""

    def __init__(self, manifest: str) -> None:
        self.objects: list[Object] = [
            document for document in yaml.load_all(manifest, yaml.CSafeLoader) if document
        ]

    def of_kind(self, kind: str) -> list[Object]:
        """Return all objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        """Return the object of this kind and name."""
        (found,) = [each for each in self.of_kind(kind) if each["metadata"]["name"] == name]
        return found

    @property
    def pods(self) -> list[PodTemplate]:
        """The Pods of all workloads, and the Pod of `helm test`."""
        return list(self._pods())

    def pods_of(self, component: str) -> PodTemplate | None:
        """Return the Pods of one component, if the release has it."""
        found = [each for each in self.pods if each.labels["app.kubernetes.io/component"] == component]
        return found[0] if found else None

    def _pods(self) -> Iterator[PodTemplate]:
        for each in self.objects:
            owner = f"{each['kind']}/{each['metadata']['name']}"
            if each["kind"] == "Pod":
                yield _pod_template(owner, each)
            elif each["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
                yield _pod_template(owner, each["spec"]["template"])


def _pod_template(owner: str, template: Object) -> PodTemplate:
    metadata = template["metadata"]
    return PodTemplate(owner, metadata["labels"], metadata.get("annotations", {}), template["spec"])


def render(values: Mapping[str, Any], release: str = "tidevoy", chart: Path = CHART) -> RenderedChart:
    """Render the chart. Raises HelmFailed."""
    arguments = ("template", release, str(chart), "--values", "-", "--kube-version", KUBERNETES_VERSION)
    return RenderedChart(run_helm(*arguments, input=json.dumps(values)))


def is_selected(selector: Labels, labels: Labels) -> bool:
    """Return whether an object with these labels has all labels of the selector."""
    return selector.items() <= labels.items()
