"""Which names a certificate holds, and what a refused Envoy and its operator are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from controlplane.config.settings import XdsTls
from controlplane.xds.client_identity import (
    ClientIdentityChecker,
    denial_message,
    peer_address,
    read_certificate_names,
)


@pytest.mark.parametrize(
    ("auth", "held"),
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
        ({"x509_subject_alternative_name": [b"\xff"], "peer_dns": [b"\xff"]}, ("\\xff",)),
    ],
)
def test_names_of_a_certificate(auth: Mapping[str, list[bytes]], held: tuple[str, ...]) -> None:
    assert read_certificate_names(auth) == held


def test_a_refusal_names_both_and_nothing_that_harms_a_terminal() -> None:
    assert denial_message("envoy-1", ("a", "b")).startswith(
        "the Envoy says that it is envoy-1 (node.id), but its certificate is that of a, b; give it a"
    )
    assert "is that of a, b, c and 2 more;" in denial_message("x", ("a", "b", "c", "d", "e"))
    assert "holds no name;" in denial_message("x", ())
    hostile = denial_message("\x1b[2J\n", ("y" * 5000,))
    assert hostile.isprintable()
    assert "'\\x1b[2J\\n'" in hostile
    assert len(hostile) < 400


def test_an_address_of_a_caller() -> None:
    assert peer_address("ipv4:10.0.0.1:4711") == "10.0.0.1:4711"
    assert peer_address("ipv6:%5Bfd00::1%5D:4711") == "[fd00::1]:4711"


class Refused(Exception):
    pass


class Call:
    """A call of an Envoy whose certificate holds one name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [self._name.encode()]}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:4711"

    async def abort(self, *_: object) -> None:
        raise Refused


async def test_refusals_are_told_sparsely_and_each_soon() -> None:
    now = 1000.0
    told: list[str] = []
    identities = ClientIdentityChecker(
        XdsTls.model_validate({"cert": "c", "key": "k", "client_ca": "a"}),
        lambda: now,
        lambda _, subject, message: told.append(subject),
    )

    async def refuse(envoy: str, name: str = "stranger") -> None:
        call: Any = Call(name)
        with pytest.raises(Refused):
            await identities.authorize(call, envoy)

    for _ in range(1000):
        await refuse("envoy-1")
    await refuse("envoy-2")
    assert told == ["envoy-1"]
    now += 2
    await refuse("envoy-1")
    await refuse("envoy-2")
    assert told == ["envoy-1", "envoy-2"]
    now += 60
    await refuse("envoy-1")
    assert told == ["envoy-1", "envoy-2", "envoy-1"]
    for number in range(10_000):  # whoever invents names is heard once a second
        now += 0.01
        await refuse(f"invented-{number}")
    assert len(told) - 3 <= 100
    call: Any = Call("envoy-1")
    await asyncio.wait_for(identities.authorize(call, "envoy-1"), 1)
