#!/usr/bin/python3
"""Accepts TiKV's options, serves its status port, and runs a store.

The store is the command in /store.json. Without this file, it is the MariaDB that simulated TiDB servers
share.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_SQL_PORT = 3306
_OTHER_STORE = Path("/store.json")
"""The command of a store without a status page, with the placeholders of sandbox/tidb_binaries.py."""


class _Status(BaseHTTPRequestHandler):
    store: tuple[str, int]

    def do_GET(self) -> None:
        is_known_path = self.path in ("/status", "/metrics")
        self.send_response(200 if is_known_path and self._store_greets() else 503 if is_known_path else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _store_greets(self) -> bool:
        # MariaDB and a gRPC server (its SETTINGS frame) write first.
        try:
            with socket.create_connection(self.store, timeout=1.0) as probe:
                return probe.recv(1) != b""
        except OSError:
            return False


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tikv-server", allow_abbrev=False)
    for option in (
        "--addr",
        "--advertise-addr",
        "--status-addr",
        "--advertise-status-addr",
        "--data-dir",
        "--pd",
        "--config",
    ):
        parser.add_argument(option, required=True)
    options = parser.parse_args()
    settings = tomllib.loads(Path(options.config).read_text())
    if set(settings) - {"storage"}:
        parser.error(f"{options.config}: unknown keys in {sorted(settings)}")
    return options


def _mariadb_command(data: Path) -> list[str]:
    """Return MariaDB's command. Create its data if there is none."""
    common = ["--no-defaults", "--user=root", f"--datadir={data}"]
    if not data.exists():
        install = [
            "mariadb-install-db",
            *common,
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        ]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    allow = Path("/tmp/allow.sql")
    # The simulated TiDB server runs the other setup statements, but has to log in first.
    allow.write_text("CREATE USER IF NOT EXISTS root@'%';\nGRANT ALL ON *.* TO root@'%' WITH GRANT OPTION;\n")
    return [
        "mariadbd",
        *common,
        "--skip-name-resolve",
        f"--port={_SQL_PORT}",
        "--socket=/tmp/mariadb.sock",
        "--bind-address=0.0.0.0",
        "--max-connections=2000",
        "--log-warnings=1",
        f"--init-file={allow}",
    ]


def _other_store_command(options: argparse.Namespace) -> list[str]:
    # Such a store registers the address on which it listens, so that must not be 0.0.0.0.
    values = {
        "address": options.advertise_addr,
        "status_address": options.advertise_status_addr,
        "pd": options.pd,
        "data": f"{options.data_dir}/store",
        "log": "/dev/stderr",
        "config": options.config,
    }
    return [word.format(**values) for word in json.loads(_OTHER_STORE.read_text())]


def main() -> int:
    """Serve until SIGTERM, or until the store ends."""
    options = _options()
    if _OTHER_STORE.exists():
        command = _other_store_command(options)
        store_host, _, store_port = options.advertise_addr.rpartition(":")
        _Status.store = (store_host, int(store_port))
    else:
        command = _mariadb_command(Path(options.data_dir) / "mariadb")
        _Status.store = ("127.0.0.1", _SQL_PORT)
    store = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: store.terminate())
    host, _, port = options.status_addr.rpartition(":")
    status = ThreadingHTTPServer((host, int(port)), _Status)
    threading.Thread(target=status.serve_forever, daemon=True).start()
    return store.wait()


if __name__ == "__main__":
    sys.exit(main())
