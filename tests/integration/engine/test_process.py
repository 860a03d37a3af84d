"""The operating system process of `tidevoy serve`: its resource limits."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports


async def test_serve_raises_its_descriptor_limit(tmp_path: Path, ports: Ports) -> None:
    """5,000 nodes with two checks each need more descriptors than the usual limit of 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    config = {
        "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "state_dir": str(tmp_path / "state"),
    }
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        async with ControlPlaneProcess(tmp_path, config) as control_plane:
            assert psutil.Process(control_plane.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
