#!/usr/bin/python3
"""Accepts PD's options, rejects other options, and runs etcd, which the real PD embeds."""

from __future__ import annotations

import argparse
import os
import tomllib
from pathlib import Path


def main() -> None:
    """Read PD's options, then execute etcd with PD's timings (tikv/pd server/config/config.go)."""
    parser = argparse.ArgumentParser(prog="pd-server", allow_abbrev=False)
    for option in (
        "--name",
        "--data-dir",
        "--client-urls",
        "--advertise-client-urls",
        "--peer-urls",
        "--advertise-peer-urls",
        "--initial-cluster",
        "--config",
    ):
        parser.add_argument(option, required=True)
    options = parser.parse_args()
    settings = tomllib.loads(Path(options.config).read_text())
    if set(settings) - {"replication"}:
        parser.error(f"{options.config}: unknown keys in {sorted(settings)}")
    command = [
        "etcd",
        f"--name={options.name}",
        f"--data-dir={options.data_dir}",
        f"--listen-client-urls={options.client_urls}",
        f"--advertise-client-urls={options.advertise_client_urls}",
        f"--listen-peer-urls={options.peer_urls}",
        f"--initial-advertise-peer-urls={options.advertise_peer_urls}",
        f"--initial-cluster={options.initial_cluster}",
        "--heartbeat-interval=500",
        "--election-timeout=3000",
        "--log-level=warn",
    ]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
