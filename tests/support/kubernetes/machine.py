"""A machine of a cluster that runs Pods: containerd, kubelet, kube-proxy and CoreDNS.

The whole test process must run in new network and mount namespaces (`unshare --net --mount`), because these
programs change the firewall, add bridges and mount volumes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from sandbox.child_process import ProgramMissing, find_program
from sandbox.server import Server, http_responds
from tests.support.kubernetes import server_programs
from tests.support.kubernetes.cluster import ApiServer, KubernetesCluster
from tests.support.kubernetes.container_images import PAUSE_IMAGE, images_archive
from tests.support.kubernetes.server_programs import CNI_PLUGINS, COREDNS

NAME = "machine"
ZONE = "zone-b"
ADDRESS = "10.84.0.1"
POD_NETWORK = "10.85.0.0/16"
_CLUSTER_DOMAIN = "cluster.local"
_DNS_PORT = 53
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP = "tidevoy-kubelet"


def missing_requirement() -> str:
    """Return why no machine can run here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can run containers"
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "run it in a network namespace of its own: make test-kubernetes"
    try:
        for program, package in (("containerd", "containerd"), ("runc", "runc"), ("ip", "iproute2")):
            find_program(program, package)
    except ProgramMissing as error:
        return str(error)
    return ""


class Containerd(Server):
    """containerd with its interface for kubelets."""

    hidden_variables = ".*_proxy|.*_PROXY"

    def __init__(self, directory: Path) -> None:
        super().__init__("containerd", directory)
        self.socket = self.directory / "containerd.sock"

    def configuration(self) -> str:
        plugins = self.directory / "cni-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        for plugin in CNI_PLUGINS:
            shutil.copy(plugin.install(), plugins / plugin.name)
        networks = self.directory / "cni"
        networks.mkdir(exist_ok=True)
        network: dict[str, Any] = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods0",
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self.directory / "ipam"),
                        "ranges": [[{"subnet": POD_NETWORK}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (networks / "pods.conflist").write_text(json.dumps(network))
        return "\n".join(
            (
                "version = 2",
                f'root = "{self.directory}/root"',
                f'state = "{self.directory}/state"',
                "[grpc]",
                f'address = "{self.socket}"',
                '[plugins."io.containerd.grpc.v1.cri"]',
                f'sandbox_image = "{PAUSE_IMAGE}"',
                "restrict_oom_score_adj = true",  # without CAP_SYS_RESOURCE
                '[plugins."io.containerd.grpc.v1.cri".containerd]',
                'default_runtime_name = "runc"',
                '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]',
                'runtime_type = "io.containerd.runc.v2"',
                '[plugins."io.containerd.grpc.v1.cri".cni]',
                f'bin_dir = "{plugins}"',
                f'conf_dir = "{networks}"',
                "",
            )
        )

    config_suffix = ".toml"

    def command(self) -> list[str]:
        return [find_program("containerd", "containerd"), "--config", str(self.config_file)]

    async def is_serving(self) -> bool:
        try:
            await self.ctr("version")
        except subprocess.CalledProcessError:
            return False
        return True

    async def ctr(self, *arguments: str) -> str:
        """Run containerd's command line."""
        command = [
            find_program("ctr", "containerd"),
            f"--address={self.socket}",
            "--namespace=k8s.io",
            *arguments,
        ]
        result = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True, timeout=300
        )
        return result.stdout


class Kubelet(Server):
    """The kubelet of the machine."""

    start_timeout_seconds = 90.0

    def __init__(self, api: ApiServer, runtime: Containerd) -> None:
        super().__init__("kubelet", api.directory)
        self.port, self._health_port = self.ports.allocate(), self.ports.allocate()
        self._api, self._runtime = api, runtime

    def configuration(self) -> str:
        return yaml.safe_dump(
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "address": ADDRESS,
                "port": self.port,
                "healthzPort": self._health_port,
                # Only processes of this network namespace reach it.
                "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
                "authorization": {"mode": "AlwaysAllow"},
                "cgroupDriver": "cgroupfs",
                "cgroupRoot": f"/{_CGROUP}",
                "enforceNodeAllocatable": [],
                "failSwapOn": False,
                "clusterDNS": [ADDRESS],
                "clusterDomain": _CLUSTER_DOMAIN,
                "containerRuntimeEndpoint": f"unix://{self._runtime.socket}",
                "imageGCHighThresholdPercent": 100,
                "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"},
                "syncFrequency": "5s",
                "configMapAndSecretChangeDetectionStrategy": "Watch",
                "resolvConf": "",
            }
        )

    def command(self) -> list[str]:
        return [
            str(server_programs.program("kubelet")),
            f"--config={self.config_file}",
            f"--kubeconfig={self._api.kubeconfig}",
            f"--root-dir={self.directory / 'kubelet-root'}",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            f"--node-labels=topology.kubernetes.io/zone={ZONE}",
        ]

    async def is_serving(self) -> bool:
        return await http_responds(f"http://127.0.0.1:{self._health_port}/healthz")


