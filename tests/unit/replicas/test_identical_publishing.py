"""All replicas publish a stored plan identically, whatever their own names, addresses and directories."""

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

PROFILES = [
    EnvoyProfile(filter="module"),
    EnvoyProfile(filter="none"),
    EnvoyProfile(filter="module", zone="z1"),
]


def replica_settings(number: int, **overrides: Any) -> Settings:
    return Settings.model_validate(
        {
            "pd": {"urls": ["http://10.0.0.9:2379"]},
            "xds": {"listen": f"127.0.0.{number}:18000"},
            "api": {"listen": f"127.0.0.{number}:3080"},
            "state_dir": Path(f"/var/lib/tidevoy-{number}"),
            "replicas": {"enabled": True, "name": f"replica-{number}"},
            **overrides,
        }
    )


counts = st.dictionaries(st.sampled_from(["00aa", "00bb", "00cc"]), st.integers(1, 99), max_size=3)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    numbers = draw(st.lists(st.integers(1, 250), unique=True, max_size=8))
    addresses = [f"10.0.0.{number}:4000" for number in numbers]
    nodes = {}
    for address in addresses:
        health = draw(st.sampled_from([*EdsHealth, None]))
        zone = draw(st.sampled_from(["", "z1", "z2"]))
        nodes[address] = NodePlan(
            Node(address, Source.PD, labels={"zone": zone} if zone else {}),
            draw(st.sampled_from(State)),
            draw(st.text(max_size=5)),
            draw(st.floats(0, 2e9)),
            health,
            draw(st.integers(1, 100_000)) if health is EdsHealth.HEALTHY else 0,
            address if health is not None else None,
            version="v8.5.3",
            terminate_sessions=draw(st.booleans()),
            zone=zone,
        )
    outgoing = draw(st.dictionaries(st.sampled_from(addresses), counts, max_size=3)) if addresses else {}
    incoming = draw(st.dictionaries(st.sampled_from(addresses), counts, max_size=3)) if addresses else {}
    return Plan(nodes=nodes, rebalance=RebalanceState(1.0, "reason", 7, 2.0, outgoing, incoming))


@settings(max_examples=100)
@given(plans())
def test_decoded_plan_is_published_like_the_original(plan: Plan) -> None:
    decoded = PLAN_CODEC.decode(PLAN_CODEC.encode(SavedPlan(plan))).plan
    assert decoded == plan
    ours, theirs = build_snapshots(plan, replica_settings(1)), build_snapshots(decoded, replica_settings(2))
    for profile in PROFILES:
        assert ours[profile].version == theirs[profile].version
