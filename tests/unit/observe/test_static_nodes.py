"""Topologies of the nodes from the configuration and from the API."""

from __future__ import annotations

from controlplane.config.settings import StaticNodeSettings
from controlplane.model.intents import AddedNode
from controlplane.model.nodes import Node, Source
from controlplane.observe.discovery import static_nodes


def test_configured_nodes_keep_all_settings() -> None:
    topology = static_nodes.from_config(
        [
            StaticNodeSettings(
                address="db1:4000", status_address="db1:10080", weight=250, labels={"zone": "a"}
            ),
            StaticNodeSettings(address="[fd00::1]:4000"),
        ]
    )
    assert topology.source is Source.STATIC
    assert topology.is_complete
    assert topology.outage == ""
    assert topology.nodes == {
        "db1:4000": Node(
            address="db1:4000",
            source=Source.STATIC,
            status_address="db1:10080",
            labels={"zone": "a"},
            weight=250,
        ),
        "[fd00::1]:4000": Node(address="[fd00::1]:4000", source=Source.STATIC, weight=100),
    }


def test_topology_without_nodes_is_complete() -> None:
    assert static_nodes.from_config([]).is_complete
    assert static_nodes.from_api({}, 100).is_complete
    assert not static_nodes.from_config([]).nodes


def test_added_nodes_without_weight_get_the_default() -> None:
    topology = static_nodes.from_api(
        {
            "a:4000": AddedNode("a:4000", status_address="a:10080", labels={"rack": "7"}),
            "b:4000": AddedNode("b:4000", weight=1),
        },
        default_weight=60,
    )
    assert topology.source is Source.API
    assert topology.nodes["a:4000"] == Node(
        address="a:4000", source=Source.API, status_address="a:10080", labels={"rack": "7"}, weight=60
    )
    assert topology.nodes["b:4000"].weight == 1


def test_topology_copies_the_labels() -> None:
    labels = {"zone": "a"}
    topology = static_nodes.from_config([StaticNodeSettings(address="a:4000", labels=labels)])
    labels["zone"] = "b"
    assert topology.nodes["a:4000"].labels == {"zone": "a"}
