"""The health checks of an HAProxy backend. In Tidevoy, all nodes have the same checks. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from cli.importers.draft import SourceKey
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.parser import Statement
from cli.importers.haproxy.servers import Servers
from cli.importers.haproxy.values import parse_integer, parse_time

_CHECK_OPTIONS = frozenset(
    (
        *("external-check", "httpchk", "ldap-check", "mysql-check", "pgsql-check", "redis-check", "smtpchk"),
        *("spop-check", "ssl-hello-chk", "tcp-check"),
    )
)


class CheckConversion:
    """Converts the checks. `status_port` must be read before the nodes are converted."""

    def __init__(self, context: HaproxyContext, servers: Servers) -> None:
        self._context, self._draft, self._servers = context, context.draft, servers
        self._option = self._find_option()
        self.status_port = self._find_status_port()

    def _find_option(self) -> Statement | None:
        """Return the statement that selects the kind of check; None: a plain TCP check."""
        for statement in reversed(self._context.proxy.back.statements):
            if (
                statement.words[0] == "option"
                and statement.words[1:2]
                and statement.words[1] in _CHECK_OPTIONS
            ):
                return None if statement.prefix else statement
        return None

    @property
    def _kind(self) -> str:
        return "" if self._option is None else self._option.words[1]

    def _find_status_port(self) -> str:
        """Return the port of HTTP checks; empty if there are none, or if they use the SQL port."""
        if self._kind != "httpchk" or not self._servers.any_has("check"):
            return ""
        for statement in self._context.proxy.back.all("http-check"):
            words = statement.words
            if words[1:2] == ("connect",) and "port" in words[:-1]:
                port = words[words.index("port") + 1]
                self._context.done.add(statement.line)
                source = SourceKey("http-check connect port", statement.line)
                self._draft.map_elsewhere(source, "nodes.*.status_address", port)
                return port
        return next(iter(self._servers.values("port")), "")

    def convert(self) -> None:
        if not self._servers.values("check"):
            self._reject_option("no server has `check`")
            return  # Tidevoy's defaults apply
        source, note = self._servers.source("check"), self._servers.note("check")
        self._draft.map(source, "health.sql.enabled", True, note)
        kinds = ["sql", *self._convert_option()]
        self._convert_other_ports()
        self._map_number("inter", parse_time, "interval", kinds)
        self._map_number("rise", parse_integer, "rise", kinds)
        self._map_number("fall", parse_integer, "fall", kinds)
        timeout = self._context.proxy.back.last("timeout", "check")
        if timeout is not None:
            self._context.done.add(timeout.line)
            for kind in kinds:
                value = self._context.argument(parse_time, timeout, 2)
                source = self._context.source(timeout, "timeout check")
                self._draft.map(source, f"health.{kind}.timeout", value)

    def _convert_other_ports(self) -> None:
        """Convert the options that let checks use another port than clients."""
        for name in ("port", "addr"):
            if not (values := self._servers.values(name)):
                continue
            source, note = self._servers.source(name), self._servers.note(name)
            if self.status_port:
                self._draft.map_elsewhere(source, "nodes.*.status_address", values[0], note)
            else:
                self._draft.no_equivalent(
                    source, "Tidevoy connects to the SQL port; if this is the status port, set status_address"
                )
        if self._kind != "httpchk" and self._servers.values("check-ssl"):
            self._draft.no_equivalent(
                self._servers.source("check-ssl"), "the check of the SQL port has no TLS"
            )

    def _map_number(self, name: str, parser: Callable[[str], float], setting: str, kinds: list[str]) -> None:
        values = self._servers.values(name)
        note = "" if len(values) <= 1 else "the most frequent value, since all nodes have the same checks"
        for kind in kinds if values else ():
            value = self._servers.parse(parser, name, values[0])
            self._draft.map(self._servers.source(name), f"health.{kind}.{setting}", value, note)

    def _reject_option(self, why: str) -> None:
        if self._option is not None:
            self._context.done.add(self._option.line)
            self._draft.needless(self._context.source(self._option, f"option {self._kind}"), why)

    def _convert_option(self) -> list[str]:
        """Convert the kind of check. Return which checks of Tidevoy it stands for, besides that of SQL."""
        if self._option is None:
            return []
        words = self._option.words
        source = self._context.source(self._option, f"option {self._kind}")
        if self._kind == "mysql-check":
            if words[2:3] != ("user",) or len(words) < 4:
                self._reject_option("without a user, it only reads the greeting, as `health.sql` does")
                return []
            self._context.done.add(self._option.line)
            self._draft.set_implied("health.statement.enabled", True, source.comment)
            note = self._context.note("option mysql-check")
            self._draft.map(source, "health.statement.user", words[3], note)
            return ["statement"]
        if self._kind != "httpchk":
            return []
        self._context.done.add(self._option.line)
        if not self.status_port:
            self._draft.no_equivalent(
                source,
                "without a port, it does not check TiDB's status port: set status_address of the nodes",
            )
            return []
        self._draft.map(source, "health.status.enabled", True, self._context.note("option httpchk"))
        if self._servers.values("check-ssl"):
            self._draft.map(self._servers.source("check-ssl"), "health.status.tls", True)
            self._draft.todo(
                "the status ports have TLS: set health.status.client_tls.ca, unless the CAs of the system do"
            )
        return ["status"]
