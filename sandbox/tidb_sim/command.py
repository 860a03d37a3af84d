"""The command line: the supported part of TiDB's flags and configuration file, and additional flags.

TiDB defines its flags in pingcap/tidb cmd/tidb-server/main.go, and the file in pkg/config/config.go.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from controlplane.address import split
from controlplane.errors import TidevoyError
from sandbox.tidb_sim.node import DEFAULT_RELEASE
from sandbox.tidb_sim.server import TidbSim
from sandbox.tidb_sim.session import SessionRules
from sandbox.tidb_sim.settings import SimSettings
from sandbox.tidb_sim.tls import SqlTlsFiles

EXIT_VIOLATIONS = 3

MARIADB_VARIABLE = "TIDB_SIM_MARIADB"


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port; use a number from 0 to 65535")
    return port


# Flag, type, key in the file, default, help.
_OPTIONS: tuple[tuple[str, Callable[[str], object], str, object, str], ...] = (
    ("-P", _port, "port", 4000, "SQL port, 0: any free one; default 4000"),
    ("--host", str, "host", "0.0.0.0", "address to listen on; default 0.0.0.0"),
    ("--status", _port, "status.status-port", 10080, "status port"),
    ("--status-host", str, "status.status-host", "0.0.0.0", "address of the status port"),
    ("--advertise-address", str, "advertise-address", "127.0.0.1", "address to register"),
    ("--path", str, "path", "", "PD addresses, separated by commas"),
    ("--tls-cert", str, "security.ssl-cert", "", "PEM, for TLS to clients"),
    ("--tls-key", str, "security.ssl-key", "", "PEM"),
    ("--session-token-signing-cert", str, "security.session-token-signing-cert", "", "PEM"),
    ("--session-token-signing-key", str, "security.session-token-signing-key", "", "PEM"),
    ("--graceful-wait", float, "graceful-wait-before-shutdown", 0.0, "seconds"),
    ("--max-connections", int, "instance.max_connections", 0, "0: no limit"),
)


def parse_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> SimSettings:
    """Parse a command line into settings.

    Raises SystemExit(2), with a message on stderr, if it is invalid.
    """
    parser = _parser()
    flags = vars(parser.parse_args(arguments))
    try:
        return _settings(flags, environ)
    except (ValueError, OSError, TidevoyError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a simulated server until it stops. Exit code 1: start failed; 2: wrong usage; 3: violations."""
    sys.exit(asyncio.run(_run(parse_arguments(sys.argv[1:] if arguments is None else arguments, os.environ))))


async def _run(settings: SimSettings) -> int:
    sim = TidbSim(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sim.request_stop)
    try:
        await sim.start()
    except (OSError, TidevoyError) as error:
        print(f"tidb_sim: {error}", file=sys.stderr)
        return 1
    ready = {"event": "ready", "sql": sim.sql_address, "status": sim.status_address}
    print(json.dumps(ready), flush=True)
    await sim.wait()
    return EXIT_VIOLATIONS if sim.node.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.tidb_sim",
        description="A strict simulated TiDB server: speaks MySQL, keeps its data in a shared MariaDB.",
        allow_abbrev=False,
    )
    for flag, parse, key, _, text in _OPTIONS:
        parser.add_argument(flag, type=parse, dest=key, default=argparse.SUPPRESS, help=f"{text} [{key}]")
    parser.add_argument("--store", help="accepted and ignored")
    parser.add_argument("--config", help="TOML file with keys as above, in brackets; others are ignored")
    parser.add_argument("--mariadb", help=f"host:port or socket path; default: ${MARIADB_VARIABLE}")
    parser.add_argument("--version", help=f"TiDB release to report; default {DEFAULT_RELEASE}")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help="label to register")
    return parser


def _settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> SimSettings:
    file = tomllib.loads(Path(flags["config"]).read_text()) if flags["config"] else {}
    defaults: dict[str, Any] = {key: default for _, _, key, default, _ in _OPTIONS}
    values = defaults | dict(_flatten(file)) | dict(flags)
    mariadb = flags["mariadb"] or environ.get(MARIADB_VARIABLE)
    if not mariadb:
        raise ValueError(f"MariaDB's address is missing; give --mariadb or set {MARIADB_VARIABLE}")
    if "/" not in mariadb:
        split(mariadb)  # Raises ValueError if it is no address.
    return SimSettings(
        rules=SessionRules(
            mariadb,
            max_connections=values["instance.max_connections"],
            tls=_sql_tls(values),
        ),
        host=values["host"],
        port=values["port"],
        status_host=values["status.status-host"],
        status_port=values["status.status-port"],
        advertise_address=values["advertise-address"],
        pd=tuple(f"http://{address}" for address in values["path"].split(",") if address),
        release=flags["version"] or DEFAULT_RELEASE,
        labels=dict(_label(text) for text in flags["label"]),
        signing_cert=values["security.session-token-signing-cert"],
        signing_key=values["security.session-token-signing-key"],
        graceful_wait=values["graceful-wait-before-shutdown"],
    )


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _sql_tls(values: Mapping[str, Any]) -> SqlTlsFiles | None:
    cert, key = values["security.ssl-cert"], values["security.ssl-key"]
    if not cert and not key:
        return None
    if not cert or not key:
        raise ValueError("TLS needs a certificate and its key; give both --tls-cert and --tls-key")
    return SqlTlsFiles(Path(cert), Path(key))


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"the label {text!r} is not KEY=VALUE")
    return key, value
