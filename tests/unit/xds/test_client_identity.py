"""Tests of the names in a client certificate, and of the message and events about a denied Envoy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from controlplane.config.own_tls import XdsTls
from controlplane.xds.client_identity import (
    ClientIdentityChecker,
    denial_message,
    peer_address,
    read_certificate_names,
)


@pytest.mark.parametrize(
    ("auth", "expected"),
    [
        ({}, ()),
        ({"x509_common_name": [b"cn"]}, ("cn",)),
        ({"x509_common_name": [b""]}, ()),
        (
            {
                "x509_common_name": [b"cn"],
                "x509_subject_alternative_name": [b"10.0.0.1"],
                "peer_ip": [b"10.0.0.1"],
            },
            (),
        ),
        (
            {
                "x509_subject_alternative_name": [b"a", b"b"],
                "peer_dns": [b"a"],
                "peer_uri": [b"spiffe://d/x/b"],
            },
            ("a", "b"),
        ),
        (
            {"x509_subject_alternative_name": [b"u"], "peer_uri": [b"spiffe://d/", b"urn:a:b/c"]},
            (),
        ),
        (
            {"x509_subject_alternative_name": [b"u"], "peer_uri": [b"x://d/zone%20a%2F1", b"x://d/%ff%zz"]},
            ("zone a/1", "\\xff%zz"),
        ),
        ({"x509_subject_alternative_name": [b"\xff"], "peer_dns": [b"\xff"]}, ("\\xff",)),
    ],
)
def test_reads_names_of_certificate(auth: Mapping[str, list[bytes]], expected: tuple[str, ...]) -> None:
    assert read_certificate_names(auth) == expected


def test_denial_message_has_both_names_and_is_printable() -> None:
    assert denial_message("envoy-1", ("a", "b")).startswith(
        "the Envoy's node.id is envoy-1, but its certificate is for a, b; give it a"
    )
    assert "is for a, b, c and 2 more;" in denial_message("x", ("a", "b", "c", "d", "e"))
    assert "has no name;" in denial_message("x", ())
    hostile = denial_message("\x1b[2J\n", ("y" * 5000,))
    assert hostile.isprintable()
    assert "'\\x1b[2J\\n'" in hostile
    assert len(hostile) < 400


def test_parses_peer_address() -> None:
    assert peer_address("ipv4:10.0.0.1:4711") == "10.0.0.1:4711"
    assert peer_address("ipv6:%5Bfd00::1%5D:4711") == "[fd00::1]:4711"


class Denied(Exception):
    pass


class Call:
    """A gRPC call of an Envoy with one name in its certificate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [self._name.encode()]}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:4711"

    async def abort(self, *_: object) -> None:
        raise Denied


async def test_denial_events_are_rate_limited() -> None:
    now = 1000.0
    event_subjects: list[str] = []
    checker = ClientIdentityChecker(
        XdsTls.model_validate({"cert": "c", "key": "k", "client_ca": "a"}),
        lambda: now,
        lambda _, subject, message: event_subjects.append(subject),
    )

    async def deny(envoy: str, name: str = "stranger") -> None:
        call: Any = Call(name)
        with pytest.raises(Denied):
            await checker.authorize(call, envoy)

    for _ in range(1000):
        await deny("envoy-1")
    await deny("envoy-2")
    assert event_subjects == ["envoy-1"]
    now += 2
    await deny("envoy-1")
    await deny("envoy-2")
    assert event_subjects == ["envoy-1", "envoy-2"]
    now += 60
    await deny("envoy-1")
    assert event_subjects == ["envoy-1", "envoy-2", "envoy-1"]
    for number in range(10_000):  # an attacker who invents names causes at most one event per second
        now += 0.01
        await deny(f"invented-{number}")
    assert len(event_subjects) - 3 <= 100
    call: Any = Call("envoy-1")
    await asyncio.wait_for(checker.authorize(call, "envoy-1"), 1)
