"""A control plane starts from what another build has saved in `state_dir`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.revisions import ModuleBuild
from sandbox.child_process import ProcessFailed
from sandbox.mariadb import MariaDb
from sandbox.server import http_client
from sandbox.session_certificate import SessionCertificate
from tests.support.e2e.restart_action import (
    RestartCommand,
    control_rollout,
    fail_with,
    get_rollout,
    start_rollout,
    wait_for_phase,
)
from tests.support.upgrade.builds import Upgrade
from tests.support.upgrade.mixed_cluster import MixedCluster, run_mixed_cluster

pytestmark = pytest.mark.timeout(1800)  # the first build takes minutes

DRAIN = {"deadline_seconds": 1234, "on_deadline": "keep"}
FAILURE = "the disk is full"


@pytest.fixture
async def restarter(tmp_path: Path) -> AsyncIterator[RestartCommand]:
    async with RestartCommand(tmp_path / "action").serving() as restarter:
        yield restarter


class SavedState:
    """Requests of operators and a rollout, which one build saves and another one must continue."""

    def __init__(self, cluster: MixedCluster, restarter: RestartCommand) -> None:
        self.cluster, self.restarter = cluster, restarter
        (self.plane,) = cluster.planes
        restarter.nodes = lambda: cluster.nodes
        self.drained, self.failing, self.weighted, _ = cluster.nodes
        self.rollout = ""

    async def create(self) -> None:
        """Drain a node, change a weight and a label, and let a rollout of another node fail and pause."""
        cluster, plane = self.cluster, self.plane
        await cluster.add_envoy(plane.build, "envoy-1")
        changes = {"weight": 3, "labels": {"rack": "r7"}}
        await cluster.call(plane, "PATCH", f"/v1/nodes/{self.weighted.address}", changes)
        self.restarter.set_behavior(self.failing.address, fail_with(FAILURE))
        async with http_client(plane.api_url) as api:
            self.rollout = await start_rollout(api, nodes=self.failing.address)
            await wait_for_phase(api, self.rollout, "paused")
        await cluster.call(plane, "POST", f"/v1/nodes/{self.drained.address}/drain", DRAIN)
        await cluster.wait_for_state(plane, self.drained, "drained")

    async def read(self) -> dict[str, Any]:
        """Return what a restarted control plane must show unchanged."""
        nodes = {node["address"]: node for node in (await self.cluster.get(self.plane, "/v1/nodes"))["nodes"]}
        weighted = nodes[self.weighted.address]
        async with http_client(self.plane.api_url) as api:
            rollout = await get_rollout(api, self.rollout)
        return {
            # If the plan were not restored, the node would have a later `since`.
            "nodes": {
                address: (node["state"], node["since"], node["drain"]) for address, node in nodes.items()
            },
            "labels": weighted["labels"],
            "rollout": {
                key: rollout[key] for key in ("phase", "reason", "since", "spec", "steps", "created_at")
            },
        }

    async def restart_with(self, build: ModuleBuild) -> None:
        """Replace the control plane by one of another build. Raises ProcessFailed if that does not start."""
        if self.plane.is_running:
            assert await self.plane.terminate() == 0
        self.plane.build = build
        await self.plane.launch()

    async def finish(self) -> None:
        """Resume the rollout and wait until it is done; end the drain."""
        self.restarter.reset_behaviors()
        async with http_client(self.plane.api_url) as api:
            await control_rollout(api, self.rollout, "resume")
            await wait_for_phase(api, self.rollout, "done")
        await self.cluster.undrain(self.plane, self.drained)

    def files(self) -> dict[str, bytes]:
        """Return the saved files by name."""
        directory = Path(self.plane.settings["state_dir"])
        return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "lock"}


@asynccontextmanager
async def create_state(
    directory: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    restarter: RestartCommand,
    build: ModuleBuild,
) -> AsyncIterator[SavedState]:
    """Run a control plane of this build that has saved a state."""
    settings = {"rollouts": restarter.settings}
    async with run_mixed_cluster(
        directory, mariadb, [build], nodes=4, node_arguments=signing.arguments, settings=settings
    ) as cluster:
        state = SavedState(cluster, restarter)
        await state.create()
        yield state


async def expect_unchanged(state: SavedState, expected: Mapping[str, Any]) -> None:
    assert shared_fields(await state.read(), expected) == expected
    assert await state.cluster.events(state.plane, "state.load_failed") == []


def shared_fields(value: Any, expected: Any) -> Any:
    """Return the value without fields that are not expected: a newer build shows more of them."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return {key: shared_fields(value[key], expected[key]) for key in value.keys() & expected.keys()}
    if isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        return [shared_fields(*pair) for pair in zip(value, expected, strict=True)]
    return value


async def reason_not_to_start(state: SavedState, build: ModuleBuild) -> str:
    """Start the control plane of this build. Return the error if it does not start, else an empty text."""
    try:
        await state.restart_with(build)
    except ProcessFailed as failure:
        return failure.log
    return ""


async def test_newer_build_continues_from_the_state_of_the_older(
    tmp_path: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    restarter: RestartCommand,
    upgrade: Upgrade,
) -> None:
    async with create_state(tmp_path, mariadb, signing, restarter, upgrade.older) as state:
        before = await state.read()
        await state.restart_with(upgrade.newer)
        await expect_unchanged(state, before)
        await state.finish()


async def test_older_build_continues_or_refuses_without_a_change(
    tmp_path: Path,
    mariadb: MariaDb,
    signing: SessionCertificate,
    restarter: RestartCommand,
    upgrade: Upgrade,
) -> None:
    """After a rollback, the older build reads everything, or does not start and leaves all files."""
    async with create_state(tmp_path, mariadb, signing, restarter, upgrade.newer) as state:
        before = await state.read()
        assert await state.plane.terminate() == 0
        files = state.files()
        refusal = await reason_not_to_start(state, upgrade.older)
        assert bool(refusal) == upgrade.changes_formats, refusal
        if refusal:
            print(f"\nrollback: {refusal}")
            assert "a newer Tidevoy wrote" in refusal
            assert state.files() == files
            await state.restart_with(upgrade.newer)
        await expect_unchanged(state, before)
        await state.finish()
