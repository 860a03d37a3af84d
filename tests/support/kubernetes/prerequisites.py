"""What operators create before they install the chart: Secrets, and volumes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import trustme

from cli.main import run as run_command
from tests.support.kubernetes.machine import NAME as MACHINE
from tests.support.kubernetes.rendered_chart import Object

ENVOY_ID = "tidevoy-envoy"
TOKEN = "token-of-an-operator"
_CONTROL_PLANE = "tidevoy-control-plane"


def create_certificates(namespace: str, directory: Path) -> None:
    """Issue the certificates of control planes and Envoys, as the README of the chart says."""
    host = f"{_CONTROL_PLANE}.{namespace}.svc.cluster.local"
    hosts = [host, *(f"{_CONTROL_PLANE}-{number}.{host}" for number in range(2))]
    options = [word for each in hosts for word in ("--control-plane", each)]
    assert run_command(["certificates", "init", str(directory), *options, "--envoy", ENVOY_ID]) == 0


def secrets(namespace: str, directory: Path) -> dict[str, dict[str, str]]:
    """Return the content of the Secrets, by name. `directory` has the certificates."""
    stems = {"tidevoy-control-plane-tls": "control-plane", "tidevoy-envoy-tls": f"envoy-{ENVOY_ID}"}
    issued = {
        name: {
            "ca.crt": (directory / "ca.pem").read_text(),
            "tls.crt": (directory / f"{stem}.pem").read_text(),
            "tls.key": (directory / f"{stem}.key").read_text(),
        }
        for name, stem in stems.items()
    }
    authority = trustme.CA()
    leaf = authority.issue_cert(f"tidevoy-api.{namespace}.svc.cluster.local", "127.0.0.1")
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    return {
        **issued,
        "tidevoy-api-tls": {
            "ca.crt": authority.cert_pem.bytes().decode(),
            "tls.crt": leaf.cert_chain_pems[0].bytes().decode(),
            "tls.key": leaf.private_key_pem.bytes().decode(),
        },
        "tokens": {"tokens.json": json.dumps([{"name": "anna", "role": "operator", "sha256": digest}])},
    }


def local_volume(directory: Path) -> Object:
    """Return a volume in a directory of the machine."""
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [MACHINE]}
    return {
        "metadata": {"name": directory.name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "local": {"path": str(directory)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
        },
    }
