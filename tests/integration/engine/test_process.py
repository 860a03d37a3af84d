"""The process around the engine: what `tidevoy serve` asks of the system."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports


async def test_serve_takes_all_descriptors_that_it_may_have(tmp_path: Path, ports: Ports) -> None:
    """5,000 nodes with two checks each need more than the 1,024 that a shell often gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = {
        "api": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "state_dir": str(tmp_path / "state"),
    }
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        async with ControlPlaneProcess(tmp_path, wanted) as plane:
            assert psutil.Process(plane.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
