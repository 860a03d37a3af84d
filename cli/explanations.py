"""`tidevoy nodes --explain`: each node's factors in columns, and why it has its share in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cli.output import show_table

# Those that take something of a share; of the others the sentence tells what there is to tell.
_SIGNS = ("health", "memory", "cpu")


def show_explanations(nodes: Sequence[dict[str, Any]]) -> None:
    """A table of nodes, as the API shows them with their explanations."""
    heads = (
        *("ADDRESS", "STATE", "SHARE", "WEIGHT", "ZONE", "SESSIONS"),
        *(name.upper() for name in _SIGNS),
        "WHY",
    )
    show_table(heads, [_row(node) for node in nodes])


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    explanation = node["explanation"]
    factors = {factor["name"]: factor for factor in explanation["factors"]}
    sessions = factors["connections"]["score"]
    return (
        node["address"],
        node["state"],
        f"{explanation['share']:.1%}",
        str(explanation["weight"]),
        node["zone"] or "-",
        "-" if sessions is None else f"{sessions:.0f}",
        *(_sign(node["vitals"] or {}, factors[name]) for name in _SIGNS),
        explanation["sentence"],
    )


def _sign(vitals: dict[str, Any], factor: dict[str, Any]) -> str:
    """What was read, and in brackets what it leaves of the share when that is not all."""
    read, left = _read(vitals, factor), factor["share"]
    return read if left is None or left >= 1 else f"{read} ({left:.0%})"


def _read(vitals: dict[str, Any], factor: dict[str, Any]) -> str:
    if factor["score"] is None:
        return "-"
    if factor["name"] == "health":
        return "abnormal" if factor["score"] else "normal"
    value = vitals.get(factor["name"])
    return "-" if value is None else f"{value:.0%}"
