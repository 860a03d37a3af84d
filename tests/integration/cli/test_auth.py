"""The CLI with a control plane that requires authentication. No secret appears in logs or responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
import yaml

from api.auth.credentials import sha256
from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
from sandbox.server import http_client
from tests.support.controlplane.authenticated_api import (
    OPERATOR_TOKEN,
    TOKENS,
    UNKNOWN_TOKEN,
    VIEWER_TOKEN,
    bearer_header,
)
from tests.support.controlplane.cli_process import (
    CliResult,
    minimal_configuration,
    start_tidevoy,
    wait_for_result,
)
from tests.support.waiting import wait_until

NODE = "127.0.0.1:4000"


@pytest.fixture
async def control_plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ControlPlaneProcess]:
    settings = minimal_configuration(tmp_path, ports, NODE)
    settings["api"]["tokens"] = TOKENS
    async with ControlPlaneProcess(tmp_path, settings) as control_plane:
        yield control_plane


async def run_command(control_plane: ControlPlaneProcess, *arguments: str, **environ: str) -> CliResult:
    return await wait_for_result(await start_tidevoy(control_plane.api_url, *arguments, **environ))


async def test_cli_authenticates_with_a_token(control_plane: ControlPlaneProcess, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OPERATOR_TOKEN}\n")
    assert (await run_command(control_plane, "drain", NODE, TIDEVOY_TOKEN=OPERATOR_TOKEN)).exit_code == 0
    assert (await run_command(control_plane, "undrain", NODE, TIDEVOY_TOKEN_FILE=str(file))).exit_code == 0
    assert (
        await run_command(control_plane, "--token-file", str(file), "nodes", TIDEVOY_TOKEN=UNKNOWN_TOKEN)
    ).exit_code == 0
    assert (await run_command(control_plane, "nodes", TIDEVOY_TOKEN=VIEWER_TOKEN)).exit_code == 0


@pytest.mark.parametrize(
    ("environ", "arguments", "code", "message"),
    [
        ({}, ("nodes",), 1, "requires authentication; set TIDEVOY_TOKEN to a token"),
        (
            {"TIDEVOY_TOKEN": UNKNOWN_TOKEN},
            ("nodes",),
            1,
            "does not accept the token from TIDEVOY_TOKEN; use a configured token",
        ),
        (
            {"TIDEVOY_TOKEN": UNKNOWN_TOKEN},
            ("events",),
            1,
            "does not accept the token from TIDEVOY_TOKEN; use a configured token",
        ),
        (
            {"TIDEVOY_TOKEN": VIEWER_TOKEN},
            ("drain", NODE),
            1,
            "vera is a viewer and may only read; use a token",
        ),
        ({"TIDEVOY_TOKEN": "a b"}, ("nodes",), 2, "TIDEVOY_TOKEN does not hold a valid token"),
        ({"TIDEVOY_TOKEN_FILE": "/nowhere"}, ("nodes",), 2, "TIDEVOY_TOKEN_FILE: /nowhere cannot be read"),
        ({}, ("--token-file", "/dev/null", "nodes"), 2, "TIDEVOY_TOKEN_FILE: /dev/null is empty"),
    ],
)
async def test_rejected_command_reports_the_reason(
    control_plane: ControlPlaneProcess,
    environ: dict[str, str],
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    outcome = await run_command(control_plane, *arguments, **environ)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (code, "", 1)
    assert message in outcome.stderr
    assert not any(token in outcome.stderr for token in (OPERATOR_TOKEN, VIEWER_TOKEN, UNKNOWN_TOKEN))


async def test_cli_authenticates_with_a_certificate(tmp_path: Path, ports: Ports) -> None:
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("ops.example")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name, leaf in (("server", server), ("client", client)):
        leaf.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    settings = minimal_configuration(tmp_path, ports, NODE)
    settings["api"] |= {
        "tls": {key: f"{tmp_path}/server.{suffix}" for key, suffix in (("cert", "pem"), ("key", "key"))}
        | {"client_ca": f"{tmp_path}/ca.pem"},
        "clients": [{"name": "ops.example", "role": "operator"}],
        "tokens": TOKENS,
    }
    file = tmp_path / "secure.yaml"
    file.write_text(yaml.safe_dump(settings))
    server_process = await start_tidevoy("", "serve", "--config", str(file))
    try:
        url, files = f"https://{settings['api']['listen']}", ("ca.pem", "client.pem", "client.key")
        ca_file, cert, key = (str(tmp_path / name) for name in files)

        async def drain_succeeds() -> bool:
            outcome = await wait_for_result(
                await start_tidevoy(url, "--ca", ca_file, "--cert", cert, "--key", key, "drain", NODE)
            )
            return outcome.exit_code == 0

        await wait_until(drain_succeeds)
        without_ca = await wait_for_result(await start_tidevoy(url, "nodes", TIDEVOY_TOKEN=VIEWER_TOKEN))
        assert without_ca.exit_code == 1
        assert "certificate verify failed" in without_ca.stderr
        assert (
            await wait_for_result(
                await start_tidevoy(url, "nodes", TIDEVOY_CA=ca_file, TIDEVOY_TOKEN=VIEWER_TOKEN)
            )
        ).exit_code == 0
        without_key = await wait_for_result(
            await start_tidevoy(url, "--cert", cert, "nodes", TIDEVOY_CA=ca_file)
        )
        assert (without_key.exit_code, without_key.stderr) == (
            2,
            "tidevoy: TIDEVOY_CERT and TIDEVOY_KEY (--cert and --key) must be set together\n",
        )
    finally:
        server_process.terminate()
        server_result = await wait_for_result(server_process)
    assert server_result.exit_code == 0
    assert "Traceback" not in server_result.stderr


async def test_creates_a_token(tmp_path: Path) -> None:
    async def create(*arguments: str) -> CliResult:
        return await wait_for_result(await start_tidevoy("", "token", "create", "--name", "anna", *arguments))

    created = json.loads((await create("--role", "viewer", "--json")).stdout)
    assert sha256(created["token"].encode()) == created["sha256"]
    output = (await create("--role", "operator")).stdout
    configured = yaml.safe_load(output.partition("# The token")[0])
    token = output.splitlines()[-1]
    assert configured["api"]["tokens"] == [
        {"name": "anna", "role": "operator", "sha256": sha256(token.encode())}
    ]
    file = tmp_path / "token"
    result = await create("--role", "operator", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().strip() not in result.stdout + result.stderr
    repeated = await create("--role", "operator", "--file", str(file))
    assert (repeated.exit_code, repeated.stderr) == (2, f"tidevoy: {file} already exists; name a new file\n")
    assert (await create("--role", "owner")).exit_code == 2
    assert (await create()).exit_code == 2


async def test_secrets_do_not_leak(control_plane: ControlPlaneProcess, tmp_path: Path) -> None:
    """Make every kind of call, then search the log, events, settings, state and responses for secrets."""
    responses: list[str] = []
    async with http_client(control_plane.api_url) as http:
        for token in (OPERATOR_TOKEN, VIEWER_TOKEN, UNKNOWN_TOKEN):
            for headers in (
                bearer_header(token),
                {"cookie": f"tidevoy_token={token}", "origin": control_plane.api_url},
            ):
                for method, path in (
                    ("GET", "/v1/config"),
                    ("GET", "/openapi.json"),
                    ("GET", "/metrics"),
                    ("GET", f"/v1/nodes?token={token}"),
                    ("GET", "/v1/events?follow=false"),
                    ("POST", f"/v1/nodes/{NODE}/drain"),
                    ("POST", "/v1/config/reload"),
                    ("POST", f"/v1/nodes/{token}/drain"),
                ):
                    response = await http.request(
                        method, path, headers={**headers, "last-event-id": "0"}, content=None
                    )
                    if token not in path:  # otherwise the response may quote the path
                        responses.append(response.text)
            login = await http.post(
                "/login", data={"token": token}, headers={"origin": control_plane.api_url}
            )
            responses.append(login.text + login.headers["location"])
            http.cookies.clear()
        events = await http.get(
            "/v1/events?follow=false", headers={**bearer_header(VIEWER_TOKEN), "last-event-id": "0"}
        )
    config = await run_command(control_plane, "config", "show", TIDEVOY_TOKEN=VIEWER_TOKEN)
    assert "'**********'" in config.stdout
    outputs = [*responses, events.text, config.stdout, config.stderr, control_plane.process.output()]
    outputs += [
        path.read_text(errors="replace") for path in (tmp_path / "state").rglob("*") if path.is_file()
    ]
    secrets = [OPERATOR_TOKEN, VIEWER_TOKEN, *(str(token["sha256"]) for token in TOKENS)]
    for text in outputs:
        assert not [secret for secret in secrets if secret in text]
