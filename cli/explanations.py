"""The table of `tidevoy nodes --explain`: each node's factors, and a sentence that explains its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cli.output import show_table

# The factors that can reduce a share; the sentence covers the others.
_FACTOR_COLUMNS = ("health", "memory", "cpu")


def show_explanations(nodes: Sequence[dict[str, Any]]) -> None:
    """Print a table of nodes. `nodes`: the API's nodes, each with its `explanation`."""
    headers = (
        *("ADDRESS", "STATE", "SHARE", "WEIGHT", "ZONE", "SESSIONS"),
        *(name.upper() for name in _FACTOR_COLUMNS),
        "WHY",
    )
    show_table(headers, [_explanation_row(node) for node in nodes])


def _explanation_row(node: dict[str, Any]) -> tuple[str, ...]:
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
        *(_factor_cell(node["vitals"] or {}, factors[name]) for name in _FACTOR_COLUMNS),
        explanation["sentence"],
    )


def _factor_cell(metrics: dict[str, Any], factor: dict[str, Any]) -> str:
    """Return the measured value and, in brackets, to what percentage the factor reduces the node's share."""
    reading, remaining_share = _format_reading(metrics, factor), factor["share"]
    if remaining_share is None or remaining_share >= 1:
        return reading
    return f"{reading} ({remaining_share:.0%})"


def _format_reading(metrics: dict[str, Any], factor: dict[str, Any]) -> str:
    if factor["score"] is None:
        return "-"
    if factor["name"] == "health":
        return "abnormal" if factor["score"] else "normal"
    value = metrics.get(factor["name"])
    return "-" if value is None else f"{value:.0%}"
