"""Schemathesis checks a running server against its OpenAPI document, with valid and invalid requests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx2
import pytest

from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from tests.support.controlplane.authenticated_api import OPERATOR_TOKEN, TOKENS, bearer_header

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")

# With `follow = true`, the response of `GET /v1/events` would never end.
CONFIGURATION = """
[[operations]]
include-name = "GET /v1/events"
parameters = { follow = false }
# Undeclared headers do not make a request invalid.
generation = { allow-extra-parameters = false }

# A removed node is drained first (202), and exists until it is drained.
[[operations]]
include-name = "GET /v1/nodes/{address}"
checks = { use_after_free = { enabled = false } }
[[operations]]
include-name = "PATCH /v1/nodes/{address}"
checks = { use_after_free = { enabled = false } }

# A schema cannot say what a regular expression or the name of a table is. And rules are read like settings,
# which may be numbers in quotes.
[[operations]]
include-path = ["/v1/rules", "/v1/rules/check"]
checks = { positive_data_acceptance = { enabled = false }, negative_data_rejection = { enabled = false } }
"""


# schemathesis sends wrong tokens on purpose. With this limit, it always gets 401 and never 429.
_UNREACHABLE_LIMITS = {"unauthenticated_requests_per_second": 100_000}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tokens", "examples"), [([], 40), (TOKENS, 10)], ids=["open", "with tokens"])
async def test_schemathesis_finds_no_failures(
    tmp_path: Path, ports: Ports, tokens: list[dict[str, str]], examples: int
) -> None:
    settings = {
        "api": {
            "listen": f"127.0.0.1:{ports.allocate()}",
            "tokens": tokens,
            "limits": _UNREACHABLE_LIMITS,
        },
        "xds": {"listen": f"127.0.0.1:{ports.allocate()}"},
        "state_dir": str(tmp_path / "state"),
        # Schemathesis adds nodes with invented addresses, which must not be probed.
        "health": {"sql": {"enabled": False}, "status": {"enabled": False}},
        "nodes": [{"address": "127.0.0.1:4000"}],
        "capture": {"directory": "/nowhere"},
        # Within this time of the start, DELETE /v1/sessions/{id} answers 503.
        "drain": {"reconnect_grace": 0},
        "log": {"level": "warning"},
    }
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    async with ControlPlaneProcess(tmp_path, settings) as control_plane:
        process = await asyncio.create_subprocess_exec(
            *(SCHEMATHESIS, "--config-file", "schemathesis.toml", "--no-color"),
            *("run", f"{control_plane.api_url}/openapi.json"),
            *(("--header", f"Authorization: Bearer {OPERATOR_TOKEN}") if tokens else ()),
            *(
                "--generation-deterministic",
                "--max-examples",
                str(examples),
                "--max-failures",
                "5",
            ),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            report, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, report.decode()
        document = httpx2.get(
            f"{control_plane.api_url}/openapi.json", headers=bearer_header(OPERATOR_TOKEN), trust_env=False
        )
        paths = document.json()["paths"]
        count = sum(map(len, paths.values()))
        assert count >= 21
        assert f"{count} selected / {count} total" in report.decode()
        assert "Traceback" not in control_plane.process.output()
