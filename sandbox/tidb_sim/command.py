"""The command line: the subset of TiDB's flags and configuration file that is supported, and some own flags.

Flags: pingcap/tidb cmd/tidb-server/main.go; file: pingcap/tidb pkg/config/config.go.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import signal
import socket
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from controlplane.config.settings import ClientTls
from controlplane.errors import TidevoyError
from sandbox.tidb_sim.accounts import AuthPlugin
from sandbox.tidb_sim.mariadb_backend import BackendAddress
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.node import DEFAULT_RELEASE
from sandbox.tidb_sim.proxy_header import ProxyProtocol
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles

EXIT_USAGE = 2
EXIT_VIOLATIONS = 3

MARIADB_VARIABLE = "TIDB_SIM_MARIADB"
_IGNORED_FLAGS = ("-L", "--log-file", "--log-slow-query", "--lease", "--socket", "--report-status")


def parse_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> SimSettings:
    """Parse a command line into settings.

    Raises SystemExit(2), with a message on stderr, if it is invalid.
    """
    parser = _parser()
    flags = parser.parse_args(arguments)
    try:
        return _settings(flags, environ)
    except (ValueError, OSError, tomllib.TOMLDecodeError, TidevoyError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a simulated server until it is stopped. Exit code 0, 2 for usage, 3 after a protocol violation."""
    sys.exit(asyncio.run(_run(parse_arguments(sys.argv[1:] if arguments is None else arguments, os.environ))))


async def _run(settings: SimSettings) -> int:
    sim = TidbSim(settings, kill_process=_kill_self)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sim.request_stop)
    try:
        await sim.start()
    except (OSError, TidevoyError) as error:
        print(f"tidb_sim: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps({"event": "ready", "sql": sim.sql_address, "status": sim.status_address}),
        flush=True,
    )
    await sim.wait()
    return EXIT_VIOLATIONS if sim.node.violations else 0


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.tidb_sim",
        description="A strict simulated TiDB server: speaks MySQL, keeps its data in a shared MariaDB.",
        allow_abbrev=False,
    )
    tidb = parser.add_argument_group("as tidb-server (its file's keys in brackets)")
    tidb.add_argument("-P", dest="port", type=_port, help="SQL port, 0: any free one; default 4000 [port]")
    tidb.add_argument("--host", "-host", help="address to listen on; default 0.0.0.0 [host]")
    tidb.add_argument("--status", "-status", dest="status_port", type=_port, help="status port [status]")
    tidb.add_argument("--status-host", "-status-host", help="address of the status port [status]")
    tidb.add_argument(
        "--advertise-address", "-advertise-address", help="address to register [advertise-address]"
    )
    tidb.add_argument("--store", "-store", help="tikv, or unistore: does not register [store]")
    tidb.add_argument("--path", "-path", help="PD addresses, separated by commas [path]")
    tidb.add_argument("--config", "-config", help="TOML file; keys that are not listed here are ignored")
    tidb.add_argument(
        "--proxy-protocol-networks",
        "-proxy-protocol-networks",
        help="peers whose PROXY header is read: *, or CIDRs [proxy-protocol.networks, fallbackable]",
    )
    tidb.add_argument("--tls-cert", type=Path, help="PEM, for TLS to clients [security.ssl-cert]")
    tidb.add_argument("--tls-key", type=Path, help="PEM [security.ssl-key]")
    tidb.add_argument("--tls-client-ca", type=Path, help="PEM, to verify clients [security.ssl-ca]")
    tidb.add_argument(
        "--require-secure-transport",
        action="store_true",
        default=None,
        help="reject logins without TLS [security.require-secure-transport]",
    )
    tidb.add_argument("--session-token-signing-cert", help="PEM [security.session-token-signing-cert]")
    tidb.add_argument("--session-token-signing-key", help="PEM [security.session-token-signing-key]")
    tidb.add_argument(
        "--default-authentication-plugin",
        choices=[AuthPlugin.NATIVE.value, AuthPlugin.SHA2.value, AuthPlugin.SM3.value],
        default=AuthPlugin.NATIVE.value,
        help="plugin named in the greeting (a system variable in TiDB)",
    )
    for flag in _IGNORED_FLAGS:
        tidb.add_argument(flag, *(["--log-level"] if flag == "-L" else []), help="accepted and ignored")
    own = parser.add_argument_group("of the simulated server only")
    own.add_argument("--mariadb", help=f"host:port or socket path; default: ${MARIADB_VARIABLE}")
    own.add_argument(
        "--version", help=f"TiDB release to report; default {DEFAULT_RELEASE} (file: server-version)"
    )
    own.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="[labels]")
    own.add_argument("--graceful-wait", type=float, help="seconds [graceful-wait-before-shutdown]")
    own.add_argument("--drain", type=float, default=15.0, help="seconds that a stop waits for transactions")
    own.add_argument("--topology-ttl", type=int, default=45, help="seconds; 45 in TiDB")
    own.add_argument("--topology-refresh", type=float, default=30.0, help="seconds; 30 in TiDB")
    own.add_argument("--states-delay", type=float, default=0.0, help="seconds that SHOW SESSION_STATES takes")
    own.add_argument(
        "--states-disturb",
        action="store_true",
        help="SHOW SESSION_STATES changes ROW_COUNT() and FOUND_ROWS()",
    )
    own.add_argument("--refuse-states", action="store_true", help="SET SESSION_STATES is a syntax error")
    own.add_argument("--clock-skew", type=float, default=0.0, help="seconds that the clock is ahead")
    own.add_argument("--max-connections", type=int, help="0: no limit [instance.max_connections]")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use a number from 0 to 65535")
    return port


