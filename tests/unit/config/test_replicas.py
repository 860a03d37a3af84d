"""Unusable settings of replicas are rejected with a remedy."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from pydantic import ValidationError

from controlplane.config.replicas import ReplicaSettings
from controlplane.config.settings import Settings

PD = {"pd": {"urls": ["http://10.0.0.9:2379"]}}
TLS = {"cert": "/cert.pem", "key": "/key.pem"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": {"enabled": True}}, "there is no PD to share the state in; set pd.urls"),
        (
            {
                **PD,
                "replicas": {"enabled": True},
                "xds": {"listen": "0.0.0.0:18000"},
                "allow_unauthenticated": True,
            },
            "other replicas cannot connect to 0.0.0.0:18000; write the address",
        ),
        (
            {**PD, "replicas": {"enabled": True}, "xds": {"tls": TLS}},
            "replicas authenticate to each other by client certificates; set it",
        ),
        ({"replicas": {"name": "a/b"}}, r"replicas\.name\s+String should match pattern"),
        ({"replicas": {"name": "a" * 65}}, r"replicas\.name\s+String should match pattern"),
        ({"replicas": {"prefix": "tidevoy/"}}, r"replicas\.prefix\s+String should match pattern"),
        ({"replicas": {"prefix": "/"}}, r"replicas\.prefix\s+String should match pattern"),
        ({"replicas": {"prefix": "/a//b/"}}, r"replicas\.prefix\s+String should match pattern"),
        ({"replicas": {"prefix": "/ä/"}}, r"replicas\.prefix\s+String should match pattern"),
        ({"replicas": {"prefix": "/topology/tidb/"}}, "belongs to TiDB or PD"),
        ({"replicas": {"lease_ttl": 4}}, "greater than or equal to 5"),
        ({"replicas": {"advertise": "10.0.0.1"}}, "10.0.0.1"),
    ],
)
def test_rejects_unusable_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate(settings)


def test_accepts_usable_settings() -> None:
    Settings.model_validate({**PD, "replicas": {"enabled": True}})
    Settings.model_validate(
        {**PD, "replicas": {"enabled": True}, "xds": {"tls": {**TLS, "client_ca": "/ca.pem"}}}
    )
    Settings.model_validate({"xds": {"tls": TLS}})  # without replicas, clients need no certificate


def test_invalid_host_name_gives_valid_replica_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "böse/host" + "x" * 99)
    assert ReplicaSettings().effective_name == "b-se-host" + "x" * 55
    assert ReplicaSettings(name="a").effective_name == "a"


@pytest.mark.parametrize(
    ("advertise", "listen", "expected"),
    [
        (None, "127.0.0.1:18000", "127.0.0.1:18000"),
        (None, "127.0.0.1:0", "127.0.0.1:4711"),
        (None, "[::1]:0", "[::1]:4711"),
        ("cp-0.example:18000", "0.0.0.0:0", "cp-0.example:18000"),
    ],
)
def test_advertised_address(advertise: str | None, listen: str, expected: str) -> None:
    port = 4711 if listen.endswith(":0") else int(listen.rpartition(":")[2])
    assert ReplicaSettings(advertise=advertise).advertised_address(listen, port) == expected
