"""TiProxy's listening addresses, labels and routing rules as `sql.listen` and groups of nodes. No I/O."""

from __future__ import annotations

import re

from cli.importers.draft import SettingsDraft
from cli.importers.tiproxy.file import TiProxyKey, TiProxyKeys

_DEFAULT_ADDRESS = "0.0.0.0:6000"
_PORT_LABEL = "tiproxy-port"
_MAX_GROUPS = 64
_MAX_PORT = 65_535
_RESERVED_PORTS = (3080, 18000, 9901)


def listen_address(text: str) -> str:
    """Return a listening address as Tidevoy's settings write it: with a host, and IPv6 in brackets."""
    host, _, port = text.strip().rpartition(":")
    return f"{host or '0.0.0.0'}:{port}"  # noqa: S104 - not bound


class GroupConversion:
    """Converts `proxy.addr`, `proxy.port-range`, `balance.routing-rule` and `balance.label-name`."""

    def __init__(self, draft: SettingsDraft, keys: TiProxyKeys) -> None:
        self._draft, self._keys = draft, keys

    def convert(self) -> None:
        listens = self._convert_addresses()
        rule = self._keys.take("balance.routing-rule")
        if rule is not None:
            self._convert_rule(rule, listens)
        elif len(listens) > 1:
            self._reject_ports(listens[1:])
        self._convert_label(listens)

    def _convert_addresses(self) -> list[str]:
        """Set `sql.listen`. Return all addresses; the first one is that of `sql.listen`."""
        address, ports = self._keys.take("proxy.addr"), self._keys.take("proxy.port-range")
        text = _DEFAULT_ADDRESS if address is None else address.value
        listens = [listen_address(part) for part in text.split(",") if part.strip()] or [_DEFAULT_ADDRESS]
        if ports is not None and len(ports.value) == 2:
            host = listens[0].rpartition(":")[0]
            first, last = (min(max(port, 0), _MAX_PORT) for port in ports.value)
            listens = [f"{host}:{port}" for port in range(first, last + 1)] or listens
        for key in (address, ports):
            if key is not None and key.rule is not None:
                self._draft.map(key.source, "sql.listen", listens[0], key.rule.note)
        return listens

    def _reject_ports(self, listens: list[str]) -> None:
        shown = ", ".join(listens[:3]) + (" ..." if len(listens) > 3 else "")
        self._draft.todo(
            f"let the clients of {shown} use the address of sql.listen: two ports of an Envoy cannot lead to"
            " the same nodes"
        )

    def _convert_rule(self, rule: TiProxyKey, listens: list[str]) -> None:
        name = rule.value.lower()
        if not name:
            self._draft.needless(rule.source, "it is empty: all clients may use all nodes, as in Tidevoy")
        elif name != "port":
            self._draft.no_equivalent(
                rule.source, "give each set of nodes its own port (`groups`), which its clients use"
            )
            self._draft.todo(
                f"replace the routing by {name}: write a group with a port for each set of nodes"
            )
        if name != "port":
            if len(listens) > 1:
                self._reject_ports(listens[1:])
            return
        note = (
            "the nodes without the label, or with the label of the first port, are those of sql.listen; in"
            " TiProxy, nodes without the label get no clients"
        )
        if len(listens) == 1:
            self._draft.needless(rule.source, f"there is only one port. {note}")
        for listen in listens[1 : _MAX_GROUPS + 1]:
            port = listen.rpartition(":")[2]
            group = {"name": f"port-{port}", "listen": listen, "labels": {_PORT_LABEL: port}}
            self._draft.append(rule.source, "groups", group, note)
        if len(listens) > _MAX_GROUPS + 1:
            self._draft.todo(
                f"only the first {_MAX_GROUPS} ports after that of sql.listen became groups: write groups for"
                " the other ports that are in use"
            )

    def _convert_label(self, listens: list[str]) -> None:
        keys = [self._keys.take(name) for name in ("balance.label-name", "balance.label.label-name")]
        for key in keys:
            if key is None or key.rule is None:
                continue
            value = self._keys.take(f"labels.{key.value}")
            if not key.value or value is None or not value.value:
                self._draft.needless(key.source, "without a value of this label, TiProxy ignores it")
                continue
            name = re.sub(r"[^a-z0-9-]+", "-", str(value.value).lower()).strip("-")[:32] or "group"
            group = {
                "name": name,
                "listen": _free_address(listens, len(self._draft.value_of("groups") or ())),
                "labels": {key.value: value.value},
            }
            self._draft.append(key.source, "groups", group, key.rule.note)
            self._draft.map_elsewhere(value.source, "groups", str(value.value), "the value of the group")
            self._draft.todo(
                f"start the Envoys that replace this TiProxy with `tidevoy bootstrap --group {name}`, or"
                f" with `tidevoy serve --with-envoy --envoy-group {name}`: they serve only this group, at"
                f" sql.listen. Other Envoys serve it at {group['listen']}. Write a group for the label of"
                " each other TiProxy"
            )


def _free_address(listens: list[str], groups: int) -> str:
    """Return an address for a group: that of `sql.listen` with the next port that is free."""
    host, _, port = listens[0].rpartition(":")
    used = {listen.rpartition(":")[2] for listen in listens} | set(map(str, _RESERVED_PORTS))
    number = (int(port) if port.isdigit() else 6000) + 1 + groups
    while str(number) in used:
        number += 1
    return f"{host}:{number if number <= _MAX_PORT else number - _MAX_PORT + 1023}"
