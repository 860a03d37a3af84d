"""TLS, the PROXY protocol and the slow start of the servers of an HAProxy backend. No I/O."""

from __future__ import annotations

from cli.importers.haproxy.bind import minimum_version, tls_version
from cli.importers.haproxy.context import HaproxyContext
from cli.importers.haproxy.servers import Servers
from cli.importers.haproxy.values import parse_time

_PROXY_VERSIONS = {
    "send-proxy": "v1",
    "send-proxy-v2": "v2",
    "send-proxy-v2-ssl": "v2",
    "send-proxy-v2-ssl-cn": "v2",
}
_NAME_OPTIONS = ("verifyhost", "sni", "sni-auto")
_TODO_TLS = (
    "HAProxy begins TLS with the first byte, so another program ends it in front of TiDB. Tidevoy negotiates"
    " TLS with TiDB itself: name the addresses of TiDB in `nodes`"
)


def convert_backend(context: HaproxyContext, servers: Servers) -> None:
    if servers.values("ssl"):
        _convert_tls(context, servers)
        _warn_about_others(context, servers, ("ssl",), "TLS")
    for name, version in _PROXY_VERSIONS.items():
        if servers.values(name):
            context.draft.map(servers.source(name), "backend.proxy_protocol", version, servers.note(name))
    if context.draft.value_of("backend.proxy_protocol"):
        _warn_about_others(context, servers, tuple(_PROXY_VERSIONS), "PROXY headers")
    if values := servers.values("slowstart"):
        longest = max(servers.parse(parse_time, "slowstart", value) for value in values)
        source, note = servers.source("slowstart"), servers.note("slowstart")
        context.draft.map(source, "balance.slow_start", longest, note)


def _warn_about_others(
    context: HaproxyContext, servers: Servers, options: tuple[str, ...], what: str
) -> None:
    """Add what to do about servers without an option, which applies to all nodes in Tidevoy."""
    if others := servers.names_without(options):
        context.draft.todo(
            f"all nodes get {what}, also {', '.join(others)}, which had none: check that they accept it, or"
            " leave them out"
        )


def _convert_tls(context: HaproxyContext, servers: Servers) -> None:
    draft = context.draft
    draft.map(servers.source("ssl"), "tls.backend.mode", "required", servers.note("ssl"), todo=_TODO_TLS)
    verify = next(iter(servers.values("verify")), "required")
    names = [name for name in _NAME_OPTIONS if servers.values(name)]
    level = "none" if verify == "none" else "full" if names else "ca"
    named = [name for name in ("verify", *names) if servers.is_written(name)]
    for name in named:
        draft.map(servers.source(name), "tls.backend.verify", level, servers.note("verify"))
    if not named:
        draft.set_implied("tls.backend.verify", level, "HAProxy does not check names")
    _convert_file(context, servers, "ca-file", ("ca",), is_used=level != "none")
    _convert_file(context, servers, "crl-file", ("crl",), is_used=level != "none")
    _convert_file(context, servers, "crt", ("cert", "key"), is_used=True)
    default = minimum_version(context, "ssl-default-server-options")
    if values := servers.values("ssl-min-ver"):
        draft.map(servers.source("ssl-min-ver"), "tls.backend.min_version", tls_version(values[0]))
    elif default is not None:
        statement, version = default
        context.done.add(statement.line)
        draft.map(context.global_source(statement), "tls.backend.min_version", version)


def _convert_file(
    context: HaproxyContext, servers: Servers, name: str, settings: tuple[str, ...], *, is_used: bool
) -> None:
    path = next(iter(servers.values(name)), "")
    if not path:
        return
    source, note = servers.source(name), servers.note(name)
    if not is_used:
        context.draft.needless(source, "the certificates of nodes are not verified")
    elif path.startswith("@"):
        context.draft.needless(source, "the CAs of the system are Tidevoy's default")
    else:
        file, todo = context.envoy_file("crt-base" if name == "crt" else "ca-base", path)
        for setting in settings:
            context.draft.map(source, f"tls.backend.{setting}", file, note, todo=todo)
