"""What the statistics of statements lack, as sentences."""

from __future__ import annotations

import pytest

from controlplane.engine.statement_view import describe_envoys_without_module, describe_outages
from controlplane.model.envoys import EnvoyStatus
from controlplane.replicas.peer_sync import ReplicaOutage

NOON = 1_800_014_400.0  # 12:00:00 UTC


@pytest.mark.parametrize(
    ("outage", "times"),
    [
        (ReplicaOutage("r2", NOON - 30, None), "11:59:30 UTC until now"),
        (ReplicaOutage("r2", NOON - 30, NOON - 10), "11:59:30 UTC until 11:59:50 UTC"),
        (ReplicaOutage("r2", NOON - 900, NOON - 50), "11:45:00 UTC until 11:59:10 UTC"),
        (ReplicaOutage("r2", NOON - 900, NOON - 60), None),  # before the period
        (ReplicaOutage("r2", NOON - 10.5, NOON - 10), None),  # too short
    ],
)
def test_outages_of_replicas(outage: ReplicaOutage, times: str | None) -> None:
    expected = (
        []
        if times is None
        else [
            f"the control plane r2 could not be reached from {times}; statements of its Envoys from this"
            " time are missing"
        ]
    )
    assert list(describe_outages([outage], NOON - 60, NOON)) == expected


def test_envoys_without_module() -> None:
    def status(name: str, filter_name: str, *, connected: bool = True) -> EnvoyStatus:
        return EnvoyStatus(name, "", "", filter_name, 1.0 if connected else None, 1.0)

    with_module = [status("a", "module"), status("gone", "none", connected=False)]
    assert list(describe_envoys_without_module(with_module)) == []
    many = [status(f"e{number}", "none") for number in range(7)]
    assert list(describe_envoys_without_module([*with_module, *many])) == [
        "without Tidevoy's module, these Envoys report no statements: e0, e1, e2, e3, e4 and 2 more"
    ]
