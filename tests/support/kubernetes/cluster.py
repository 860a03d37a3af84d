"""A Kubernetes control plane on this machine, without machines that run Pods: an API server on etcd, with the
controllers and the scheduler.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import trustme
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from sandbox.etcd import Etcd
from sandbox.server import Server, http_responds
from tests.support.kubernetes import server_programs
from tests.support.kubernetes.rendered_chart import Object

SERVICE_NETWORK = "10.96.0.0/16"
_LOOPBACK = "127.0.0.1"


class KubernetesError(Exception):
    """The API server rejects a request. The text is its message."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(f"{status}: {message}")


class ApiServer(Server):
    """kube-apiserver on loopback. The token of `kubeconfig` belongs to an administrator."""

    start_timeout_seconds = 120.0

    def __init__(self, directory: Path, etcd: Etcd, address: str) -> None:
        super().__init__("kube-apiserver", directory)
        self.address = address
        self.port = self.ports.allocate()
        self._etcd = etcd
        self._token = secrets.token_hex(16)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_files()

    def _write_files(self) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert(self.address, "127.0.0.1", "kubernetes.default.svc", "10.96.0.1")
        authority.cert_pem.write_to_path(self.file("ca.crt"))
        leaf.private_key_and_cert_chain_pem.write_to_path(self.file("server.pem"))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
        self.file("accounts.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
        self.file("accounts.pub").write_bytes(
            key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        self.file("tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        cluster = {"server": self.url, "certificate-authority": str(self.file("ca.crt"))}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig))

    def file(self, name: str) -> Path:
        """Return the path of one of the server's files."""
        return self.directory / name

    @property
    def kubeconfig(self) -> Path:
        """The configuration of clients such as Helm."""
        return self.file("kubeconfig.yaml")

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that authenticate the administrator."""
        return {"Authorization": f"Bearer {self._token}"}

    def listen_ports(self) -> list[int]:
        return [self.port]

    def command(self) -> list[str]:
        return [
            str(server_programs.program("kube-apiserver")),
            f"--etcd-servers={self._etcd.url}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.file('server.pem')}",
            f"--tls-private-key-file={self.file('server.pem')}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.file('accounts.pub')}",
            f"--service-account-signing-key-file={self.file('accounts.key')}",
            f"--token-auth-file={self.file('tokens.csv')}",
            "--authorization-mode=RBAC",
            "--kubelet-preferred-address-types=InternalIP",
            # Loopback is no address that Pods could reach.
            *(["--endpoint-reconciler-type=none"] if self.address == _LOOPBACK else []),
        ]

    async def is_serving(self) -> bool:
        return await http_responds(f"{self.url}/readyz")


class ClusterProgram(Server):
    """A controller or scheduler: a client of the API server with a port for health checks."""

    def __init__(self, name: str, api: ApiServer, *arguments: str) -> None:
        super().__init__(name, api.directory)
        self.port = self.ports.allocate()
        self._api, self._arguments = api, arguments

    def listen_ports(self) -> list[int]:
        return [self.port]

    def command(self) -> list[str]:
        return [
            str(server_programs.program(self.name)),
            f"--kubeconfig={self._api.kubeconfig}",
            f"--authentication-kubeconfig={self._api.kubeconfig}",
            f"--authorization-kubeconfig={self._api.kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--leader-elect=false",
            *self._arguments,
        ]

    async def is_serving(self) -> bool:
        return await http_responds(f"https://127.0.0.1:{self.port}/healthz")


class KubernetesCluster:
    """A running cluster, as an administrator sees it."""

    def __init__(self, api: ApiServer, client: httpx2.AsyncClient) -> None:
        self.api = api
        self._client = client

    async def request(self, method: str, path: str, body: Any = None, content_type: str = "") -> Any:
        """Send a request, and return the answer. Raises KubernetesError."""
        headers = {"Content-Type": content_type or "application/json"}
        content = None if body is None else json.dumps(body)
        answer = await self._client.request(method, path, content=content, headers=headers)
        if answer.status_code >= 400:
            raise KubernetesError(answer.status_code, answer.json().get("message", answer.text))
        return answer.json()

    async def list(self, path: str) -> list[Object]:
        """Return the items of a collection, such as `/api/v1/namespaces/db/pods`."""
        items: list[Object] = (await self.request("GET", path))["items"]
        return items

    async def create(self, path: str, body: Object) -> Object:
        """Create an object in a collection."""
        created: Object = await self.request("POST", path, body)
        return created

    async def patch(self, path: str, body: Any) -> Object:
        """Merge a patch into an object or its status."""
        changed: Object = await self.request("PATCH", path, body, "application/merge-patch+json")
        return changed


@asynccontextmanager
async def run_cluster(directory: Path, address: str = _LOOPBACK) -> AsyncIterator[KubernetesCluster]:
    """Run the servers, with the custom resource definitions that the chart's objects need.

    `address` is that of the API server. With another address than loopback, machines run Pods.
    """
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        await asyncio.to_thread(server_programs.program, name)
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(Etcd.start(directory / "etcd"))
        api = await stack.enter_async_context(ApiServer(directory / "kubernetes", etcd, address))
        controllers = ClusterProgram(
            "kube-controller-manager",
            api,
            f"--service-account-private-key-file={api.file('accounts.key')}",
            f"--root-ca-file={api.file('ca.crt')}",
            "--use-service-account-credentials",
            # Nobody sends heartbeats of fake machines.
            "--controllers=*,-node-lifecycle-controller" if address == _LOOPBACK else "--controllers=*",
        )
        await stack.enter_async_context(controllers)
        await stack.enter_async_context(ClusterProgram("kube-scheduler", api))
        client = httpx2.AsyncClient(
            base_url=api.url, headers=api.headers, verify=False, trust_env=False, timeout=30.0
        )
        await stack.enter_async_context(client)
        cluster = KubernetesCluster(api, client)
        await _define_resources(cluster)
        yield cluster


async def _define_resources(cluster: KubernetesCluster) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for text in await asyncio.to_thread(server_programs.resource_definitions):
        for definition in filter(None, yaml.load_all(text, yaml.CSafeLoader)):
            await cluster.create(path, definition)
