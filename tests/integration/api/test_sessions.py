"""Live sessions, from the answers of Envoys to `GET /v1/sessions`, `DELETE /v1/sessions/{id}` and KILL."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.config.settings import DrainSettings
from controlplane.decide.kill_target import KillDecision
from controlplane.sessions import commands_pb2
from sandbox.ports import Ports
from tests.support.controlplane.api_server import (
    ApiServer,
    problem_kind,
    run_api_server,
    settings,
    stored_events,
)
from tests.support.controlplane.engine import FakeEnvoy
from tests.support.controlplane.session_module import (
    SERVICE,
    SessionModule,
    resolve,
    run_session_module,
    session_message,
)
from tests.support.controlplane.statement_reports import INSTANCE, OTHER_INSTANCE, call_module
from tests.support.waiting import wait_until

SESSIONS = (
    session_message(1, 5, 77, moves=1),
    session_message(2, 6, user="root", state="busy", text="select ?", digest=bytes(32)),
)
OTHERS = (session_message(1, 7), session_message(2, 9, 6, node="10.0.0.2:4000"))


@pytest.fixture
async def server(tmp_path: Path, ports: Ports) -> AsyncIterator[ApiServer]:
    async with run_api_server(settings(tmp_path, ports)) as server:
        yield server


async def get_sessions(server: ApiServer, **query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await server.http.get("/v1/sessions", params=query)).raise_for_status().json()
    return answer


async def wait_for_envoys(server: ApiServer, count: int) -> None:
    """Wait until the control plane knows this many Envoys."""

    async def are_known() -> bool:
        return len((await server.http.get("/v1/envoys")).json()["envoys"]) == count

    await wait_until(are_known)


async def wait_complete(server: ApiServer, envoys: int) -> None:
    """Wait until this many Envoys are known, and all of them answer."""

    async def is_complete() -> bool:
        return not (await get_sessions(server))["incomplete"]

    await wait_for_envoys(server, envoys)
    await wait_until(is_complete)


@pytest.fixture
async def modules(server: ApiServer) -> AsyncIterator[list[SessionModule]]:
    """Yield the modules of two Envoys, which answer."""
    port = server.xds_port
    async with (
        run_session_module(port, *SESSIONS) as first,
        run_session_module(port, *OTHERS, envoy="envoy-2", instance=OTHER_INSTANCE) as second,
    ):
        await wait_complete(server, 2)
        yield [first, second]


@pytest.mark.usefixtures("modules")
async def test_sessions_of_all_envoys_are_listed(server: ApiServer) -> None:
    answer = await get_sessions(server)
    assert (answer["total"], answer["incomplete"]) == (4, [])
    busy, *idle = answer["sessions"]
    assert (busy["id"], busy["user"], busy["state"], busy["text"]) == (6, "root", "busy", "select ?")
    assert (busy["envoy"], busy["seconds"], busy["digest"]) == ("envoy-1", 1.5, "00" * 32)
    assert {(session["id"], session["node_id"], session["envoy"]) for session in idle} == {
        *((5, 77, "envoy-1"), (7, 7, "envoy-2"), (9, 6, "envoy-2")),
    }
    assert [session["id"] for session in (await get_sessions(server, user="root"))["sessions"]] == [6]
    only = await get_sessions(server, envoy="envoy-2", limit=1)
    assert ([session["id"] for session in only["sessions"]], only["total"]) == ([7], 2)


async def test_missing_envoys_are_named(server: ApiServer, modules: list[SessionModule]) -> None:
    modules[1].is_incomplete = True
    (problem,) = (await get_sessions(server))["incomplete"]
    assert problem == "not all threads of the Envoy envoy-2 have answered in time"
    assert (await get_sessions(server, envoy="envoy-1"))["incomplete"] == []
    async with FakeEnvoy(server.xds_port, "plain"):
        await wait_for_envoys(server, 3)
        answer = await get_sessions(server)
        assert answer["incomplete"][-1].endswith("these Envoys do not know their sessions: plain")


async def test_envoy_that_does_not_answer_is_named_after_two_seconds(server: ApiServer) -> None:
    async with run_session_module(server.xds_port, *SESSIONS, poll_port=1):
        await wait_for_envoys(server, 1)
        started = time.monotonic()
        (problem,) = (await get_sessions(server))["incomplete"]
        assert problem.startswith("these Envoys have not answered: envoy-1 (")
        assert 1.9 < time.monotonic() - started < 4
        refused = await server.http.delete("/v1/sessions/5")
        assert (refused.status_code, problem_kind(refused)) == (503, "unavailable")


async def test_session_is_ended(server: ApiServer, modules: list[SessionModule]) -> None:
    ended = await server.http.delete("/v1/sessions/5")
    assert (ended.status_code, ended.json()["client"]) == (200, "10.1.0.1:40001")
    assert list(modules[0].sessions) == [2]
    assert list(modules[1].sessions) == [1, 2]
    (event,) = [event for event in await stored_events(server.http) if event["kind"] == "audit.end_session"]
    assert event["subject"] == "5"
    for path, status, kind in (
        ("5", 404, "unknown-session"),
        ("7?envoy=envoy-1", 404, "unknown-session"),
        ("7?envoy=x", 404, "unknown-envoy"),
        ("0", 422, "invalid-request"),
        ("x", 422, "invalid-request"),
    ):
        response = await server.http.delete(f"/v1/sessions/{path}")
        assert (response.status_code, problem_kind(response)) == (status, kind)
    assert list(modules[1].sessions) == [1, 2]


async def test_ambiguous_session_is_not_ended(server: ApiServer, modules: list[SessionModule]) -> None:
    refused = await server.http.delete("/v1/sessions/6")
    assert (refused.status_code, problem_kind(refused)) == (409, "ambiguous-session")
    detail = refused.json()["detail"]
    assert "connection 6 of 10.0.0.1:4000 (id 6 at its login)" in detail
    assert "connection 6 of 10.0.0.2:4000 (id 9 at its login)" in detail
    assert [list(module.sessions) for module in modules] == [[1, 2], [1, 2]]
    # With the Envoy, the id is not ambiguous.
    assert (await server.http.delete("/v1/sessions/6?envoy=envoy-2")).status_code == 200
    assert [list(module.sessions) for module in modules] == [[1, 2], [1]]


@pytest.mark.usefixtures("modules")
async def test_kill_is_resolved(server: ApiServer) -> None:
    port = server.xds_port
    started = time.monotonic()
    assert await resolve(port, 5) == KillDecision(node_id=77)
    assert time.monotonic() - started < 1
    assert await resolve(port, 77, OTHER_INSTANCE) == KillDecision()
    assert await resolve(port, 1 << 40) == KillDecision()
    assert "means 2 sessions" in (await resolve(port, 6)).refusal


async def test_kill_is_refused_if_an_envoy_has_disconnected(
    server: ApiServer, modules: list[SessionModule]
) -> None:
    """It may run, and have sessions. An operator can say that it has ended."""
    port = server.xds_port
    async with run_session_module(port, envoy="envoy-3", instance="e" * 16):
        await wait_complete(server, 3)
    assert "envoy-3" in (await resolve(port, 5)).refusal
    (await server.http.delete("/v1/envoys/envoy-3")).raise_for_status()
    assert await resolve(port, 5) == KillDecision(node_id=77)
    assert len(modules) == 2


async def test_answers_are_incomplete_until_envoys_have_had_time_to_reconnect(
    tmp_path: Path, ports: Ports
) -> None:
    """The session of a KILL may be on an Envoy that has not reconnected since the control plane restarted."""
    reason = "the control plane has just started, and some Envoys may not have reconnected to it yet"
    async with run_api_server(settings(tmp_path, ports, drain={"reconnect_grace": 600})) as server:
        port = server.xds_port
        async with run_session_module(port, *SESSIONS) as module:

            async def answers() -> bool:
                return bool((await get_sessions(server))["incomplete"] == [reason])

            await wait_for_envoys(server, 1)
            await wait_until(answers)
            for id_ in (5, 6, 1 << 40):
                refusal = (await resolve(port, id_)).refusal
                assert refusal.endswith(f"because {reason}; try again")
            refused = await server.http.delete("/v1/sessions/5")
            assert (refused.status_code, problem_kind(refused)) == (503, "unavailable")
            assert list(module.sessions) == [1, 2]
            server.next_settings = server.next_settings.model_copy(
                update={"drain": DrainSettings(reconnect_grace=0)}
            )
            (await server.http.post("/v1/config/reload")).raise_for_status()
            assert (await get_sessions(server))["incomplete"] == []
            assert await resolve(port, 5) == KillDecision(node_id=77)
            assert await resolve(port, 1 << 40) == KillDecision()


@pytest.mark.parametrize("method", ["Poll", "Report", "Resolve"])
async def test_calls_of_unknown_processes_are_rejected(server: ApiServer, method: str) -> None:
    for request, code in (
        (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (commands_pb2.PollRequest(instance="x"), grpc.StatusCode.INVALID_ARGUMENT),
        (commands_pb2.PollRequest(instance=INSTANCE), grpc.StatusCode.UNAVAILABLE),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await call_module(server.xds_port, f"{SERVICE}{method}", request, commands_pb2.PollResponse)
        assert rejected.value.code() is code
