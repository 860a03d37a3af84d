#!/usr/bin/python3
"""Answers health checks like Prometheus if it gets Prometheus' options, otherwise like Grafana.

Requires the mounts of the server that it replaces.
"""

from __future__ import annotations

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def _serve(port: int, path: str) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    ThreadingHTTPServer(("", port), Health).serve_forever()


def main() -> None:
    """Check that the mounts of the compose file exist and are writable where needed, then serve."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config.file", dest="config", type=Path)
    parser.add_argument("--storage.tsdb.path", dest="data", type=Path)
    parser.add_argument("--storage.tsdb.retention.time", dest="retention")
    options = parser.parse_args()
    if options.config is not None:
        assert "scrape_configs:" in options.config.read_text()
        (options.data / "written").touch()
        _serve(9090, "/-/healthy")
        return
    assert os.environ["GF_SECURITY_ADMIN_PASSWORD"]
    assert Path("/etc/grafana/provisioning/datasources/prometheus.yaml").is_file()
    json.loads(Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).read_text())
    Path("/var/lib/grafana/written").touch()
    _serve(3000, "/api/health")


if __name__ == "__main__":
    main()
