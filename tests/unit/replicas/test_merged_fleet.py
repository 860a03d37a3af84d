"""The merged fleet of all replicas, and the clock offset of a peer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.envoys import EnvoyStatus, Nack
from controlplane.observe.clock_offset import ClockOffset
from controlplane.replicas.merged_fleet import (
    DuplicateIdDetector,
    ReplicaFleet,
    add_missing_envoys,
    mark_disconnected,
    merge_fleets,
    without_expired,
)

NOW = 1_000_000.0


def status(
    envoy: str = "e",
    since: float | None = NOW,
    seen: float = NOW,
    streams: int | None = None,
    **overrides: object,
) -> EnvoyStatus:
    count = (since is not None) if streams is None else streams
    return EnvoyStatus(
        id=envoy,
        address="10.0.0.9:1",
        version="1.40.0",
        filter="none",
        connected_since=since,
        last_seen=seen,
        streams=int(count),
        **overrides,  # type: ignore[arg-type]
    )


def fleets(**statuses: list[EnvoyStatus]) -> Mapping[str, ReplicaFleet]:
    return {name: ReplicaFleet(tuple(envoys), (1, len(name))) for name, envoys in statuses.items()}


some_fleets = st.dictionaries(
    st.sampled_from("abc"),
    st.lists(
        st.builds(
            status,
            st.sampled_from(["x", "y", "z"]),
            st.one_of(st.none(), st.floats(0, NOW)),
            st.floats(0, NOW),
            nacks=st.integers(0, 3),
        ),
        unique_by=lambda envoy: envoy.id,
    ).map(lambda envoys: ReplicaFleet(tuple(envoys))),
)


@given(some_fleets)
def test_merge_keeps_each_envoy_once_with_its_newest_connection(
    replica_fleets: Mapping[str, ReplicaFleet],
) -> None:
    merged = merge_fleets(replica_fleets)
    by_replica = {name: {s.id: s for s in fleet.statuses} for name, fleet in replica_fleets.items()}
    assert [envoy.status.id for envoy in merged] == sorted(
        {envoy_id for statuses in by_replica.values() for envoy_id in statuses}
    )
    for envoy in merged:
        envoy_id = envoy.status.id
        candidates = [statuses[envoy_id] for statuses in by_replica.values() if envoy_id in statuses]
        times = [s.connected_since for s in candidates if s.connected_since is not None]
        assert envoy.status.connected_since == max(times, default=None)
        assert by_replica[envoy.replica][envoy_id].connected_since == envoy.status.connected_since
        assert envoy.status.streams == sum(s.streams for s in candidates)
        assert envoy.status.nacks == sum(s.nacks for s in candidates)
        assert envoy.status.last_seen == max(s.last_seen for s in candidates)


@given(some_fleets)
def test_merge_of_one_replica_keeps_its_statuses(replica_fleets: Mapping[str, ReplicaFleet]) -> None:
    for name, fleet in replica_fleets.items():
        merged = merge_fleets({name: fleet})
        assert {envoy.status.id: envoy.status for envoy in merged} == {s.id: s for s in fleet.statuses}
        assert all((envoy.replica, envoy.stamp) == (name, fleet.published_stamp) for envoy in merged)


def test_reconnected_envoy_is_reported_by_its_new_replica() -> None:
    old = status(since=NOW - 100, acked_version="1", last_nack=Nack(NOW - 50, "lds", "1", "no"), nacks=2)
    new = status(since=NOW - 1, acked_version="2", last_nack=Nack(NOW - 70, "cds", "0", "never"), nacks=1)
    (both,) = merge_fleets(fleets(a=[old], bb=[new]))
    assert (both.replica, both.stamp, both.status.acked_version) == ("bb", (1, 2), "2")
    assert both.status.streams == 2  # until the old replica detects the disconnect
    assert both.status.nacks == 3
    assert both.status.last_nack == old.last_nack
    (moved,) = merge_fleets({**fleets(bb=[new]), "a": mark_disconnected(fleets(a=[old])["a"], NOW)})
    assert (moved.replica, moved.status.streams) == ("bb", 1)


def test_lost_replica_keeps_its_envoys_as_disconnected() -> None:
    connected, ended = status("x", seen=NOW + 5), status("y", since=None, seen=NOW - 500)
    lost = mark_disconnected(ReplicaFleet((connected, ended), (3, 4)), NOW)
    assert [(s.id, s.connected_since, s.last_seen, s.streams) for s in lost.statuses] == [
        ("x", None, NOW, 0),
        ("y", None, NOW - 500, 0),
    ]
    assert lost.published_stamp is None
    assert [s.id for s in without_expired(lost, NOW - 100).statuses] == ["x"]
    assert without_expired(lost, NOW + 1).statuses == ()
    assert without_expired(ReplicaFleet((connected,)), NOW + 99).statuses == (connected,)


def test_envoys_of_a_restarted_replica_are_carried_over() -> None:
    before = ReplicaFleet((status("x"), status("y"), status("z", since=None, seen=NOW - 9)), (1, 1))
    now = add_missing_envoys(before, ReplicaFleet((status("y", since=NOW + 3),), (2, 5)), NOW + 4)
    assert now.published_stamp == (2, 5)
    assert [(s.id, s.connected_since, s.last_seen) for s in now.statuses] == [
        ("y", NOW + 3, NOW),
        ("x", None, NOW),
        ("z", None, NOW - 9),
    ]
    assert add_missing_envoys(None, before, NOW) is before


def test_duplicate_id_is_reported_once_after_20_seconds() -> None:
    both = fleets(b=[status()], a=[status()])
    one = fleets(b=[status()], a=[status(since=None)])
    duplicates = DuplicateIdDetector()
    assert duplicates.check(both, NOW) == []
    assert duplicates.check(both, NOW + 19) == []
    assert duplicates.check(one, NOW + 19.5) == []
    assert duplicates.check(both, NOW + 20) == []  # the 20 s have started again
    ((envoy, message),) = duplicates.check(both, NOW + 40)
    assert envoy == "e"
    assert "control planes a and b" in message
    assert duplicates.check(both, NOW + 400) == []
    duplicates.check(one, NOW + 401)
    duplicates.check(both, NOW + 402)
    assert len(duplicates.check(both, NOW + 422)) == 1


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 60)), min_size=1),
)
def test_peer_times_are_never_in_the_future_and_keep_message_age(
    offset: float, messages: list[tuple[float, float]]
) -> None:
    clock, sent = ClockOffset(), NOW
    min_delay = float("inf")
    for pause, delay in messages:
        sent += pause
        now = sent + offset + delay
        min_delay = min(min_delay, delay)
        clock.observe(sent, now)
        local = clock.to_local(sent)
        assert local <= now + 1e-3
        assert local >= sent + offset + min_delay - 1e-3


def test_clock_offset_recovers_after_a_suspend() -> None:
    clock = ClockOffset()
    clock.observe(100.0, 200.0)
    clock.observe(110.0, 225.0)  # 15 s late, or the machine was suspended
    assert clock.to_local(110.0) == pytest.approx(210.0)
    for second in range(70):
        clock.observe(111.0 + second, 226.0 + second)
    assert clock.to_local(180.0) == pytest.approx(295.0)
