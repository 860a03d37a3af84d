"""A session with a control plane that asks who is calling, by its command line; and what it left written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import trustme
import yaml

from api.auth.credentials import sha256
from sandbox.control_plane import ControlPlaneProcess
from sandbox.ports import Ports
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
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ControlPlaneProcess]:
    settings = minimal_configuration(tmp_path, ports, NODE)
    settings["api"]["tokens"] = TOKENS
    async with ControlPlaneProcess(tmp_path, settings) as plane:
        yield plane


async def call(plane: ControlPlaneProcess, *arguments: str, **environ: str) -> CliResult:
    return await wait_for_result(await start_tidevoy(plane.api_url, *arguments, **environ))


async def test_the_command_line_shows_a_token(plane: ControlPlaneProcess, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OPERATOR_TOKEN}\n")
    assert (await call(plane, "drain", NODE, TIDEVOY_TOKEN=OPERATOR_TOKEN)).exit_code == 0
    assert (await call(plane, "undrain", NODE, TIDEVOY_TOKEN_FILE=str(file))).exit_code == 0
    assert (await call(plane, "--token-file", str(file), "nodes", TIDEVOY_TOKEN=UNKNOWN_TOKEN)).exit_code == 0
    assert (await call(plane, "nodes", TIDEVOY_TOKEN=VIEWER_TOKEN)).exit_code == 0


@pytest.mark.parametrize(
    ("environ", "arguments", "code", "told"),
    [
        ({}, ("nodes",), 1, "asks who is calling; put a token into TIDEVOY_TOKEN"),
        (
            {"TIDEVOY_TOKEN": UNKNOWN_TOKEN},
            ("nodes",),
            1,
            "does not know the token of TIDEVOY_TOKEN; ask for one",
        ),
        (
            {"TIDEVOY_TOKEN": UNKNOWN_TOKEN},
            ("events",),
            1,
            "does not know the token of TIDEVOY_TOKEN; ask for one",
        ),
        (
            {"TIDEVOY_TOKEN": VIEWER_TOKEN},
            ("drain", NODE),
            1,
            "vera is a viewer, and may only read; ask for a token",
        ),
        ({"TIDEVOY_TOKEN": "a b"}, ("nodes",), 2, "what TIDEVOY_TOKEN gives is no token"),
        ({"TIDEVOY_TOKEN_FILE": "/nowhere"}, ("nodes",), 2, "TIDEVOY_TOKEN_FILE: /nowhere cannot be read"),
        ({}, ("--token-file", "/dev/null", "nodes"), 2, "TIDEVOY_TOKEN_FILE: /dev/null is empty"),
    ],
)
async def test_why_a_command_was_refused(
    plane: ControlPlaneProcess, environ: dict[str, str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    outcome = await call(plane, *arguments, **environ)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr.count("\n")) == (code, "", 1)
    assert told in outcome.stderr
    assert not any(token in outcome.stderr for token in (OPERATOR_TOKEN, VIEWER_TOKEN, UNKNOWN_TOKEN))


async def test_the_command_line_shows_a_certificate(tmp_path: Path, ports: Ports) -> None:
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("ops.example")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name, leaf in (("server", server), ("client", client)):
        leaf.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    settings = minimal_configuration(tmp_path, ports, NODE)
    settings["api"] |= {
        "tls": {f"{what}": f"{tmp_path}/server.{end}" for what, end in (("cert", "pem"), ("key", "key"))}
        | {"client_ca": f"{tmp_path}/ca.pem"},
        "clients": [{"name": "ops.example", "role": "operator"}],
        "tokens": TOKENS,
    }
    file = tmp_path / "secure.yaml"
    file.write_text(yaml.safe_dump(settings))
    serving = await start_tidevoy("", "serve", "--config", str(file))
    try:
        url, files = f"https://{settings['api']['listen']}", ("ca.pem", "client.pem", "client.key")
        ca_file, cert, key = (str(tmp_path / name) for name in files)

        async def answers() -> bool:
            outcome = await wait_for_result(
                await start_tidevoy(url, "--ca", ca_file, "--cert", cert, "--key", key, "drain", NODE)
            )
            return outcome.exit_code == 0

        await wait_until(answers)
        unknown = await wait_for_result(await start_tidevoy(url, "nodes", TIDEVOY_TOKEN=VIEWER_TOKEN))
        assert unknown.exit_code == 1
        assert "certificate verify failed" in unknown.stderr
        assert (
            await wait_for_result(
                await start_tidevoy(url, "nodes", TIDEVOY_CA=ca_file, TIDEVOY_TOKEN=VIEWER_TOKEN)
            )
        ).exit_code == 0
        half = await wait_for_result(await start_tidevoy(url, "--cert", cert, "nodes", TIDEVOY_CA=ca_file))
        assert (half.exit_code, half.stderr) == (
            2,
            "tidevoy: TIDEVOY_CERT and TIDEVOY_KEY (--cert and --key) go together\n",
        )
    finally:
        serving.terminate()
        ended = await wait_for_result(serving)
    assert ended.exit_code == 0
    assert "Traceback" not in ended.stderr


async def test_a_token_is_made(tmp_path: Path) -> None:
    async def create(*arguments: str) -> CliResult:
        return await wait_for_result(await start_tidevoy("", "token", "create", "--name", "anna", *arguments))

    made = json.loads((await create("--role", "viewer", "--json")).stdout)
    assert sha256(made["token"].encode()) == made["sha256"]
    shown = (await create("--role", "operator")).stdout
    configured = yaml.safe_load(shown.partition("# The token")[0])
    token = shown.splitlines()[-1]
    assert configured["api"]["tokens"] == [
        {"name": "anna", "role": "operator", "sha256": sha256(token.encode())}
    ]
    file = tmp_path / "token"
    quiet = await create("--role", "operator", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().strip() not in quiet.stdout + quiet.stderr
    again = await create("--role", "operator", "--file", str(file))
    assert (again.exit_code, again.stderr) == (2, f"tidevoy: {file} is there already; name a new file\n")
    assert (await create("--role", "owner")).exit_code == 2
    assert (await create()).exit_code == 2


async def test_nothing_secret_is_written_anywhere(plane: ControlPlaneProcess, tmp_path: Path) -> None:
    """Every kind of call, right and wrong; then the log, events, settings, state and answers are searched."""
    answers: list[str] = []
    async with httpx2.AsyncClient(base_url=plane.api_url, trust_env=False) as http:
        for token in (OPERATOR_TOKEN, VIEWER_TOKEN, UNKNOWN_TOKEN):
            for headers in (
                bearer_header(token),
                {"cookie": f"tidevoy_token={token}", "origin": plane.api_url},
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
                    answer = await http.request(
                        method, path, headers={**headers, "last-event-id": "0"}, content=None
                    )
                    if token not in path:  # else it may repeat what its caller wrote there
                        answers.append(answer.text)
            login = await http.post("/login", data={"token": token}, headers={"origin": plane.api_url})
            answers.append(login.text + login.headers["location"])
            http.cookies.clear()
        shown = await http.get(
            "/v1/events?follow=false", headers={**bearer_header(VIEWER_TOKEN), "last-event-id": "0"}
        )
    told = await call(plane, "config", "show", TIDEVOY_TOKEN=VIEWER_TOKEN)
    assert "'**********'" in told.stdout
    outputs = [*answers, shown.text, told.stdout, told.stderr, plane.process.output()]
    outputs += [
        path.read_text(errors="replace") for path in (tmp_path / "state").rglob("*") if path.is_file()
    ]
    secrets = [OPERATOR_TOKEN, VIEWER_TOKEN, *(str(token["sha256"]) for token in TOKENS)]
    for text in outputs:
        assert not [secret for secret in secrets if secret in text]