class KubeProxy(Server):
    """The proxy that implements Services."""

    def __init__(self, api: ApiServer) -> None:
        super().__init__("kube-proxy", api.directory)
        self._health_port, self._metrics_port = self.ports.allocate(), self.ports.allocate()
        self._api = api

    def configuration(self) -> str:
        return yaml.safe_dump(
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "clientConnection": {"kubeconfig": str(self._api.kubeconfig)},
                "bindAddress": ADDRESS,
                "healthzBindAddress": f"127.0.0.1:{self._health_port}",
                "metricsBindAddress": f"127.0.0.1:{self._metrics_port}",
                "mode": "iptables",
                "clusterCIDR": POD_NETWORK,
                "hostnameOverride": NAME,
                # Not to change the machine's settings.
                "conntrack": {"maxPerCore": 0, "min": 0},
            }
        )

    def command(self) -> list[str]:
        return [str(server_programs.program("kube-proxy")), f"--config={self.config_file}"]

    async def is_serving(self) -> bool:
        return await http_responds(f"http://127.0.0.1:{self._health_port}/healthz")


class CoreDns(Server):
    """The DNS server of the cluster."""

    config_suffix = ".conf"

    def __init__(self, api: ApiServer) -> None:
        super().__init__("coredns", api.directory)
        self._ready_port = self.ports.allocate()
        self._api = api

    def configuration(self) -> str:
        return (
            f"{_CLUSTER_DOMAIN}:{_DNS_PORT} in-addr.arpa:{_DNS_PORT} {{\n"
            f"  bind {ADDRESS}\n  ready 127.0.0.1:{self._ready_port}\n  errors\n"
            f"  kubernetes {_CLUSTER_DOMAIN} in-addr.arpa {{\n"
            f"    kubeconfig {self._api.kubeconfig} test\n  }}\n}}\n"
        )

    def command(self) -> list[str]:
        return [str(COREDNS.install()), f"-conf={self.config_file}"]

    async def is_serving(self) -> bool:
        return await http_responds(f"http://127.0.0.1:{self._ready_port}/ready")


@asynccontextmanager
async def run_machine(cluster: KubernetesCluster, directory: Path) -> AsyncIterator[Containerd]:
    """Run the machine's programs, with the images that the chart needs."""
    archive = images_archive()
    async with AsyncExitStack() as stack:
        _create_cgroups()
        stack.callback(_remove_cgroups)
        containerd = await stack.enter_async_context(Containerd(directory / "containerd"))
        await containerd.ctr("images", "import", str(archive))
        stack.push_async_callback(_stop_pods, containerd)
        await stack.enter_async_context(CoreDns(cluster.api))
        await stack.enter_async_context(Kubelet(cluster.api, containerd))
        await stack.enter_async_context(KubeProxy(cluster.api))
        yield containerd


async def _stop_pods(containerd: Containerd) -> None:
    for task in (await containerd.ctr("tasks", "list", "--quiet")).split():
        with suppress(subprocess.CalledProcessError):
            await containerd.ctr("tasks", "delete", "--force", task)


def _create_cgroups() -> None:
    """Create the group below which the kubelet puts Pods. In cgroup v1, each controller has its hierarchy."""
    roots = [path.parent for path in _CGROUPS.glob("*/cgroup.procs")] or [_CGROUPS]
    for root in roots:
        (root / _CGROUP).mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (root / setting).exists():
                (root / _CGROUP / setting).write_text((root / setting).read_text())


def _remove_cgroups() -> None:
    tops = [path for path in (*_CGROUPS.glob(f"*/{_CGROUP}"), *_CGROUPS.glob(_CGROUP)) if path.is_dir()]
    below = [path for top in tops for path in top.rglob("*/") if path.is_dir()]
    for path in sorted({*tops, *below}, key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            path.rmdir()


def set_up_namespaces(environment: Mapping[str, str]) -> None:
    """Give the machine its address, and directories that other programs of this machine do not see."""
    for directory in ("/run/containerd", "/run/netns"):
        Path(directory).mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True, env=dict(environment))
    for command in (
        "ip link set lo up",
        "ip link add machine0 type bridge",
        f"ip address add {ADDRESS}/24 dev machine0",
        "ip link set machine0 up",
        # Services and Pods are reached by local rules and the bridge.
        "ip route add default dev machine0",
    ):
        subprocess.run(command.split(), check=True, env=dict(environment))
    for setting in ("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet"):
        (Path("/proc/sys") / setting).write_text("1")