def _settings(flags: argparse.Namespace, environ: Mapping[str, str]) -> SimSettings:
    file: dict[str, Any] = {}
    if flags.config:
        with open(flags.config, "rb") as stream:
            file = tomllib.load(stream)
    status, security = file.get("status", {}), file.get("security", {})
    mariadb = flags.mariadb or environ.get(MARIADB_VARIABLE)
    if not mariadb:
        raise ValueError(f"MariaDB's address is missing; give --mariadb or set {MARIADB_VARIABLE}")
    host = _first_given(flags.host, file.get("host"), "0.0.0.0")
    tls = _cluster_tls(security)
    return SimSettings(
        rules=SessionRules(
            BackendAddress.parse(mariadb),
            _first_given(flags.max_connections, file.get("instance", {}).get("max_connections"), 0),
            _proxy_protocol(flags.proxy_protocol_networks, file.get("proxy-protocol", {})),
            _sql_tls(flags, security),
            _first_given(flags.require_secure_transport, security.get("require-secure-transport"), False),
            flags.default_authentication_plugin,
            MigrationRules(flags.states_delay, flags.refuse_states, flags.states_disturb, flags.clock_skew),
        ),
        host=host,
        port=_first_given(flags.port, file.get("port"), 4000),
        status_host=_first_given(flags.status_host, status.get("status-host"), "0.0.0.0"),
        status_port=_first_given(flags.status_port, status.get("status-port"), 10080),
        advertise_address=_first_given(
            flags.advertise_address or None, file.get("advertise-address") or None, _guess_own_address(host)
        ),
        pd=_pd_urls(
            _first_given(flags.store, file.get("store"), "tikv"),
            _first_given(flags.path, file.get("path"), ""),
            "http" if tls is None else "https",
        ),
        cluster_tls=tls,
        release=flags.version or DEFAULT_RELEASE,
        server_version=file.get("server-version", ""),
        labels={**file.get("labels", {}), **dict(_label(text) for text in flags.label)},
        signing_cert=_first_given(
            flags.session_token_signing_cert, security.get("session-token-signing-cert"), ""
        ),
        signing_key=_first_given(
            flags.session_token_signing_key, security.get("session-token-signing-key"), ""
        ),
        graceful_wait=_first_given(flags.graceful_wait, file.get("graceful-wait-before-shutdown"), 0),
        drain_timeout=flags.drain,
        topology_ttl=flags.topology_ttl,
        topology_refresh=flags.topology_refresh,
    )


def _first_given(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _cluster_tls(security: Mapping[str, Any]) -> ClientTls | None:
    """Return `security.cluster-ssl-*`; an empty text counts as unset, as in TiDB's own example file."""
    names = {"ca": "cluster-ssl-ca", "cert": "cluster-ssl-cert", "key": "cluster-ssl-key"}
    files = {key: security[name] for key, name in names.items() if security.get(name)}
    return ClientTls.model_validate(files) if files else None


def _sql_tls(flags: argparse.Namespace, security: Mapping[str, Any]) -> SqlTlsFiles | None:
    """Return `security.ssl-*`; an empty text counts as unset."""
    cert, key, ca = (
        path or (Path(security[name]) if security.get(name) else None)
        for path, name in (
            (flags.tls_cert, "ssl-cert"),
            (flags.tls_key, "ssl-key"),
            (flags.tls_client_ca, "ssl-ca"),
        )
    )
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ValueError("TLS needs a certificate and its key; give both --tls-cert and --tls-key")
    return SqlTlsFiles(cert, key, ca)


def _proxy_protocol(flag: str | None, section: Mapping[str, Any]) -> ProxyProtocol:
    text = _first_given(flag, section.get("networks"), "")
    networks = tuple(part.strip() for part in text.split(",") if part.strip())
    for network in networks:
        if network != "*":
            ipaddress.ip_network(network, strict=False)
    return ProxyProtocol(networks, section.get("fallbackable", True))


def _pd_urls(store: str, path: str, scheme: str) -> tuple[str, ...]:
    if store != "tikv":
        return ()
    addresses = path.partition("?")[0].split(",")
    return tuple(f"{scheme}://{address.strip()}" for address in addresses if address.strip())


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"the label {text!r} is not KEY=VALUE")
    return key, value


def _guess_own_address(host: str) -> str:
    """Return the address at which others reach us if none is configured: TiDB guesses it in the same way."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing; only looks up the route.
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
