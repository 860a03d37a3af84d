#!/usr/bin/python3
"""Accepts TiKV's options, serves its status port, and runs the MariaDB that simulated TiDB servers share."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_SQL_PORT = 3306


class _Status(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_known_path = self.path in ("/status", "/metrics")
        self.send_response(200 if is_known_path and _store_greets() else 503 if is_known_path else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def _store_greets() -> bool:
    try:
        with socket.create_connection(("127.0.0.1", _SQL_PORT), timeout=1.0) as probe:
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


def main() -> int:
    """Serve until SIGTERM, or until MariaDB ends."""
    options = _options()
    data = Path(options.data_dir) / "mariadb"
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
    store = subprocess.Popen(
        [
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
    )
    signal.signal(signal.SIGTERM, lambda *_: store.terminate())
    host, _, port = options.status_addr.rpartition(":")
    status = ThreadingHTTPServer((host, int(port)), _Status)
    threading.Thread(target=status.serve_forever, daemon=True).start()
    return store.wait()


if __name__ == "__main__":
    sys.exit(main())
