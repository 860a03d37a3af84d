"""Node commands: nodes, add, remove, drain, undrain, weight."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from cli import options
from cli.client import ControlPlaneClient, node_path
from cli.drain_waiting import wait_until_drained
from cli.options import DEFAULT_URL, Address, AsJson, Url
from cli.output import format_count, format_time, print_note, print_result, sanitize, show_json, show_table

app = typer.Typer()

Deadline = Annotated[
    float | None,
    typer.Option(
        parser=options.parse_duration,
        metavar="DURATION",
        help="Time for sessions to leave: 600, 10m, 1h30m; default 10m.",
        show_default=False,
    ),
]
Weight = Annotated[
    int, typer.Argument(metavar="WEIGHT", min=1, max=10_000, help="Capacity relative to other nodes.")
]

# The factors that can reduce a node's share; the column WHY also explains the other factors.
_FACTOR_COLUMNS = ("health", "memory", "cpu")


@app.command("nodes")
def show_nodes(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="Only this node.", show_default=False)
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show why each node has its share of the new sessions.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the TiDB servers and their states."""
    with ControlPlaneClient(url) as client:
        answer = (
            client.get("/v1/nodes", explain="true" if explain else None)
            if address is None
            else client.get(node_path(address))
        )
    if as_json:
        show_json(answer)
        return
    listing = (
        answer
        if address is None
        else {"nodes": [answer], "problems": [], "other_keyspace": [], "excluded": []}
    )
    if explain:
        _show_explanations(listing["nodes"])
        return
    show_table(
        ("ADDRESS", "STATE", "SESSIONS", "CONNECTIONS", "WEIGHT", "SOURCE", "VERSION", "SINCE", "REASON"),
        [_node_row(node) for node in listing["nodes"]],
    )
    if address is not None:
        _print_migration_blockers(answer)
    for node in listing["nodes"]:
        check = node["health"].get("statement")  # an older control plane does not have it
        if check is not None and check["status"] == "misconfigured":
            print_note(f"{node['address']} is not checked: {check['reason']}")
        show_ejections(node)
        if node["rebalance"]:
            print_note(f"{node['address']}: {node['rebalance']} sessions are to migrate to other nodes")
    for problem in listing["problems"]:
        print_note(f"{problem['source']}: {problem['subject']} cannot be used: {problem['reason']}")
    for node in listing["other_keyspace"]:
        print_note(f"{node['address']} belongs to keyspace {node['keyspace']}; nothing is sent to it")
    for excluded in listing["excluded"]:
        print_note(f"{excluded} was removed and stays excluded; `tidevoy add {excluded}` adds it again")


def show_ejections(node: dict[str, Any]) -> None:
    """Print which Envoys eject a node: one line per reason, however many Envoys there are."""
    for reason in sorted({ejection["reason"] for ejection in node["ejected_by"]}):
        ejections = [ejection for ejection in node["ejected_by"] if ejection["reason"] == reason]
        first = min(ejections, key=lambda ejection: datetime.fromisoformat(ejection["since"]))
        others = f" and {len(ejections) - 1} more" if len(ejections) > 1 else ""
        print_note(
            f"{node['address']}: ejected by Envoy {first['envoy']}{others}"
            f" since {format_time(first['since'])}, reason {reason}"
        )


def _node_row(node: dict[str, Any]) -> tuple[str, ...]:
    return (
        node["address"],
        node["state"],
        format_count(node["sessions"]),
        format_count(node["connections"]),
        str(node["weight"]),
        node["source"],
        node["version"] or "-",
        format_time(node["since"]),
        node["reason"],
    )


def _show_explanations(nodes: Sequence[dict[str, Any]]) -> None:
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
        *(_factor_cell(node["metrics"] or {}, factors[name]) for name in _FACTOR_COLUMNS),
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


@app.command()
def add(
    address: Address,
    status_address: Annotated[
        str | None, typer.Option(help="Status address, host:port; default: no status checks.")
    ] = None,
    weight: Annotated[int | None, typer.Option(min=1, max=10_000, help="Capacity; default 100.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label; repeatable.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Add a node by hand, or add a removed node again."""
    body = {
        "address": address,
        "status_address": status_address,
        "weight": weight,
        "labels": options.parse_labels(label or []) or None,
    }
    with ControlPlaneClient(url) as client:
        _print_node(client.post("/v1/nodes", body), "added")


@app.command()
def remove(
    address: Address,
    force: Annotated[
        bool, typer.Option("--force", help="End its sessions now; every Envoy must have Tidevoy's module.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Drain a node, then remove it."""
    with ControlPlaneClient(url) as client:
        _print_node(client.delete(node_path(address), force="true" if force else None), "removed")


@app.command()
def drain(
    address: Address,
    deadline: Deadline = None,
    on_deadline: Annotated[
        Literal["keep", "close"],
        typer.Option(
            help="What happens to sessions that are left at the deadline: keep them, or close them (every"
            " Envoy must have Tidevoy's module)."
        ),
    ] = "keep",
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until no session is left.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Stop new sessions on a node, and migrate its sessions to other nodes.

    A session that cannot migrate, or whose Envoy does not have Tidevoy's module, stays until it ends.
    """
    with ControlPlaneClient(url) as client:
        body: dict[str, Any] = {"on_deadline": on_deadline}
        if deadline is not None:
            body["deadline_seconds"] = deadline
        node = client.post(f"{node_path(address)}/drain", body)
        _print_migration_blockers(node)
        if wait:
            wait_until_drained(client, node, as_json=as_json)
        elif as_json:
            show_json(node)
        else:
            _print_node(node, "is being drained")


@app.command()
def undrain(address: Address, url: Url = DEFAULT_URL) -> None:
    """Cancel a drain."""
    with ControlPlaneClient(url) as client:
        _print_node(client.post(f"{node_path(address)}/undrain"), "accepts sessions again once it is healthy")


@app.command("weight")
def set_weight(address: Address, weight: Weight, url: Url = DEFAULT_URL) -> None:
    """Set a node's capacity."""
    with ControlPlaneClient(url) as client:
        _print_node(client.patch(node_path(address), {"weight": weight}), f"has weight {weight}")


def _print_migration_blockers(node: dict[str, Any]) -> None:
    for blocker in node["migration_blockers"]:
        print_note(f"{node['address']}: {blocker}")


def _print_node(node: dict[str, Any], outcome: str) -> None:
    sessions = format_count(node["sessions"])
    text = f"{node['address']} {outcome}: {node['state']}, sessions: {sessions} ({node['reason']})"
    print_result(sanitize(text))
