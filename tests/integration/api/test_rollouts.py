"""`/v1/rollouts` over HTTP, with a real control plane and a real etcd behind it."""

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
from tests.support.controlplane.api_server import ApiServer, run_api_server, settings
from tests.support.controlplane.registered_nodes import (
    FAST_ROLLOUT,
    SQL_CHECKS_ONLY,
    RegisteredNode,
    registered_node,
)
from tests.support.waiting import wait_until

PROBLEM = "application/problem+json"
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
async def serving(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, nodes: list[RegisteredNode]
) -> AsyncIterator[ApiServer]:
    with Ports() as ports:
        wanted = settings(
            tmp_path_factory.mktemp("plane"),
            ports,
            pd={"urls": [etcd.url]},
            health=SQL_CHECKS_ONLY,
            balance={"slow_start": 0},
            rollouts={"actions": ACTIONS},
        )
        async with run_api_server(wanted) as plane:
            yield plane


@pytest_asyncio.fixture(loop_scope="module")
async def plane(serving: ApiServer, nodes: list[RegisteredNode]) -> AsyncIterator[ApiServer]:
    """All nodes are in service; at the end the rollouts of the test have ended."""

    async def in_service() -> bool:
        listed = (await serving.http.get("/v1/nodes")).json()["nodes"]
        return [node["state"] for node in listed] == ["active"] * len(nodes)

    await wait_until(in_service)
    yield serving
    for rollout in await rollouts(serving):
        if not is_over(rollout):
            await serving.http.post(f"/v1/rollouts/{rollout['id']}/abort")  # refused if it has just ended
            await becomes(serving, rollout["id"], is_over)


def is_over(rollout: dict[str, Any]) -> bool:
    return RolloutPhase(rollout["phase"]).is_over


async def rollouts(plane: ApiServer) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await plane.http.get("/v1/rollouts")).json()["rollouts"]
    return listed


async def post(plane: ApiServer, **order: Any) -> Any:
    return await plane.http.post("/v1/rollouts", json={**FAST_ROLLOUT, **order})


async def begun(plane: ApiServer, **order: Any) -> str:
    answer = await post(plane, **order)
    assert answer.status_code == 201, answer.text
    name: str = answer.json()["id"]
    return name


