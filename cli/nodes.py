"""Commands on nodes: nodes, add, remove, drain, undrain, weight."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from cli import options
from cli.client import Client, node_path
from cli.explanations import show_explanations
from cli.options import DEFAULT_URL, Address, AsJson, Url
from cli.output import count, local_time, printable, remark, say, show_json, show_table

Deadline = Annotated[
    float | None,
    typer.Option(
        parser=options.seconds,
        metavar="DURATION",
        help="Time for sessions to leave: 600, 10m, 1h30m; default 10m.",
        show_default=False,
    ),
]
Weight = Annotated[
    int, typer.Argument(metavar="WEIGHT", min=1, max=10_000, help="Capacity in relation to other nodes.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("nodes")(show_nodes)
    app.command("add")(add)
    app.command("remove")(remove)
    app.command("drain")(drain)
    app.command("undrain")(undrain)
    app.command("weight")(set_weight)


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
    asked = "/v1/nodes?explain=true" if explain else "/v1/nodes"
    with Client(url) as client:
        answer = client.get(asked if address is None else node_path(address))
    if as_json:
        show_json(answer)
        return
    listed = answer if address is None else {"nodes": [answer], "problems": [], "foreign": [], "excluded": []}
    if explain:
        show_explanations(listed["nodes"])
        return
    show_table(
        ("ADDRESS", "STATE", "SESSIONS", "CONNECTIONS", "WEIGHT", "SOURCE", "VERSION", "SINCE", "REASON"),
        [_row(node) for node in listed["nodes"]],
    )
    if address is not None:
        _tell_hindrances(answer)
    for node in listed["nodes"]:
        show_ejections(node)
        if node["rebalance"]:
            remark(f"{node['address']}: {node['rebalance']} sessions are asked to move to other nodes")
    for problem in listed["problems"]:
        remark(f"{problem['source']}: {problem['subject']} cannot be used: {problem['reason']}")
    for foreign in listed["foreign"]:
        remark(f"{foreign['address']} belongs to keyspace {foreign['keyspace']}; nothing is sent to it")
    for excluded in listed["excluded"]:
        remark(f"{excluded} was removed and is kept out; `tidevoy add {excluded}` takes that back")


def show_ejections(node: dict[str, Any]) -> None:
    """Who ejects a node: one line for each reason, however many Envoys there are."""
    for reason in sorted({each["reason"] for each in node["ejected_by"]}):
        ejections = [each for each in node["ejected_by"] if each["reason"] == reason]
        first = min(ejections, key=lambda each: datetime.fromisoformat(each["since"]))
        others = f" and {len(ejections) - 1} more" if len(ejections) > 1 else ""
        remark(
            f"{node['address']}: ejected by Envoy {first['envoy']}{others}"
            f" since {local_time(first['since'])}, reason {reason}"
        )


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    return (
        node["address"],
        node["state"],
        count(node["sessions"]),
        count(node["connections"]),
        str(node["weight"]),
        node["source"],
        node["version"] or "-",
        local_time(node["since"]),
        node["reason"],
    )


def add(
    address: Address,
    status_address: Annotated[
        str | None, typer.Option(help="Status address, host:port; default: status is not checked.")
    ] = None,
    weight: Annotated[int | None, typer.Option(min=1, max=10_000, help="Capacity; default 100.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label; may be given again.")
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Add a node by hand, or take its removal back."""
    wanted = {
        "address": address,
        "status_address": status_address,
        "weight": weight,
        "labels": options.labels(label or []) or None,
    }
    with Client(url) as client:
        _tell(client.post("/v1/nodes", wanted), "added")


def remove(
    address: Address,
    force: Annotated[
        bool, typer.Option("--force", help="End its sessions now; every Envoy must have Tidevoy's module.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Drain a node and then forget it."""
    with Client(url) as client:
        _tell(client.delete(node_path(address), **({"force": "true"} if force else {})), "removed")


def drain(
    address: Address,
    deadline: Deadline = None,
    on_deadline: Annotated[
        Literal["keep", "close"],
        typer.Option(
            help="What happens to sessions left then: they stay, or they are ended (every Envoy must have"
            " Tidevoy's module)."
        ),
    ] = "keep",
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until no session is left.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Keep new sessions off a node, and let its own move to others.

    Without Tidevoy's module in an Envoy, and where a session cannot move, it goes on until it ends.
    """
    with Client(url) as client:
        wanted: dict[str, Any] = {"on_deadline": on_deadline}
        if deadline is not None:
            wanted["deadline_seconds"] = deadline
        node = client.post(f"{node_path(address)}/drain", wanted)
        _tell_hindrances(node)
        if wait:
            from cli.progress import until_drained

            until_drained(client, node, as_json=as_json)
        elif as_json:
            show_json(node)
        else:
            _tell(node, "is being drained")


def undrain(address: Address, url: Url = DEFAULT_URL) -> None:
    """Take a drain back."""
    with Client(url) as client:
        _tell(client.post(f"{node_path(address)}/undrain"), "takes sessions again once it is healthy")


def set_weight(address: Address, weight: Weight, url: Url = DEFAULT_URL) -> None:
    """Set a node's capacity."""
    with Client(url) as client:
        _tell(client.patch(node_path(address), {"weight": weight}), f"has weight {weight}")


def _tell_hindrances(node: dict[str, Any]) -> None:
    for hindrance in node["hindrances"]:
        remark(f"{node['address']}: {hindrance}")


def _tell(node: dict[str, Any], what: str) -> None:
    text = (
        f"{node['address']} {what}: {node['state']}, sessions: {count(node['sessions'])} ({node['reason']})"
    )
    say(printable(text))
