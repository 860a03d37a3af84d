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
from sandbox.control_plane import ControlPlane
from sandbox.ports import Ports
from tests.support.controlplane.authenticated_api import OPERATOR, STRANGER, TOKENS, VIEWER, bearer
from tests.support.controlplane.cli_process import Outcome, configuration, finish, start
from tests.support.waiting import until

NODE = "127.0.0.1:4000"


@pytest.fixture
async def plane(tmp_path: Path, ports: Ports) -> AsyncIterator[ControlPlane]:
    settings = configuration(tmp_path, ports, NODE)
    settings["api"]["tokens"] = TOKENS
    async with ControlPlane(tmp_path, settings) as plane:
        yield plane


async def call(plane: ControlPlane, *arguments: str, **environ: str) -> Outcome:
    return await finish(await start(plane.api, *arguments, **environ))


async def test_the_command_line_shows_a_token(plane: ControlPlane, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OPERATOR}\n")
    assert (await call(plane, "drain", NODE, TIDEVOY_TOKEN=OPERATOR)).code == 0
    assert (await call(plane, "undrain", NODE, TIDEVOY_TOKEN_FILE=str(file))).code == 0
    assert (await call(plane, "--token-file", str(file), "nodes", TIDEVOY_TOKEN=STRANGER)).code == 0
    assert (await call(plane, "nodes", TIDEVOY_TOKEN=VIEWER)).code == 0


@pytest.mark.parametrize(
    ("environ", "arguments", "code", "told"),
    [
        ({}, ("nodes",), 1, "asks who is calling; put a token into TIDEVOY_TOKEN"),
        ({"TIDEVOY_TOKEN": STRANGER}, ("nodes",), 1, "does not know the token of TIDEVOY_TOKEN; ask for one"),
        (
            {"TIDEVOY_TOKEN": STRANGER},
            ("events",),
            1,
            "does not know the token of TIDEVOY_TOKEN; ask for one",
        ),
        (
            {"TIDEVOY_TOKEN": VIEWER},
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
    plane: ControlPlane, environ: dict[str, str], arguments: tuple[str, ...], code: int, told: str
) -> None:
    outcome = await call(plane, *arguments, **environ)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (code, "", 1)
    assert told in outcome.err
    assert not any(token in outcome.err for token in (OPERATOR, VIEWER, STRANGER))


async def test_the_command_line_shows_a_certificate(tmp_path: Path, ports: Ports) -> None:
    ca = trustme.CA()
    server, client = ca.issue_cert("127.0.0.1"), ca.issue_cert("ops.example")
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    for name, leaf in (("server", server), ("client", client)):
        leaf.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    settings = configuration(tmp_path, ports, NODE)
    settings["api"] |= {
        "tls": {f"{what}": f"{tmp_path}/server.{end}" for what, end in (("cert", "pem"), ("key", "key"))}
        | {"client_ca": f"{tmp_path}/ca.pem"},
        "clients": [{"name": "ops.example", "role": "operator"}],
        "tokens": TOKENS,
    }
    file = tmp_path / "secure.yaml"
    file.write_text(yaml.safe_dump(settings))
    serving = await start("", "serve", "--config", str(file))
    try:
        url, files = f"https://{settings['api']['listen']}", ("ca.pem", "client.pem", "client.key")
        ca_file, cert, key = (str(tmp_path / name) for name in files)

        async def answers() -> bool:
            outcome = await finish(
                await start(url, "--ca", ca_file, "--cert", cert, "--key", key, "drain", NODE)
            )
            return outcome.code == 0

        await until(answers)
        unknown = await finish(await start(url, "nodes", TIDEVOY_TOKEN=VIEWER))
        assert unknown.code == 1
        assert "certificate verify failed" in unknown.err
        assert (await finish(await start(url, "nodes", TIDEVOY_CA=ca_file, TIDEVOY_TOKEN=VIEWER))).code == 0
        half = await finish(await start(url, "--cert", cert, "nodes", TIDEVOY_CA=ca_file))
        assert (half.code, half.err) == (
            2,
            "tidevoy: TIDEVOY_CERT and TIDEVOY_KEY (--cert and --key) go together\n",
        )
    finally:
        serving.terminate()
        ended = await finish(serving)
    assert ended.code == 0
    assert "Traceback" not in ended.err


async def test_a_token_is_made(tmp_path: Path) -> None:
    async def create(*arguments: str) -> Outcome:
        return await finish(await start("", "token", "create", "--name", "anna", *arguments))

    made = json.loads((await create("--role", "viewer", "--json")).out)
    assert sha256(made["token"].encode()) == made["sha256"]
    shown = (await create("--role", "operator")).out
    configured = yaml.safe_load(shown.partition("# The token")[0])
    token = shown.splitlines()[-1]
    assert configured["api"]["tokens"] == [
        {"name": "anna", "role": "operator", "sha256": sha256(token.encode())}
    ]
    file = tmp_path / "token"
    quiet = await create("--role", "operator", "--file", str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().strip() not in quiet.out + quiet.err
    again = await create("--role", "operator", "--file", str(file))
    assert (again.code, again.err) == (2, f"tidevoy: {file} is there already; name a new file\n")
    assert (await create("--role", "owner")).code == 2
    assert (await create()).code == 2


async def test_nothing_secret_is_written_anywhere(plane: ControlPlane, tmp_path: Path) -> None:
    """Every kind of call, right and wrong; then the log, events, settings, state and answers are searched."""
    answers: list[str] = []
    async with httpx2.AsyncClient(base_url=plane.api, trust_env=False) as http:
        for token in (OPERATOR, VIEWER, STRANGER):
            for headers in (bearer(token), {"cookie": f"tidevoy_token={token}", "origin": plane.api}):
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
            login = await http.post("/login", data={"token": token}, headers={"origin": plane.api})
            answers.append(login.text + login.headers["location"])
            http.cookies.clear()
        shown = await http.get("/v1/events?follow=false", headers={**bearer(VIEWER), "last-event-id": "0"})
    told = await call(plane, "config", "show", TIDEVOY_TOKEN=VIEWER)
    assert "'**********'" in told.out
    outputs = [*answers, shown.text, told.out, told.err, plane.process.output()]
    outputs += [
        path.read_text(errors="replace") for path in (tmp_path / "state").rglob("*") if path.is_file()
    ]
    secrets = [OPERATOR, VIEWER, *(str(token["sha256"]) for token in TOKENS)]
    for text in outputs:
        assert not [secret for secret in secrets if secret in text]
