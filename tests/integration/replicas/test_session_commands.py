"""Commands reach Envoys that call another replica than the one that an operator or a KILL asks."""

from __future__ import annotations

from pathlib import Path

from controlplane.decide.kill_target import KillDecision
from controlplane.engine.engine import Engine
from controlplane.model.sessions import SessionQuery
from sandbox.etcd import Etcd
from tests.support.controlplane.replicas import run_engines
from tests.support.controlplane.session_module import resolve, run_session_module, session_message
from tests.support.controlplane.statement_reports import OTHER_INSTANCE
from tests.support.waiting import wait_until


async def is_complete(engine: Engine, envoys: int) -> bool:
    """Return whether this replica knows this many Envoys, and all of them answer."""
    listing = await engine.sessions.list(SessionQuery())
    return len(engine.cluster.envoys()) == envoys and not listing.incomplete


async def test_commands_reach_the_envoys_of_all_replicas(tmp_path: Path, etcd: Etcd) -> None:
    """The calls of one Envoy are spread over both replicas."""
    async with run_engines(tmp_path, etcd) as (leader, follower):
        one, two = leader.xds_port, follower.xds_port
        async with (
            run_session_module(one, session_message(1, 5, 77), poll_port=two, report_port=one) as first,
            run_session_module(
                two, session_message(1, 6), session_message(2, 8), envoy="envoy-2", instance=OTHER_INSTANCE
            ) as second,
        ):
            for engine in (leader, follower):
                await wait_until(lambda engine=engine: is_complete(engine, 2))  # type: ignore[misc]
            for engine, other in ((leader, two), (follower, one)):
                listing = await engine.sessions.list(SessionQuery())
                assert (sorted(session.id for session in listing.sessions), listing.total) == ([5, 6, 8], 3)
                assert await resolve(other, 5) == KillDecision(node_id=77)
            assert (await leader.sessions.end(6, None)).envoy == "envoy-2"
            assert (await follower.sessions.end(5, None)).envoy == "envoy-1"
            assert (list(first.sessions), list(second.sessions)) == ([], [2])
            for module in (first, second):
                ids = [command.id for command in module.commands]
                assert len(ids) == len(set(ids))


async def test_replica_that_cannot_be_reached_is_named(tmp_path: Path, etcd: Etcd) -> None:
    async with (
        run_engines(tmp_path, etcd) as (leader, follower),
        run_session_module(leader.xds_port, session_message(1, 5, 77)),
    ):
        await wait_until(lambda: is_complete(leader, 1))
        assert await resolve(leader.xds_port, 5) == KillDecision(node_id=77)
        # Still registered, but its port is closed.
        await follower._xds.stop()
        await wait_until(lambda: bool(leader._replicas and leader._replicas.peer_sync.unreachable()))
        listing = await leader.sessions.list(SessionQuery())
        assert [session.id for session in listing.sessions] == [5]
        assert any(problem.startswith("the control plane ") for problem in listing.incomplete)
        assert "the control plane " in (await resolve(leader.xds_port, 5)).refusal
