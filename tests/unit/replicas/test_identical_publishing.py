"""Whoever publishes a plan publishes the same: it is read as it was written, and names no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.config.settings import Settings
from controlplane.model.nodes import Node, Source, State
from controlplane.model.plan import EdsHealth, NodePlan, Plan, RebalanceState
from controlplane.storage.file_formats import PLAN_CODEC
from controlplane.storage.store import SavedPlan
from controlplane.xds.resources.profile import EnvoyProfile
from controlplane.xds.snapshot_cache import build_snapshots

CLASSES = [
    EnvoyProfile(filter="module"),
    EnvoyProfile(filter="none"),
    EnvoyProfile(filter="module", zone="z1"),
]


def of_replica(number: int, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "pd": {"urls": ["http://10.0.0.9:2379"]},
            "xds": {"listen": f"127.0.0.{number}:18000"},
            "api": {"listen": f"127.0.0.{number}:3080"},
            "state_dir": Path(f"/var/lib/tidevoy-{number}"),
            "replicas": {"enabled": True, "name": f"replica-{number}"},
            **more,
        }
    )


counts = st.dictionaries(st.sampled_from(["00aa", "00bb", "00cc"]), st.integers(1, 99), max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    numbers = draw(st.lists(st.integers(1, 250), unique=True, max_size=8))
    addresses = [f"10.0.0.{number}:4000" for number in numbers]
    nodes = {}
    for address in addresses:
        advice = draw(st.sampled_from([*EdsHealth, None]))
        zone = draw(st.sampled_from(["", "z1", "z2"]))
        nodes[address] = NodePlan(
            Node(address, Source.PD, labels={"zone": zone} if zone else {}),
            draw(st.sampled_from(State)),
            draw(st.text(max_size=5)),
            draw(st.floats(0, 2e9)),
            advice,
            draw(st.integers(1, 100_000)) if advice is EdsHealth.HEALTHY else 0,
            address if advice is not None else None,
            version="v8.5.3",
            terminate_sessions=draw(st.booleans()),
            zone=zone,
        )
    moves = draw(st.dictionaries(st.sampled_from(addresses), counts, max_size=3)) if addresses else {}
    wants = draw(st.dictionaries(st.sampled_from(addresses), counts, max_size=3)) if addresses else {}
    return Plan(nodes=nodes, rebalance=RebalanceState(1.0, "why", 7, 2.0, moves, wants))


@settings(max_examples=100)
@given(plans())
def test_a_plan_read_back_is_published_as_the_one_that_was_written(plan: Plan) -> None:
    read = PLAN_CODEC.decode(PLAN_CODEC.encode(SavedPlan(plan))).plan
    assert read == plan
    ours, theirs = build_snapshots(plan, of_replica(1)), build_snapshots(read, of_replica(2))
    for each in CLASSES:
        assert ours[each].version == theirs[each].version
