"""The servers of an HAProxy backend as static nodes. No I/O."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cli.importers.draft import SourceKey
from cli.importers.haproxy.bind import bound_addresses
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.servers import HaproxyServer, Servers
from cli.importers.haproxy.values import parse_address, parse_integer
from controlplane import address as addresses

_DEFAULT_WEIGHT = 100  # of Tidevoy's nodes
_MAX_WEIGHT = 10_000
_BACKUP_LABEL = {"role": "backup"}
_REMARK = (
    "With pd.urls instead, Tidevoy finds all TiDB servers by itself. Without its status_address (usually port"
    " 10080), Tidevoy does not see the CPU and memory of a node, nor that it stops"
)


def convert_nodes(context: HaproxyContext, servers: Servers, status_port: str) -> None:
    """Convert addresses, weights, backup servers and disabled servers.

    `status_port`: the port of HTTP checks of servers without a port of their own; empty: there is none.
    """
    _NodeConversion(context, servers, status_port).convert()


class _NodeConversion:
    def __init__(self, context: HaproxyContext, servers: Servers, status_port: str) -> None:
        self._context, self._draft = context, context.draft
        self._servers, self._status_port = servers, status_port

    def convert(self) -> None:
        weights = self._scaled_weights()
        for server in self._servers.all:
            source = SourceKey(f"server {server.name}", server.statement.line)
            address = self._address(server, source)
            if address is None:
                continue
            is_disabled = server.has("disabled")
            if is_disabled or weights.get(server.name) == 0:
                why = "is disabled" if is_disabled else "has the weight 0"
                self._draft.needless(source, f"it {why}, so it is left out")
                self._draft.todo(f"{server.name} {why}: to use it later, run `tidevoy add {address}`")
            else:
                self._draft.append(source, "nodes", self._node(server, address, weights))
        self._servers.mark_converted("disabled")
        nodes = self._draft.value_of("nodes") or ()
        if nodes:
            self._draft.remark("nodes", _REMARK)
        if any("status_address" not in node.values for node in nodes):
            self._draft.todo("set pd.urls instead of nodes, or give each node its status_address")
        if self._servers.values("backup"):
            source, note = self._servers.source("backup"), self._servers.note("backup")
            self._draft.map(source, "backup.labels", _BACKUP_LABEL, note)

    def _node(self, server: HaproxyServer, address: str, weights: dict[str, int]) -> dict[str, Any]:
        node: dict[str, Any] = {"address": address}
        if status_address := self._status_address(server):
            node["status_address"] = status_address
        if server.name in weights:
            node["weight"] = weights[server.name]
        if server.has("backup"):
            node["labels"] = _BACKUP_LABEL
        return node

    def _address(self, server: HaproxyServer, source: SourceKey) -> str | None:
        """Return host and port of a server; None if it has no equivalent, which has its row then."""
        parsed = self._context.parse(parse_address, server.statement, "server", server.address)
        if parsed is None or not parsed.host:
            self._draft.no_equivalent(source, "a node has the address HOST:PORT")
            return None
        if parsed.port is not None and not parsed.is_offset:
            return addresses.join(parsed.host, parsed.port)
        bound = [each.address.port for each in bound_addresses(self._context) if each.address is not None]
        if not bound or bound[0] is None:
            self._draft.no_equivalent(source, "it has no port: write HOST:PORT in `nodes`")
            return None
        return addresses.join(parsed.host, bound[0] + (parsed.port or 0))

    def _scaled_weights(self) -> dict[str, int]:
        """Return the weights of Tidevoy by server; empty if no server has a weight."""
        if not self._servers.values("weight"):
            return {}
        weights = {
            server.name: self._servers.parse(parse_integer, "weight", server.options["weight"].value)
            if server.has("weight")
            else 1
            for server in self._servers.all
        }
        used = (weights[server.name] for server in self._servers.all if not server.has("disabled"))
        counts = Counter(weight for weight in used if weight)
        usual = min(counts, key=lambda weight: (-counts[weight], weight), default=1)
        factor = min(_DEFAULT_WEIGHT / usual, _MAX_WEIGHT / max(counts, default=1))
        self._draft.map_elsewhere(
            self._servers.source("weight"),
            "nodes.*.weight",
            f"times {factor:g}",
            self._servers.note("weight"),
        )
        return {name: max(round(weight * factor), 1) if weight else 0 for name, weight in weights.items()}

    def _status_address(self, server: HaproxyServer) -> str | None:
        port = server.options["port"].value if server.has("port") else self._status_port
        if not self._status_port or not server.has("check"):
            return None
        number = self._context.parse(parse_integer, server.statement, "server port", port)
        host = server.options["addr"].value if server.has("addr") else server.address
        parsed = self._context.parse(parse_address, server.statement, "server addr", host)
        return None if parsed is None or not parsed.host else addresses.join(parsed.host, number)