async def becomes(plane: ApiServer, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The rollout, once that holds."""
    last: dict[str, Any] = {}

    async def looked() -> bool:
        last.update((await plane.http.get(f"/v1/rollouts/{name}")).raise_for_status().json())
        return holds(last)

    try:
        await wait_until(looked)
    except TimeoutError:
        raise AssertionError(last) from None
    return last


def stage(rollout: dict[str, Any], address: str) -> str:
    (found,) = [step["stage"] for step in rollout["steps"] if step["address"] == address]
    return str(found)


async def test_a_dry_run_tells_the_plan_and_starts_nothing(
    plane: ApiServer, nodes: list[RegisteredNode]
) -> None:
    before = await rollouts(plane)
    wanted = f"{nodes[2].address},{nodes[0].address}"
    answer = await post(plane, nodes=wanted, action="succeed", version="v8.5.4", dry_run=True)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert set(said) == {"order", "problems", "refusals", "cautions"}
    assert said["order"] == {
        "selector": wanted,
        "nodes": [nodes[2].address, nodes[0].address],
        "action": "succeed",
        "max_unavailable": 1,
        "drain_deadline_seconds": 1,
        "on_deadline": "keep",
        "return_deadline_seconds": 15,
        "healthy_for_seconds": 0,
        "version": "v8.5.4",
        "failure_budget": 0,
    }
    assert (said["problems"], said["refusals"]) == ([], [])
    assert await rollouts(plane) == before
    assert (await plane.node(nodes[2].address))["drain"] is None


async def test_a_rollout_from_its_start_to_its_end(plane: ApiServer, nodes: list[RegisteredNode]) -> None:
    started = await post(plane, nodes="zone=zone-1", version="v8.5.4")
    assert started.status_code == 201
    rollout = started.json()
    assert set(rollout) == {
        *("id", "phase", "reason", "since", "by", "created", "ended", "forced", "order", "steps"),
    }
    assert started.headers["location"] == f"/v1/rollouts/{rollout['id']}"
    assert (rollout["by"], rollout["forced"], rollout["ended"]) == ("anonymous", False, None)
    assert datetime.fromisoformat(rollout["created"]).utcoffset() == timedelta(0)
    (step,) = rollout["steps"]
    assert set(step) == {
        *(
            "address",
            "stage",
            "reason",
            "since",
            "begun",
            "ended",
            "drained_by_rollout",
            "attempts",
            "cut_off",
        ),
        *("started_before", "version_before", "version_after", "sessions", "moved", "failed", "closed"),
    }
    node = nodes[1]
    waiting = await becomes(plane, rollout["id"], lambda now: stage(now, node.address) == "returning")
    assert waiting["steps"][0]["drained_by_rollout"] is True
    assert (await plane.node(node.address))["drain"] is not None
    await node.restart("v8.5.4")
    done = await becomes(plane, rollout["id"], lambda now: now["phase"] == "done")
    assert (done["steps"][0]["version_before"], done["steps"][0]["version_after"]) == ("v8.5.3", "v8.5.4")
    assert (await plane.node(node.address))["drain"] is None
    again = await plane.http.post(f"/v1/rollouts/{rollout['id']}/resume")
    assert (again.status_code, again.headers["content-type"]) == (409, PROBLEM)
    assert again.json()["type"] == "urn:tidevoy:problem:rollout-refused"
    assert again.json()["reasons"] == ["it is done"]


async def test_pause_resume_and_abort(plane: ApiServer, nodes: list[RegisteredNode]) -> None:
    first = nodes[0].address
    name = await begun(plane, nodes=f"{first},{nodes[1].address}")
    await becomes(plane, name, lambda now: stage(now, first) == "returning")
    for _ in range(2):
        paused = await plane.http.post(f"/v1/rollouts/{name}/pause")
        assert (paused.status_code, paused.json()["phase"]) == (200, "paused")
        assert "anonymous" in paused.json()["reason"]
    resumed = await plane.http.post(f"/v1/rollouts/{name}/resume")
    assert (resumed.status_code, resumed.json()["phase"]) == (200, "running")
    second = await post(plane, nodes=first)
    assert second.status_code == 409
    assert name in second.json()["detail"]
    aborted = await plane.http.post(f"/v1/rollouts/{name}/abort")
    assert aborted.status_code == 200
    ended = await becomes(plane, name, lambda now: now["phase"] == "aborted")
    assert {step["stage"] for step in ended["steps"]} == {"skipped"}
    assert (await plane.node(first))["drain"] is None
    other = await begun(plane, nodes=nodes[1].address)
    assert [one["id"] for one in await rollouts(plane)][:2] == [other, name]


async def test_an_action_that_fails_is_told_with_its_words(
    plane: ApiServer, nodes: list[RegisteredNode]
) -> None:
    name = await begun(plane, nodes=nodes[0].address, action="fail")
    paused = await becomes(plane, name, lambda now: now["phase"] == "paused")
    assert "no disk" in paused["reason"]
    assert "no disk" in paused["steps"][0]["reason"]
    assert paused["steps"][0]["attempts"] == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nodes": "127.0.0.1:1"}, "127.0.0.1:1"),
    ({"nodes": "zone=nowhere"}, "zone=nowhere"),
    ({"action": "format-the-disk"}, "format-the-disk"),
    ({"max_unavailable": 3, "action": "succeed"}, "no other node"),
]
BAD: list[tuple[str, Any]] = [
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
]


async def test_what_cannot_be_is_refused(plane: ApiServer) -> None:
    before = await rollouts(plane)
    for order, told in REFUSED:
        answer = await post(plane, **order)
        assert (answer.status_code, answer.headers["content-type"]) == (409, PROBLEM)
        problem = answer.json()
        assert problem["type"] == "urn:tidevoy:problem:rollout-refused"
        assert problem["reasons"]
        assert told in problem["detail"]
    for field, value in BAD:
        answer = await post(plane, **{field: value})
        assert answer.status_code == 422, (field, value, answer.text)
        assert [wrong["field"] for wrong in answer.json()["errors"]] == [field]
    assert await rollouts(plane) == before


async def test_an_unknown_rollout(plane: ApiServer) -> None:
    for answer in (
        await plane.http.get("/v1/rollouts/none"),
        await plane.http.post("/v1/rollouts/none/pause"),
        await plane.http.post("/v1/rollouts/none/resume"),
        await plane.http.post("/v1/rollouts/none/abort"),
    ):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:tidevoy:problem:unknown-rollout")
    assert (await plane.http.get("/v1/rollouts/no%20id")).status_code == 422
