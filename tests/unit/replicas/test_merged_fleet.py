"""The Envoys of all replicas as one fleet, and the clock of another machine."""

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
    carry_over_missing,
    mark_disconnected,
    merge_fleets,
    without_expired,
)

NOW = 1_000_000.0


def status(
    envoy: str = "e", since: float | None = NOW, seen: float = NOW, streams: int | None = None, **more: object
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
        **more,  # type: ignore[arg-type]
    )


def fleets(**statuses: list[EnvoyStatus]) -> Mapping[str, ReplicaFleet]:
    return {name: ReplicaFleet(tuple(each), (1, len(name))) for name, each in statuses.items()}


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
        unique_by=lambda each: each.id,
    ).map(lambda each: ReplicaFleet(tuple(each))),
)


@given(some_fleets)
def test_every_envoy_is_there_once_and_the_youngest_connection_speaks(
    all_: Mapping[str, ReplicaFleet],
) -> None:
    merged = merge_fleets(all_)
    told = {name: {s.id: s for s in fleet.statuses} for name, fleet in all_.items()}
    assert [each.status.id for each in merged] == sorted({envoy for each in told.values() for envoy in each})
    for placed in merged:
        of_it = [each[placed.status.id] for each in told.values() if placed.status.id in each]
        sinces = [each.connected_since for each in of_it if each.connected_since is not None]
        assert placed.status.connected_since == max(sinces, default=None)
        assert told[placed.replica][placed.status.id].connected_since == placed.status.connected_since
        assert placed.status.streams == sum(each.streams for each in of_it)
        assert placed.status.nacks == sum(each.nacks for each in of_it)
        assert placed.status.last_seen == max(each.last_seen for each in of_it)


@given(some_fleets)
def test_what_one_replica_has_alone_stays_as_it_is(all_: Mapping[str, ReplicaFleet]) -> None:
    for name, fleet in all_.items():
        alone = merge_fleets({name: fleet})
        assert {each.status.id: each.status for each in alone} == {s.id: s for s in fleet.statuses}
        assert all((each.replica, each.stamp) == (name, fleet.stamp) for each in alone)


def test_an_envoy_that_has_gone_to_another_replica_is_spoken_for_there() -> None:
    old = status(since=NOW - 100, acked_version="1", last_nack=Nack(NOW - 50, "lds", "1", "no"), nacks=2)
    new = status(since=NOW - 1, acked_version="2", last_nack=Nack(NOW - 70, "cds", "0", "never"), nacks=1)
    (both,) = merge_fleets(fleets(a=[old], bb=[new]))
    assert (both.replica, both.stamp, both.status.acked_version) == ("bb", (1, 2), "2")
    assert both.status.streams == 2  # as long as the old one is not known to be gone
    assert both.status.nacks == 3
    assert both.status.last_nack == old.last_nack
    (gone,) = merge_fleets({**fleets(bb=[new]), "a": mark_disconnected(fleets(a=[old])["a"], NOW)})
    assert (gone.replica, gone.status.streams) == ("bb", 1)


def test_a_replica_that_is_lost_has_no_envoy_but_remembers_them() -> None:
    there, gone = status("x", seen=NOW + 5), status("y", since=None, seen=NOW - 500)
    left = mark_disconnected(ReplicaFleet((there, gone), (3, 4)), NOW)
    assert [(s.id, s.connected_since, s.last_seen, s.streams) for s in left.statuses] == [
        ("x", None, NOW, 0),
        ("y", None, NOW - 500, 0),
    ]
    assert left.stamp is None
    assert [s.id for s in without_expired(left, NOW - 100).statuses] == ["x"]
    assert without_expired(left, NOW + 1).statuses == ()
    assert without_expired(ReplicaFleet((there,)), NOW + 99).statuses == (there,)


def test_envoys_of_a_replica_that_started_anew_are_remembered() -> None:
    before = ReplicaFleet((status("x"), status("y"), status("z", since=None, seen=NOW - 9)), (1, 1))
    now = carry_over_missing(before, ReplicaFleet((status("y", since=NOW + 3),), (2, 5)), NOW + 4)
    assert now.stamp == (2, 5)
    assert [(s.id, s.connected_since, s.last_seen) for s in now.statuses] == [
        ("y", NOW + 3, NOW),
        ("x", None, NOW),
        ("z", None, NOW - 9),
    ]
    assert carry_over_missing(None, before, NOW) is before


def test_an_id_at_two_replicas_is_told_once_and_only_after_a_while() -> None:
    both = fleets(b=[status()], a=[status()])
    one = fleets(b=[status()], a=[status(since=None)])
    duplicates = DuplicateIdDetector()
    assert duplicates.check(both, NOW) == []
    assert duplicates.check(both, NOW + 19) == []
    assert duplicates.check(one, NOW + 19.5) == []
    assert duplicates.check(both, NOW + 20) == []  # anew
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
def test_a_time_of_a_peer_is_never_in_our_future_and_a_late_message_keeps_its_age(
    distance: float, messages: list[tuple[float, float]]
) -> None:
    clock, told = ClockOffset(), NOW
    least = float("inf")
    for pause, delay in messages:
        told += pause
        now = told + distance + delay
        least = min(least, delay)
        clock.observe(told, now)
        here = clock.to_local(told)
        assert here <= now + 1e-3
        assert here >= told + distance + least - 1e-3


def test_a_clock_that_was_stopped_is_believed_again() -> None:
    clock = ClockOffset()
    clock.observe(100.0, 200.0)
    clock.observe(110.0, 225.0)  # 15 s late, or the machine was suspended
    assert clock.to_local(110.0) == pytest.approx(210.0)
    for second in range(70):
        clock.observe(111.0 + second, 226.0 + second)
    assert clock.to_local(180.0) == pytest.approx(295.0)
