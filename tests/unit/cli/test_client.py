"""Credentials of requests, and responses that report an error or do not come from the REST API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx2
import pytest

from cli.client import ControlPlaneClient, ControlPlaneUnreachable, NotFound
from cli.errors import CliError, UsageError
from cli.main import run
from tests.support.controlplane.cli_process import fake_http


def test_503_without_problem_details_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn sends it above `api.limits.connections`, and a proxy while the control plane restarts."""
    responses = iter([httpx2.Response(503, text="Service Unavailable"), httpx2.Response(200, json={})])
    with ControlPlaneClient("http://127.0.0.1:3080") as client:
        monkeypatch.setattr(client._http, "request", lambda *_, **__: next(responses))
        assert client.poll("/v1/nodes") == {}
    with ControlPlaneClient("http://127.0.0.1:3080") as client:
        monkeypatch.setattr(client._http, "request", lambda *_, **__: httpx2.Response(503, text="no"))
        with pytest.raises(ControlPlaneUnreachable, match="HTTP 503"):
            client.get("/v1/nodes")


@pytest.mark.parametrize("minutes_ahead", [-10, 0, 10])
def test_server_time_is_that_of_the_control_plane(
    minutes_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    date = datetime.now(UTC) + timedelta(minutes=minutes_ahead)
    fake_http(
        monkeypatch, lambda request: httpx2.Response(200, json={}, headers={"Date": format_datetime(date)})
    )
    with ControlPlaneClient("http://127.0.0.1:3080") as client:
        client.get("/v1/nodes")
        assert abs(client.server_time - date) < timedelta(minutes=1)


@pytest.mark.parametrize("url", ["127.0.0.1:3080", "ftp://a", "http://", "https:///[", "http://[::1"])
def test_url_that_names_no_control_plane_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match="is not a control plane URL"):
        ControlPlaneClient(url)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (
            httpx2.Response(401, json={"detail": "x"}),
            CliError,
            "does not accept the token from TIDEVOY_TOKEN;",
        ),
        (httpx2.Response(404, json={"detail": "no node"}), NotFound, "^no node$"),
        (httpx2.Response(422, json={"detail": "no port"}), UsageError, "^no port$"),
        (httpx2.Response(409, json={"detail": "exists"}), CliError, "^exists$"),
        (httpx2.Response(500, text="<html>"), CliError, "answers 500, but is not a Tidevoy control plane"),
        (httpx2.Response(200, text="<html>"), CliError, "answers, but is not a Tidevoy control plane"),
        (httpx2.ReadTimeout("late"), ControlPlaneUnreachable, r"\(no answer in time\)"),
        (httpx2.ConnectError("[Errno 111] Refused"), ControlPlaneUnreachable, r"\(refused\)"),
        (
            httpx2.ConnectError("[SSL: X] certificate verify failed: certificate has expired (_ssl.c:1006)"),
            ControlPlaneUnreachable,
            "has no valid certificate .*certificate has expired.* renew it",
        ),
    ],
)
def test_errors_are_raised_by_kind(
    monkeypatch: pytest.MonkeyPatch,
    answer: httpx2.Response | Exception,
    error: type[CliError],
    message: str,
) -> None:
    fake_http(monkeypatch, lambda request: answer)
    monkeypatch.setenv("TIDEVOY_TOKEN", "t")
    with ControlPlaneClient("http://127.0.0.1:3080/") as client:
        with pytest.raises(CliError, match=message) as raised:
            client.get("/v1/nodes")
        assert type(raised.value) is error
        if isinstance(answer, Exception) or answer.is_error:
            with pytest.raises(error, match=message):
                list(client.events(after=None, follow=False))


def test_credentials_come_from_the_environment_or_from_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    requests = fake_http(monkeypatch, lambda request: {"replicas": []})
    assert run(["replicas"]) == 0
    monkeypatch.setenv("TIDEVOY_TOKEN", "first")
    monkeypatch.setenv("TIDEVOY_TOKEN_FILE", str(file))
    assert run(["replicas"]) == 0
    for invalid in ("", "two words", "\N{SNOWMAN}"):
        file.write_text(invalid)
        assert run(["--token-file", str(file), "replicas"]) == 2
    file.write_text("second\n")
    assert run(["replicas"]) == 0  # the option has removed TIDEVOY_TOKEN
    tokens = [request.headers.get("Authorization") for request in requests]
    assert tokens == [None, "Bearer first", "Bearer second"]
    for wrong in ("--cert x", "--ca /nowhere/ca.pem", "--cert /nowhere/a --key /nowhere/b"):
        assert run(["--url", "https://127.0.0.1:3080", *wrong.split(), "replicas"]) == 2
    monkeypatch.setenv("TIDEVOY_CA", "")
    fake_http(monkeypatch, lambda request: httpx2.Response(401, json={"detail": "x"}))
    assert run(["replicas"]) == 1
    assert "requires authentication" in capsys.readouterr().err
