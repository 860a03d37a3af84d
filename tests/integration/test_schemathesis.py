"""The OpenAPI document against the real server: schemathesis tries what it says, and the opposite."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from sandbox.control_plane import ControlPlane
from sandbox.ports import Ports

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")

# Without this, the event stream is endless, as it should be.
CONFIGURATION = """
[[operations]]
include-name = "GET /v1/events"
parameters = { follow = false }
"""


@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing(tmp_path: Path, ports: Ports) -> None:
    settings = {
        "api": {"listen": f"127.0.0.1:{ports.take()}"},
        "xds": {"listen": f"127.0.0.1:{ports.take()}"},
        "state_dir": str(tmp_path / "state"),
        # The addresses of the nodes that it adds are made up: nobody is to be called there.
        "health": {"sql": {"enabled": False}, "status": {"enabled": False}},
        "nodes": [{"address": "127.0.0.1:4000"}],
        "log": {"level": "warning"},
    }
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    async with ControlPlane(tmp_path, settings) as control_plane:
        run = await asyncio.create_subprocess_exec(
            *(SCHEMATHESIS, "--config-file", "schemathesis.toml", "--no-color"),
            *("run", f"{control_plane.api}/openapi.json"),
            *(
                "--checks",
                "all",
                "--generation-deterministic",
                "--max-examples",
                "150",
                "--max-failures",
                "5",
            ),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            report, _ = await run.communicate()
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
        assert run.returncode == 0, report.decode()
        assert "15 selected / 15 total" in report.decode()
        assert "Traceback" not in control_plane.process.output()
