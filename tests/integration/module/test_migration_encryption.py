"""A session's token and states never travel with less protection than the session has."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.clients.server import PemFiles
from tests.support.migration.fault_arena import FaultArena, node_tls_context, to_host
from tests.support.migration.scripted_node import ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import run_envoy
from tests.support.waiting import wait_until

module = pytest.mark.asyncio(loop_scope="module")

MODES = ("preferred", "required")


@dataclass
class Site:
    """Envoys by their TLS mode, and the contexts of nodes: they trust the certificates of `ours` only."""

    arenas: dict[str, FaultArena]
    ours: ssl.SSLContext
    others: ssl.SSLContext

    def tls(self, offered: bool) -> ssl.SSLContext | None:
        """The context of a node that offers TLS, or none."""
        return self.ours if offered else None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    certificates = PemFiles.create(tmp_path_factory.mktemp("ours"))
    others = PemFiles.create(tmp_path_factory.mktemp("others"))

    def parts(mode: str, endpoints: Path) -> ModuleConfig:
        node = {"tls": mode, "ca": str(certificates.ca), "verify": "ca"}
        return ModuleConfig(node=node, endpoints=endpoints)

    directories = {mode: tmp_path_factory.mktemp(mode) for mode in MODES}
    files = {mode: directory / "endpoints.json" for mode, directory in directories.items()}
    anything = 1 << 30
    async with (
        run_envoy(
            directories["preferred"], [Host("127.0.0.1:1")], parts("preferred", files["preferred"])
        ) as one,
        run_envoy(
            directories["required"], [Host("127.0.0.1:1")], parts("required", files["required"])
        ) as two,
    ):
        arenas = {
            mode: FaultArena(proxy, files[mode], None, descriptors=anything)
            for mode, proxy in zip(MODES, (one, two), strict=True)
        }
        yield Site(arenas, node_tls_context(certificates), node_tls_context(others))


def was_logged_in(node: ScriptedNode) -> bool:
    """Whether it was sent a token."""
    return node.migration_completed.is_set() or any(link.logged_in_by_token for link in node.connections)


def is_over_tls(node: ScriptedNode) -> bool:
    writer = node.connections[-1].writer
    return writer is not None and writer.get_extra_info("ssl_object") is not None


COMBINATIONS = [
    pytest.param(
        mode, has, offers, id=f"{mode}, {'TLS' if has else 'plain'} to {'TLS' if offers else 'plain'}"
    )
    for mode in MODES
    for has in (True, False)
    for offers in (True, False)
    if has or mode == "preferred"
]
"""The mode, whether the session's connection has TLS, and whether the other node offers it."""


@pytest.mark.parametrize(("mode", "has", "offers"), COMBINATIONS)
@module
async def test_a_session_moves_only_where_it_is_as_safe(
    site: Site, mode: str, has: bool, offers: bool
) -> None:
    tls = (site.tls(has), site.tls(offers), None)
    async with site.arenas[mode].scenario(tls=tls) as play:
        assert is_over_tls(play.old) == has
        play.drain()
        if has and not offers:
            await play.wait_failure_counted("invalid")
            assert play.old.export_count == 0
            assert not was_logged_in(play.new)
            await play.expect_on(play.old)
        else:
            await play.expect_migrated()
            # "preferred" means wherever TLS is offered, even if the session had none before.
            assert is_over_tls(play.new) == offers


@pytest.mark.parametrize("mode", MODES)
@module
async def test_a_node_that_is_not_trusted_is_sent_no_token(site: Site, mode: str) -> None:
    async with site.arenas[mode].scenario(tls=(site.ours, site.others, None)) as play:
        play.drain()
        await play.wait_failure_counted("unreachable")
        assert play.old.export_count == 0
        assert not was_logged_in(play.new)
        await play.expect_on(play.old)


@pytest.mark.parametrize("mode", MODES)
@module
async def test_the_second_node_that_is_tried_must_be_as_safe(site: Site, mode: str) -> None:
    async with site.arenas[mode].scenario(third=True, tls=(site.ours, None, site.ours)) as play:
        play.drain()
        await play.expect_migrated(play.third)
        assert is_over_tls(play.third)
        assert not was_logged_in(play.new)


def contexts(site: Site, has: bool, offers: bool) -> tuple[ssl.SSLContext | None, ...]:
    """Of the session's node, of one like it that denies the session, and of a third node."""
    return site.tls(has), site.tls(has), site.tls(offers)


@pytest.mark.parametrize(("mode", "has", "offers"), COMBINATIONS)
@module
async def test_known_states_go_only_where_they_are_as_safe(
    site: Site, mode: str, has: bool, offers: bool
) -> None:
    async with site.arenas[mode].scenario(third=True, tls=contexts(site, has, offers)) as play:
        link = await play.fail_migration()
        await play.old.stop_listening()  # else the end of the connection would be taken for a KILL
        await link.reset()
        # Where the third node is not safe enough, the new one is tried once more.
        there = play.new if has and not offers else play.third
        await wait_until(there.migration_completed.is_set)
        await play.expect_on(there)
        assert is_over_tls(there) == (has or offers)
        assert there is play.third or not was_logged_in(play.third)


@pytest.mark.parametrize("mode", MODES)
@module
async def test_a_session_ends_rather_than_become_less_safe(site: Site, mode: str) -> None:
    async with site.arenas[mode].scenario(third=True, tls=contexts(site, has=True, offers=False)) as play:
        link = await play.fail_migration()
        play.arena.publish(Host(play.old.endpoint, play.old.name, state="draining"), to_host(play.third))

        async def is_forgotten() -> bool:
            return play.new.endpoint not in await play.arena.proxy.hosts("tidb")

        await wait_until(is_forgotten)
        await play.old.stop_listening()
        await link.reset()
        await play.expect_ended(1053)
        assert not was_logged_in(play.third)
