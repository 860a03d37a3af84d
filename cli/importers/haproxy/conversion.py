"""Turns an HAProxy configuration in TCP mode into settings of Tidevoy. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cli.importers.draft import SourceKey
from cli.importers.haproxy.backend import convert_backend
from cli.importers.haproxy.bind import convert_bind
from cli.importers.haproxy.checks import CheckConversion
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.keys import (
    DIFFERENCES,
    GLOBAL_RULES,
    OTHER_SECTION_NOTE,
    PROXY_RULES,
    SECTION_NOTES,
    UNKNOWN_NOTE,
    find_rule,
)
from cli.importers.haproxy.nodes import convert_nodes
from cli.importers.haproxy.options import split_bind_options
from cli.importers.haproxy.parser import HaproxyFile, Section, Statement, parse_haproxy
from cli.importers.haproxy.selection import select_proxy
from cli.importers.haproxy.servers import Servers
from cli.importers.haproxy.values import parse_integer, parse_time
from cli.importers.report import ImportResult, Outcome

_BALANCED_BY_COUNT = frozenset(("leastconn", "roundrobin", "static-rr", "random"))
_REJECTING = frozenset(("reject", "deny", "silent-drop"))
_MAX_ATTEMPTS = 20
_OVERLOAD_CONNECTIONS = 50_000  # default of overload.max_connections
_KEEPALIVE = {
    f"{side}tcpka-{name}": f"{section}.keepalive_{setting}"
    for side, section in (("cli", "sql"), ("srv", "backend"))
    for name, setting in (("idle", "idle"), ("intvl", "interval"), ("cnt", "probes"))
}


def import_haproxy(
    text: str, name: str, environ: Mapping[str, str], proxy: str | None = None
) -> ImportResult:
    """Convert the file `name` with the content `text`. `proxy`: which proxy, if several may carry MySQL.

    Raises ConfigError if the file is invalid, or if it is not clear which proxy is meant.
    """
    file = parse_haproxy(text, name, environ)
    return _HaproxyConversion(HaproxyContext(file, select_proxy(file, proxy))).run()


class _HaproxyConversion:
    def __init__(self, context: HaproxyContext) -> None:
        self._context, self._draft = context, context.draft
        self._front, self._back = context.proxy.front, context.proxy.back

    def run(self) -> ImportResult:
        file = self._context.file
        convert_bind(self._context)
        self._convert_servers()
        self._convert_connection_limits()
        self._convert_connection_rates()
        self._convert_timeouts()
        self._convert_balance()
        self._convert_retries()
        self._convert_keepalive()
        self._convert_stop()
        self._add_remaining_rows()
        self._add_other_sections(file)
        self._add_differences()
        made_by = f"`tidevoy import-haproxy {file.name}` from the proxy {self._context.proxy.name}"
        return self._draft.finish(made_by, file.remarks)

    def _source(self, statement: Statement, key: str) -> SourceKey:
        self._context.done.add(statement.line)
        return self._context.source(statement, key)

    def _convert_servers(self) -> None:
        servers = Servers(self._context)
        checks = CheckConversion(self._context, servers)
        convert_nodes(self._context, servers, checks.status_port)
        checks.convert()
        convert_backend(self._context, servers)
        servers.add_remaining_rows()

    def _convert_connection_limits(self) -> None:
        limits: list[tuple[int, SourceKey]] = []
        if statement := self._context.globals.last("maxconn"):
            value = self._context.argument(parse_integer, statement)
            limits.append((value, self._source(statement, "global maxconn")))
        if statement := self._front.last("maxconn"):
            value = self._context.argument(parse_integer, statement)
            limits.append((value, self._source(statement, "maxconn")))
        for statement in self._front.all("bind"):
            for option in split_bind_options(statement.arguments[1:]):
                if option.name == "maxconn":
                    value = self._context.parse(parse_integer, statement, "bind maxconn", option.value)
                    limits.append((value, SourceKey("bind maxconn", statement.line)))
        lowest = self._map_lowest(limits, "sql.max_connections", self._context.note("global maxconn"))
        if lowest and lowest > 0.9 * _OVERLOAD_CONNECTIONS:
            self._draft.set_implied(
                "overload.max_connections", lowest * 11 // 10, "10 % above sql.max_connections"
            )

    def _convert_connection_rates(self) -> None:
        rates: list[tuple[int, SourceKey]] = []
        if statement := self._front.last("rate-limit", "sessions"):
            value = self._context.argument(parse_integer, statement, 2)
            rates.append((value, self._source(statement, "rate-limit sessions")))
        for keyword in ("maxconnrate", "maxsessrate"):
            if statement := self._context.globals.last(keyword):
                value = self._context.argument(parse_integer, statement)
                rates.append((value, self._source(statement, f"global {keyword}")))
        note = self._context.note("global maxconnrate")
        self._map_lowest(rates, "limits.max_new_connections_per_second", note)

    def _map_lowest(self, limits: list[tuple[int, SourceKey]], setting: str, note: str) -> int:
        """Map the lowest limit above 0. Return it; 0 if there is none."""
        lowest = min((value for value, _ in limits if value), default=0)
        is_mapped = False
        for value, source in limits:
            if value and value == lowest and not is_mapped:
                is_mapped = True
                self._draft.map(source, setting, value, note)
            else:
                self._draft.needless(source, "0 means no limit" if not value else "another limit is lower")
        return lowest

    def _convert_timeouts(self) -> None:
        for key in (("timeout", "connect"), ("contimeout",)):
            if statement := self._back.last(*key):
                value = self._context.argument(parse_time, statement, len(key))
                source = self._source(statement, " ".join(key))
                if value:
                    note = self._context.note(" ".join(key))
                    self._draft.map(source, "backend.connect_timeout", value, note)
                else:
                    self._draft.needless(source, "0 means no limit")
        self._convert_idle_timeout()

    def _convert_idle_timeout(self) -> None:
        keys = (
            (self._back, ("timeout", "tunnel")),
            (self._front, ("timeout", "client")),
            (self._back, ("timeout", "server")),
            (self._front, ("clitimeout",)),
            (self._back, ("srvtimeout",)),
        )
        found: list[tuple[float, SourceKey]] = []
        for side, key in keys:
            if statement := side.last(*key):
                value = self._context.argument(parse_time, statement, len(key))
                found.append((value, self._source(statement, " ".join(key))))
        has_tunnel = bool(found) and found[0][1].name == "timeout tunnel" and found[0][0] > 0
        relevant = found[:1] if has_tunnel else found
        shortest = min((value for value, _ in relevant if value), default=0.0)
        note = self._context.note("timeout client")
        for value, source in found:
            if value and value == shortest and (value, source) in relevant:
                self._draft.map(source, "sql.idle_timeout", value, note)
            elif has_tunnel:
                self._draft.needless(source, "timeout tunnel takes its place in TCP mode")
            else:
                self._draft.needless(
                    source, "0 means no limit" if not value else "another timeout is shorter"
                )

    def _convert_balance(self) -> None:
        if (statement := self._back.last("balance")) is None:
            return
        algorithm = self._context.argument(str, statement).partition("(")[0]
        source, note = self._source(statement, "balance"), self._context.note("balance")
        if algorithm in _BALANCED_BY_COUNT:
            self._draft.map(source, "balance.policy", "connection", note)
        else:
            self._draft.no_equivalent(source, note)

    def _convert_retries(self) -> None:
        if (statement := self._back.last("retries")) is None:
            return
        attempts = self._context.argument(parse_integer, statement) + 1
        source, note = self._source(statement, "retries"), self._context.note("retries")
        self._draft.map(source, "backend.max_connect_attempts", min(attempts, _MAX_ATTEMPTS), note)

    def _convert_keepalive(self) -> None:
        for keyword, setting in _KEEPALIVE.items():
            side = self._front if keyword.startswith("cli") else self._back
            if statement := side.last(keyword):
                parser = parse_integer if keyword.endswith("cnt") else parse_time
                value = self._context.argument(parser, statement)
                self._draft.map(self._source(statement, keyword), setting, max(round(value), 1))

    def _convert_stop(self) -> None:
        for keyword, setting in (("hard-stop-after", "end.timeout"), ("grace", "end.wait")):
            if statement := self._context.globals.last(keyword):
                value = self._context.argument(parse_time, statement)
                self._draft.map(self._source(statement, f"global {keyword}"), setting, value)

    def _add_remaining_rows(self) -> None:
        for statement in self._context.globals.statements:
            self._add_row(statement, is_global=True)
        for statement in self._context.proxy.statements():
            self._add_row(statement, is_global=False)

    def _add_row(self, statement: Statement, *, is_global: bool) -> None:
        if statement.line in self._context.done:
            return
        self._context.done.add(statement.line)
        key, rule = find_rule(GLOBAL_RULES if is_global else PROXY_RULES, statement.words)
        prefix = f"{statement.prefix} " if statement.prefix else ""
        source = self._context.source(statement, f"{prefix}{'global ' if is_global else ''}{key}")
        if rule is not None and statement.prefix:
            self._draft.needless(source, "it reverts a default, and so sets nothing")
            return
        if rule is not None and key == "tcp-request connection":  # expect-proxy has its row already
            rule = replace(rule, outcome=Outcome.NO_EQUIVALENT)
        unused = self._why_unused(statement, key, is_global=is_global)
        self._draft.add_unset(source, rule, unknown=UNKNOWN_NOTE, unused=unused)
        self._add_todo(statement)

    def _add_todo(self, statement: Statement) -> None:
        """Add what the operator must do about a keyword without equivalent that decides who gets where."""
        keyword, *arguments = statement.words
        if keyword == "use_backend" and arguments[:1] != [self._back.section.name]:
            self._draft.todo(
                f"line {statement.line}: only the servers of {self._back.section.name} are imported; write a"
                f" group with a port of its own for those of {' '.join(arguments[:1])}"
            )
        elif keyword == "tcp-request" and _REJECTING & set(arguments):
            self._draft.todo(
                f"line {statement.line} rejects some clients: block them in a firewall, or limit them with"
                " limits.rules"
            )

    def _why_unused(self, statement: Statement, key: str, *, is_global: bool) -> str:
        """Return why a statement that could be mapped has set nothing."""
        sides = (self._context.globals,) if is_global else (self._front, self._back)
        lasts = [side.last(*key.split()) for side in sides]
        lines = [each.line for each in lasts if each is not None and each.line != statement.line]
        return f"line {max(lines)} takes its place" if lines else "it has no effect in this proxy"

    def _add_other_sections(self, file: HaproxyFile) -> None:
        used = set(self._context.proxy.sections)
        for section in self._context.proxy.sections:
            used |= set(file.defaults_of(section))
        for section in file.sections:
            if section not in used and section.kind != "global":
                source = SourceKey(f"{section.kind} {section.name}".strip(), section.line)
                self._add_section(section, source)

    def _add_section(self, section: Section, source: SourceKey) -> None:
        keywords = {statement.words[0] for statement in section.statements}
        if section.kind == "defaults":
            self._draft.needless(source, "the imported proxy does not use it")
        elif section.kind not in ("listen", "frontend", "backend"):
            self._draft.no_equivalent(source, SECTION_NOTES.get(section.kind, OTHER_SECTION_NOTE))
        elif "stats" in keywords:
            self._draft.needless(source, "the console and `tidevoy` show nodes, Envoys and sessions")
        else:
            self._draft.no_equivalent(
                source, "it is not part of the imported proxy; another TCP proxy is imported with `--proxy`"
            )

    def _add_differences(self) -> None:
        used = {find_rule(PROXY_RULES, statement.words)[0] for statement in self._context.proxy.statements()}
        options = {
            f"server {word}"
            for statement in self._back.statements
            if statement.words[0] in ("server", "default-server")
            for word in statement.words
        }
        global_keys = {statement.words[0] for statement in self._context.globals.statements}
        for difference in DIFFERENCES:
            if difference.key not in used | options | global_keys:
                self._draft.differs(difference)
