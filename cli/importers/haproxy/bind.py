"""The `bind` lines of an HAProxy proxy as settings of the SQL port. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cli.importers.draft import SourceKey
from cli.importers.envoy_files import ENVOY_DIRECTORY
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.keys import UNKNOWN_NOTE
from cli.importers.haproxy.options import BIND_RULES, SERVER_RULES, Option, split_bind_options
from cli.importers.haproxy.parser import Statement
from cli.importers.haproxy.values import TcpAddress, parse_address

_ANY_NETWORK = ["0.0.0.0/0", "::/0"]
_TODO_PROXIES = "list only the networks of your proxies: others could claim any client address in a header"


@dataclass(frozen=True, slots=True)
class BoundAddress:
    statement: Statement
    text: str
    address: TcpAddress | None  # None: no TCP


def bound_addresses(context: HaproxyContext) -> list[BoundAddress]:
    """Return the addresses of all `bind` lines. Raises ConfigError."""
    found = []
    for statement in context.proxy.front.all("bind"):
        for text in (statement.arguments[0] if statement.arguments else "").split(","):
            address = context.parse(parse_address, statement, "bind", text)
            found.append(BoundAddress(statement, text, address))
    return found


def convert_bind(context: HaproxyContext) -> None:
    """Convert addresses, TLS to clients and the PROXY protocol of clients."""
    _convert_addresses(context, bound_addresses(context))
    options = [
        (statement, option)
        for statement in context.proxy.front.all("bind")
        for option in split_bind_options(statement.arguments[1:])
    ]
    _BindOptions(context, options).convert()
    _convert_expect_proxy(context)


def _convert_addresses(context: HaproxyContext, found: Sequence[BoundAddress]) -> None:
    draft, has_listen = context.draft, False
    for each in found:
        context.done.add(each.statement.line)
        source = context.source(each.statement, f"bind {each.text}")
        if each.address is None:
            draft.no_equivalent(source, "Envoys listen on TCP only: let these clients use sql.listen")
        elif has_listen:
            draft.no_equivalent(source, "an Envoy has one address for the same nodes")
            draft.todo(f"let the clients of {each.text} use the address of sql.listen")
        else:
            has_listen = True
            draft.map(source, "sql.listen", each.address.listen(), context.note("bind"))
            if each.address.last_port is not None:
                draft.todo(f"let the clients of the other ports of {each.text} use that of sql.listen")


class _BindOptions:
    def __init__(self, context: HaproxyContext, options: Sequence[tuple[Statement, Option]]) -> None:
        self._context, self._draft, self._options = context, context.draft, options
        self._handled: set[str] = {"maxconn"}  # with that of `global`

    def convert(self) -> None:
        if self._first("accept-proxy"):
            self._handled.add("accept-proxy")
            _require_proxy_header(self._context, self._source("accept-proxy"))
        if self._first("ssl"):
            self._convert_tls()
        else:
            self._draft.todo(
                "HAProxy passes the TLS of clients through to TiDB, so this file does not show whether they"
                " use it: if they do, set tls.client and tls.backend (docs/operate/tls.md)"
            )
        self._add_remaining_rows()

    def _first(self, name: str) -> Option | None:
        return next((option for _, option in self._options if option.name == name), None)

    def _source(self, name: str) -> SourceKey:
        line = next(statement.line for statement, option in self._options if option.name == name)
        return SourceKey(f"bind {name}", line)

    def _convert_tls(self) -> None:
        self._handled |= {"ssl", "crt", "verify", "ca-file", "crl-file", "ssl-min-ver"}
        note = BIND_RULES["ssl"].note
        todo = (
            "HAProxy expects TLS from the first byte. Clients must now negotiate it in MySQL's protocol, as"
            " they do by default"
        )
        self._draft.map(self._source("ssl"), "tls.client.mode", "required", note, todo=todo)
        self._convert_certificate()
        self._convert_client_ca()
        version = self._first("ssl-min-ver")
        default = minimum_version(self._context, "ssl-default-bind-options")
        if version is not None:
            value = tls_version(version.value)
            self._draft.map(self._source("ssl-min-ver"), "tls.client.min_version", value)
        elif default is not None:
            statement, value = default
            self._draft.map(self._context.global_source(statement), "tls.client.min_version", value)
            self._context.done.add(statement.line)

    def _convert_certificate(self) -> None:
        certificate = self._first("crt")
        if certificate is None or not certificate.value or certificate.value.endswith("/"):
            if certificate is not None:
                self._draft.no_equivalent(self._source("crt"), "it is a directory: name one certificate")
            # TLS must not be off just because the certificate is unknown.
            self._draft.set_implied(
                "tls.client.cert",
                f"{ENVOY_DIRECTORY}/server.pem",
                "",
                todo="name the certificate for clients",
            )
            self._draft.set_implied("tls.client.key", f"{ENVOY_DIRECTORY}/server.key", "")
            return
        path, todo = self._context.envoy_file("crt-base", certificate.value)
        source, note = self._source("crt"), BIND_RULES["crt"].note
        self._draft.map(source, "tls.client.cert", path, note, todo=todo)
        self._draft.map(source, "tls.client.key", path, note)
        if sum(option.name == "crt" for _, option in self._options) > 1:
            self._draft.todo("Envoys have one certificate for clients: check that the first `crt` suits all")

    def _convert_client_ca(self) -> None:
        verify, ca, crl = self._first("verify"), self._first("ca-file"), self._first("crl-file")
        mode = "none" if verify is None else verify.value
        if verify is not None:
            if mode == "optional":
                self._draft.no_equivalent(
                    self._source("verify"), "with a CA, each client with TLS needs a certificate"
                )
            else:
                self._draft.needless(self._source("verify"), "tls.client.client_ca decides it")
        for option, setting in ((ca, "client_ca"), (crl, "crl")):
            if option is None:
                continue
            source = self._source(option.name)
            if mode != "required" or ca is None:
                self._draft.needless(source, "only with `verify required` do clients need a certificate")
                continue
            path, todo = self._context.envoy_file("ca-base", option.value)
            self._draft.map(source, f"tls.client.{setting}", path, BIND_RULES[option.name].note, todo=todo)

    def _add_remaining_rows(self) -> None:
        for statement, option in self._options:
            if option.name in self._handled:
                continue
            self._handled.add(option.name)
            add_option_row(self._context, statement, "bind", option, "the proxy has no `bind ... ssl`")


def add_option_row(
    context: HaproxyContext, statement: Statement, keyword: str, option: Option, unused: str
) -> None:
    """Add the row of an option that has not been converted. `unused`: why a mapped option was not."""
    rules = BIND_RULES if keyword == "bind" else SERVER_RULES
    source = SourceKey(f"{keyword} {option.name}", statement.line)
    context.draft.add_unset(source, rules.get(option.name), unknown=UNKNOWN_NOTE, unused=unused)


def minimum_version(context: HaproxyContext, keyword: str) -> tuple[Statement, str] | None:
    """Return `ssl-min-ver` of the defaults in `global`, and its statement; None if there is none."""
    statement = context.globals.last(keyword)
    if statement is None or "ssl-min-ver" not in statement.arguments[:-1]:
        return None
    return statement, tls_version(statement.arguments[statement.arguments.index("ssl-min-ver") + 1])


def tls_version(text: str) -> str:
    return "TLSv1.3" if text == "TLSv1.3" else "TLSv1.2"


def _require_proxy_header(context: HaproxyContext, source: SourceKey) -> None:
    context.draft.map(source, "sql.proxy_protocol", "required", BIND_RULES["accept-proxy"].note)
    context.draft.set_implied("sql.trusted_proxies", _ANY_NETWORK, source.comment, todo=_TODO_PROXIES)


def _convert_expect_proxy(context: HaproxyContext) -> None:
    """Convert `tcp-request connection expect-proxy layer4 if { src NETWORK ... }`."""
    for statement in context.proxy.front.all("tcp-request"):
        if statement.words[1:4] != ("connection", "expect-proxy", "layer4"):
            continue
        context.done.add(statement.line)
        source = context.source(statement, "tcp-request connection expect-proxy")
        condition = statement.words[4:]
        if not condition:
            _require_proxy_header(context, source)
            continue
        networks = _source_networks(condition)
        note = context.note("tcp-request connection")
        todo = ""
        if not networks:
            networks = ["127.0.0.1/32"]
            todo = (
                "list the networks of the proxies that send PROXY headers: the condition of expect-proxy was"
                " not understood. This value stands for no proxy"
            )
        context.draft.map(source, "sql.proxy_protocol", "optional", note)
        context.draft.set_implied("sql.trusted_proxies", networks, source.comment, todo=todo)


def _source_networks(condition: Sequence[str]) -> list[str]:
    """Return the networks of `if { src NETWORK ... }`; empty for another condition."""
    if tuple(condition[:3]) != ("if", "{", "src") or condition[-1] != "}":
        return []
    try:
        return [str(ipaddress.ip_network(word, strict=False)) for word in condition[3:-1]]
    except ValueError:
        return []
