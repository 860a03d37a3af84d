"""`/v1/rollouts` over HTTP against a running control plane and a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from controlplane.model.rollout import RolloutPhase
from sandbox.etcd import Etcd
from sandbox.ports import Ports
from tests.support.controlplane.api_server import (
    PROBLEM_MEDIA_TYPE,
    ApiServer,
    problem_kind,
    run_api_server,
    settings,
)
from tests.support.controlplane.registered_nodes import (
    FAST_ROLLOUT,
    SQL_CHECKS_ONLY,
    RegisteredNode,
    registered_node,
)
from tests.support.waiting import wait_until

ACTIONS = {
    "succeed": {"command": ["/bin/true"]},
    "fail": {"command": ["/bin/sh", "-c", "echo no disk; exit 3"]},
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(etcd: Etcd) -> AsyncIterator[list[RegisteredNode]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(registered_node(etcd, f"zone-{index}")) for index in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    async with Etcd.start(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_api_server(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, nodes: list[RegisteredNode]
) -> AsyncIterator[ApiServer]:
    with Ports() as ports:
        server_settings = settings(
            tmp_path_factory.mktemp("server"),
            ports,
            pd={"urls": [etcd.url]},
            health=SQL_CHECKS_ONLY,
            balance={"slow_start": 0},
            rollouts={"actions": ACTIONS},
        )
        async with run_api_server(server_settings) as api_server:
            yield api_server


@pytest_asyncio.fixture(loop_scope="module")
async def server(module_api_server: ApiServer, nodes: list[RegisteredNode]) -> AsyncIterator[ApiServer]:
    """Yield the server once all nodes are active. After the test, abort its rollouts."""

    async def all_active() -> bool:
        listed = (await module_api_server.http.get("/v1/nodes")).json()["nodes"]
        return [node["state"] for node in listed] == ["active"] * len(nodes)

    await wait_until(all_active)
    yield module_api_server
    for rollout in await list_rollouts(module_api_server):
        if not is_over(rollout):
            # The abort is rejected if the rollout has just ended.
            await module_api_server.http.post(f"/v1/rollouts/{rollout['id']}/abort")
            await wait_for_rollout(module_api_server, rollout["id"], is_over)


def is_over(rollout: dict[str, Any]) -> bool:
    return RolloutPhase(rollout["phase"]).is_over


async def list_rollouts(server: ApiServer) -> list[dict[str, Any]]:
    rollouts: list[dict[str, Any]] = (await server.http.get("/v1/rollouts")).json()["rollouts"]
    return rollouts


async def post_rollout(server: ApiServer, **spec: Any) -> Any:
    return await server.http.post("/v1/rollouts", json={**FAST_ROLLOUT, **spec})


async def start_rollout(server: ApiServer, **spec: Any) -> str:
    """Start a rollout and return its id."""
    response = await post_rollout(server, **spec)
    assert response.status_code == 201, response.text
    rollout_id: str = response.json()["id"]
    return rollout_id


async def wait_for_rollout(
    server: ApiServer, rollout_id: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the condition holds for the rollout, and return the rollout."""
    rollout: dict[str, Any] = {}

    async def refresh() -> bool:
        rollout.update((await server.http.get(f"/v1/rollouts/{rollout_id}")).raise_for_status().json())
        return condition(rollout)

    try:
        await wait_until(refresh)
    except TimeoutError:
        raise AssertionError(rollout) from None
    return rollout


def stage(rollout: dict[str, Any], address: str) -> str:
    (step_stage,) = [step["stage"] for step in rollout["steps"] if step["address"] == address]
    return str(step_stage)


async def test_dry_run_returns_the_plan_and_starts_nothing(
    server: ApiServer, nodes: list[RegisteredNode]
) -> None:
    before = await list_rollouts(server)
    selector = f"{nodes[2].address},{nodes[0].address}"
    response = await post_rollout(server, nodes=selector, action="succeed", version="v8.5.4", dry_run=True)
    assert response.status_code == 200, response.text
    preflight = response.json()
    assert set(preflight) == {"spec", "problems", "problems_despite_force", "warnings"}
    assert preflight["spec"] == {
        "selector": selector,
        "nodes": [nodes[2].address, nodes[0].address],
        "action": "succeed",
        "max_unavailable": 1,
        "drain_deadline_seconds": 1,
        "on_deadline": "keep",
        "return_deadline_seconds": 15,
        "healthy_for_seconds": 0,
        "version": "v8.5.4",
        "failure_budget": 0,
        "verify": "",
        "verify_ratio": 1.5,
    }
    assert (preflight["problems"], preflight["problems_despite_force"]) == ([], [])
    assert await list_rollouts(server) == before
    assert (await server.node(nodes[2].address))["drain"] is None


