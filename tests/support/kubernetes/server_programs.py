"""Builds the programs of a Kubernetes cluster from the Go module proxy.

`python -m tests.support.kubernetes.server_programs` builds all of them, which takes a quarter of an hour on
two cores. The module in `server/` requires k8s.io/kubernetes.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.build_tools import find_go, run_tool
from tests.support.cache import locked
from tests.support.kubernetes.go_program import CACHE, GoProgram

_MODULE = Path(__file__).parent / "server"
_BUILD_TIMEOUT_SECONDS = 7200.0
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
COREDNS = GoProgram("coredns", "github.com/coredns/coredns", "v1.12.4")
_CNI = "github.com/containernetworking/plugins/plugins"
CNI_PLUGINS = (
    GoProgram("bridge", f"{_CNI}/main/bridge", "v1.9.0"),
    GoProgram("loopback", f"{_CNI}/main/loopback", "v1.9.0"),
    GoProgram("host-local", f"{_CNI}/ipam/host-local", "v1.9.0"),
)
# Versions of the modules whose custom resource definitions the chart's objects use.
_DEFINITIONS = {
    "github.com/cert-manager/cert-manager@v1.21.2": (
        "deploy/crds/cert-manager.io_certificates.yaml",
        "deploy/crds/cert-manager.io_issuers.yaml",
    ),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}


def version() -> str:
    """Return the version of Kubernetes that the module requires, such as v1.34.4."""
    match = re.search(r"^require k8s.io/kubernetes (\S+)$", (_MODULE / "go.mod").read_text(), re.M)
    assert match is not None
    return match[1]


def program(name: str) -> Path:
    """Return one of `PROGRAMS`; build it first if needed. Raises LanguageNotPackaged or BuildFailed."""
    path = CACHE / f"kubernetes-{version()}" / name
    if path.exists():
        return path
    with locked(CACHE, "kubernetes"):
        if not path.exists():
            major, minor, _ = version().lstrip("v").split(".")
            variables = {"gitVersion": version(), "gitMajor": major, "gitMinor": minor}
            flags = " ".join(
                f"-X k8s.io/component-base/version.{key}={text}" for key, text in variables.items()
            )
            run_tool(
                [
                    find_go(),
                    "build",
                    "-trimpath",
                    f"-ldflags=-s -w {flags}",
                    f"-o={path}",
                    f"k8s.io/kubernetes/cmd/{name}",
                ],
                _MODULE,
                {"CGO_ENABLED": "0"},
                timeout=_BUILD_TIMEOUT_SECONDS,
            )
    return path


def resource_definitions() -> list[str]:
    """Return the custom resource definitions of cert-manager and Prometheus Operator, as YAML."""
    texts = []
    for module, files in _DEFINITIONS.items():
        output = run_tool([find_go(), "mod", "download", "-json", module], _MODULE)
        directory = re.search(r'"Dir": "(.+)"', output)
        assert directory is not None
        texts += [(Path(directory[1]) / file).read_text() for file in files]
    return texts


def main() -> None:
    """Build all programs, and download the definitions. The tests then need no network."""
    for name in PROGRAMS:
        print(program(name), flush=True)
    for other in (COREDNS, *CNI_PLUGINS):
        print(other.install(), flush=True)
    resource_definitions()


if __name__ == "__main__":
    main()
