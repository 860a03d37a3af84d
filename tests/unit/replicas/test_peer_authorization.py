"""Which callers may follow this replica, and the message queue of a subscriber."""

from __future__ import annotations

import pytest

from controlplane.config.settings import Settings
from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.peer_authorization import denial_message
from controlplane.replicas.peer_feed_server import _MAX_BATCH_BYTES, _MAX_QUEUED_BYTES, _Subscriber

TLS = {"cert": "cert.pem", "key": "key.pem", "client_ca": "ca.pem"}
REPLICAS = ("cp-1.test:18000", "10.0.0.2:18000", "[fd00::3]:18000")


@pytest.mark.parametrize(
    ("auth", "admitted"),
    [
        ({"peer_dns": [b"CP-1.test"]}, True),
        ({"peer_dns": [b"other.test", b"cp-1.test"]}, True),
        ({"peer_ip": [b"10.0.0.2"]}, True),
        ({"peer_ip": [b"fd00:0::3"]}, True),
        ({}, False),
        ({"peer_dns": [b"*.test"]}, False),
        ({"peer_dns": [b"envoy-1.test"], "x509_common_name": [b"cp-1.test"]}, False),
        ({"peer_dns": [b"10.0.0.9"]}, False),
        ({"peer_dns": [b"\xff"]}, False),
    ],
)
def test_certificate_must_name_a_registered_replica(auth: dict[str, list[bytes]], admitted: bool) -> None:
    for allows_all in (False, True):
        settings = Settings.model_validate({"xds": {"tls": TLS}, "allow_unauthenticated": allows_all})
        assert (not denial_message("127.0.0.1:5", auth, REPLICAS, settings)) is admitted
    assert denial_message("127.0.0.1:5", auth, (), settings)


@pytest.mark.parametrize(
    ("address", "allows_all", "admitted"),
    [
        ("127.0.0.1:5", False, True),
        ("[::1]:5", False, True),
        ("[::ffff:127.0.0.1]:5", False, True),
        ("10.0.0.2:5", False, False),
        ("[fd00::3]:5", False, False),
        ("10.0.0.9:5", True, True),
        ("", False, False),
    ],
)
def test_without_certificates_only_loopback_is_authorized_by_default(
    address: str, allows_all: bool, admitted: bool
) -> None:
    settings = Settings.model_validate({"allow_unauthenticated": allows_all})
    assert (not denial_message(address, {}, REPLICAS, settings)) is admitted


async def test_batch_has_the_latest_fleet_and_all_messages_in_order() -> None:
    subscriber = _Subscriber()
    for index in range(3):
        subscriber.put_message(b"%d" % index)
        subscriber.put_fleet(b"fleet %d" % index)
    batch = peer_feed_pb2.MessageBatch.FromString(await subscriber.next_batch())
    assert list(batch.messages) == [b"fleet 2", b"0", b"1", b"2"]


async def test_batch_size_is_bounded() -> None:
    subscriber = _Subscriber()
    for _ in range(3):
        subscriber.put_message(bytes(_MAX_BATCH_BYTES - 1))
    assert [
        len(peer_feed_pb2.MessageBatch.FromString(await subscriber.next_batch()).messages) for _ in range(2)
    ] == [
        2,
        1,
    ]


async def test_slow_subscriber_is_ended_and_its_queue_dropped() -> None:
    subscriber = _Subscriber()
    message = bytes(1 << 20)
    for _ in range(_MAX_QUEUED_BYTES // len(message)):
        subscriber.put_message(message)
    assert len(subscriber._queue) == 0
    assert await subscriber.next_batch() == b""
    subscriber.put_message(message)
    subscriber.put_fleet(b"fleet")
    assert len(subscriber._queue) == 0
    assert await subscriber.next_batch() == b""
