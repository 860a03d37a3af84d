"""Who may hear of all Envoys, and what waits for somebody who does not read."""

from __future__ import annotations

import pytest

from controlplane.replicas import peer_feed_pb2
from controlplane.replicas.peer_authorization import denial_message, read_credentials
from controlplane.replicas.peer_feed_server import _MAX_BATCH_BYTES, _MAX_QUEUED_BYTES, _Subscriber

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
def test_with_certificates_a_follower_is_a_registered_replica(
    auth: dict[str, list[bytes]], admitted: bool
) -> None:
    caller = read_credentials("127.0.0.1:5", auth)
    for is_open in (False, True):
        problem = denial_message(caller, REPLICAS, requires_certificate=True, allows_unauthenticated=is_open)
        assert (not problem) is admitted
    assert denial_message(caller, (), requires_certificate=True, allows_unauthenticated=True)


@pytest.mark.parametrize(
    ("address", "is_open", "admitted"),
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
def test_without_certificates_only_this_machine_follows_unless_all_may(
    address: str, is_open: bool, admitted: bool
) -> None:
    problem = denial_message(
        read_credentials(address, {}), REPLICAS, requires_certificate=False, allows_unauthenticated=is_open
    )
    assert (not problem) is admitted


async def test_what_waits_is_told_in_turn_and_of_fleets_only_the_latest() -> None:
    follower = _Subscriber()
    for index in range(3):
        follower.put_message(b"%d" % index)
        follower.put_fleet(b"fleet %d" % index)
    told = peer_feed_pb2.Bulletin.FromString(await follower.next_batch())
    assert list(told.news) == [b"fleet 2", b"0", b"1", b"2"]


async def test_a_bulletin_has_an_end() -> None:
    follower = _Subscriber()
    for _ in range(3):
        follower.put_message(bytes(_MAX_BATCH_BYTES - 1))
    assert [len(peer_feed_pb2.Bulletin.FromString(await follower.next_batch()).news) for _ in range(2)] == [
        2,
        1,
    ]


async def test_who_does_not_read_is_cut_off_and_holds_no_memory() -> None:
    follower = _Subscriber()
    piece = bytes(1 << 20)
    for _ in range(_MAX_QUEUED_BYTES // len(piece)):
        follower.put_message(piece)
    assert len(follower._queue) == 0
    assert await follower.next_batch() == b""
    follower.put_message(piece)
    follower.put_fleet(b"fleet")
    assert len(follower._queue) == 0
    assert await follower.next_batch() == b""