async def test_rollout_runs_from_start_to_done(server: ApiServer, nodes: list[RegisteredNode]) -> None:
    started = await post_rollout(server, nodes="zone=zone-1", version="v8.5.4")
    assert started.status_code == 201
    rollout = started.json()
    assert set(rollout) == {
        *("id", "phase", "reason", "since", "created_by", "created_at", "ended_at", "forced"),
        *("spec", "steps"),
    }
    assert started.headers["location"] == f"/v1/rollouts/{rollout['id']}"
    assert (rollout["created_by"], rollout["forced"], rollout["ended_at"]) == ("anonymous", False, None)
    assert datetime.fromisoformat(rollout["created_at"]).utcoffset() == timedelta(0)
    (step,) = rollout["steps"]
    assert set(step) == {
        *("address", "stage", "reason", "since", "drain_requested_at", "ended_at", "drained_by_rollout"),
        *("attempts", "interrupted", "started_before", "version_before", "version_after"),
        *("sessions", "migrated_sessions", "failed_migrations", "terminated_sessions", "verification"),
    }
    node = nodes[1]
    waiting = await wait_for_rollout(
        server, rollout["id"], lambda latest: stage(latest, node.address) == "returning"
    )
    assert waiting["steps"][0]["drained_by_rollout"] is True
    assert (await server.node(node.address))["drain"] is not None
    await node.restart("v8.5.4")
    done = await wait_for_rollout(server, rollout["id"], lambda latest: latest["phase"] == "done")
    assert (done["steps"][0]["version_before"], done["steps"][0]["version_after"]) == ("v8.5.3", "v8.5.4")
    assert (await server.node(node.address))["drain"] is None
    resumed = await server.http.post(f"/v1/rollouts/{rollout['id']}/resume")
    assert (resumed.status_code, resumed.headers["content-type"]) == (409, PROBLEM_MEDIA_TYPE)
    assert resumed.json()["type"] == "urn:tidevoy:problem:rollout-precondition-failed"
    assert resumed.json()["reasons"] == ["it is done"]


async def test_pause_resume_and_abort(server: ApiServer, nodes: list[RegisteredNode]) -> None:
    first = nodes[0].address
    rollout_id = await start_rollout(server, nodes=f"{first},{nodes[1].address}")
    await wait_for_rollout(server, rollout_id, lambda latest: stage(latest, first) == "returning")
    for _ in range(2):
        paused = await server.http.post(f"/v1/rollouts/{rollout_id}/pause")
        assert (paused.status_code, paused.json()["phase"]) == (200, "paused")
        assert "anonymous" in paused.json()["reason"]
    resumed = await server.http.post(f"/v1/rollouts/{rollout_id}/resume")
    assert (resumed.status_code, resumed.json()["phase"]) == (200, "running")
    second = await post_rollout(server, nodes=first)
    assert second.status_code == 409
    assert rollout_id in second.json()["detail"]
    aborted = await server.http.post(f"/v1/rollouts/{rollout_id}/abort")
    assert aborted.status_code == 200
    ended = await wait_for_rollout(server, rollout_id, lambda latest: latest["phase"] == "aborted")
    assert {step["stage"] for step in ended["steps"]} == {"skipped"}
    assert (await server.node(first))["drain"] is None
    other = await start_rollout(server, nodes=nodes[1].address)
    assert [rollout["id"] for rollout in await list_rollouts(server)][:2] == [other, rollout_id]


async def test_failed_action_is_reported_with_its_output(
    server: ApiServer, nodes: list[RegisteredNode]
) -> None:
    rollout_id = await start_rollout(server, nodes=nodes[0].address, action="fail")
    paused = await wait_for_rollout(server, rollout_id, lambda latest: latest["phase"] == "paused")
    assert "no disk" in paused["reason"]
    assert "no disk" in paused["steps"][0]["reason"]
    assert paused["steps"][0]["attempts"] == 1


REJECTED_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"nodes": "127.0.0.1:1"}, "127.0.0.1:1"),
    ({"nodes": "zone=nowhere"}, "zone=nowhere"),
    ({"action": "format-the-disk"}, "format-the-disk"),
    ({"max_unavailable": 3, "action": "succeed"}, "no other node"),
    ({"verify": "replay:monday", "force": True}, "rollouts.verification.directory is not set"),
]
INVALID_FIELDS: list[tuple[str, Any]] = [
    ("nodes", ""),
    ("nodes", "ALL"),
    ("nodes", "10.0.0.1"),
    ("nodes", "all,10.0.0.1:4000"),
    ("nodes", "zone=a, disk=b"),
    ("action", "../restart"),
    ("max_unavailable", 0),
    ("drain_deadline_seconds", -1),
    ("return_deadline_seconds", 604_801),
    ("failure_budget", True),
    ("version", "v8 5"),
    ("on_deadline", "cut"),
    ("nodez", "all"),
    ("verify", "monday"),
    ("verify", "replay:../etc"),
    ("verify", "replay:/etc"),
    ("verify", "replay:a//b"),
    ("verify_ratio", 0.5),
]


async def test_impossible_and_invalid_rollouts_are_rejected(server: ApiServer) -> None:
    before = await list_rollouts(server)
    for spec, expected_text in REJECTED_SPECS:
        response = await post_rollout(server, **spec)
        assert (response.status_code, response.headers["content-type"]) == (409, PROBLEM_MEDIA_TYPE)
        problem = response.json()
        assert problem["type"] == "urn:tidevoy:problem:rollout-precondition-failed"
        assert problem["reasons"]
        assert expected_text in problem["detail"]
    for field, value in INVALID_FIELDS:
        response = await post_rollout(server, **{field: value})
        assert response.status_code == 422, (field, value, response.text)
        assert [error["field"] for error in response.json()["errors"]] == [field]
    assert await list_rollouts(server) == before


async def test_unknown_rollout_is_not_found(server: ApiServer) -> None:
    for response in (
        await server.http.get("/v1/rollouts/none"),
        await server.http.get("/v1/rollouts/none/verifications/10.0.0.1:4000"),
        await server.http.post("/v1/rollouts/none/pause"),
        await server.http.post("/v1/rollouts/none/resume"),
        await server.http.post("/v1/rollouts/none/abort"),
    ):
        assert (response.status_code, problem_kind(response)) == (404, "unknown-rollout")
    assert (await server.http.get("/v1/rollouts/no%20id")).status_code == 422
