"""If a session's node connection has TLS, no migration sends the session's token or states without TLS."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.clients.server import PemFiles
from tests.support.migration.fault_envoy import FaultEnvoy, node_tls_context, to_host
from tests.support.migration.scripted_node import ScriptedNode
from tests.support.module.bootstrap import Host, ModuleConfig
from tests.support.module.envoy import run_envoy
from tests.support.waiting import wait_until

in_module = pytest.mark.asyncio(loop_scope="module")

MODES = ("preferred", "required")


@dataclass
class TlsModes:
    """One Envoy per TLS mode, and the TLS contexts of a node that they trust and of an untrusted node."""

    envoys: dict[str, FaultEnvoy]
    trusted: ssl.SSLContext
    untrusted: ssl.SSLContext

    def tls(self, offered: bool) -> ssl.SSLContext | None:
        """Return the TLS context of a node that offers TLS, or None for a node without TLS."""
        return self.trusted if offered else None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls_modes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TlsModes]:
    certificates = PemFiles.create(tmp_path_factory.mktemp("ours"))
    untrusted = PemFiles.create(tmp_path_factory.mktemp("others"))

    def module_config(mode: str, endpoints: Path) -> ModuleConfig:
        node = {"tls": mode, "ca": str(certificates.ca), "verify": "ca"}
        return ModuleConfig(node=node, endpoints=endpoints)

    directories = {mode: tmp_path_factory.mktemp(mode) for mode in MODES}
    files = {mode: directory / "endpoints.json" for mode, directory in directories.items()}
    unlimited = 1 << 30
    async with (
        run_envoy(
            directories["preferred"], [Host("127.0.0.1:1")], module_config("preferred", files["preferred"])
        ) as preferred,
        run_envoy(
            directories["required"], [Host("127.0.0.1:1")], module_config("required", files["required"])
        ) as required,
    ):
        envoys = {
            mode: FaultEnvoy(proxy, files[mode], None, descriptors=unlimited)
            for mode, proxy in zip(MODES, (preferred, required), strict=True)
        }
        yield TlsModes(envoys, node_tls_context(certificates), node_tls_context(untrusted))


def received_token(node: ScriptedNode) -> bool:
    """Return whether Envoy sent a session's token to this node."""
    return node.migration_completed.is_set() or any(link.logged_in_by_token for link in node.connections)


def is_over_tls(node: ScriptedNode) -> bool:
    writer = node.connections[-1].writer
    return writer is not None and writer.get_extra_info("ssl_object") is not None


COMBINATIONS = [
    pytest.param(
        mode,
        has_tls,
        offers_tls,
        id=f"{mode}, {'TLS' if has_tls else 'plain'} to {'TLS' if offers_tls else 'plain'}",
    )
    for mode in MODES
    for has_tls in (True, False)
    for offers_tls in (True, False)
    if has_tls or mode == "preferred"
]
"""Envoy's TLS mode, whether the session's node connection has TLS, and whether the target offers TLS."""


@pytest.mark.parametrize(("mode", "has_tls", "offers_tls"), COMBINATIONS)
@in_module
async def test_session_migrates_only_to_an_equally_safe_node(
    tls_modes: TlsModes, mode: str, has_tls: bool, offers_tls: bool
) -> None:
    tls = (tls_modes.tls(has_tls), tls_modes.tls(offers_tls), None)
    async with tls_modes.envoys[mode].scenario(tls=tls) as scenario:
        assert is_over_tls(scenario.old) == has_tls
        scenario.drain()
        if has_tls and not offers_tls:
            await scenario.wait_failure_counted("invalid")
            assert scenario.old.export_count == 0
            assert not received_token(scenario.new)
            await scenario.expect_on(scenario.old)
        else:
            await scenario.expect_migrated()
            # In mode "preferred", Envoy uses TLS if the target offers it, even for a session without TLS.
            assert is_over_tls(scenario.new) == offers_tls


@pytest.mark.parametrize("mode", MODES)
@in_module
async def test_untrusted_node_receives_no_token(tls_modes: TlsModes, mode: str) -> None:
    async with tls_modes.envoys[mode].scenario(
        tls=(tls_modes.trusted, tls_modes.untrusted, None)
    ) as scenario:
        scenario.drain()
        await scenario.wait_failure_counted("unreachable")
        assert scenario.old.export_count == 0
        assert not received_token(scenario.new)
        await scenario.expect_on(scenario.old)


@pytest.mark.parametrize("mode", MODES)
@in_module
async def test_second_target_must_be_equally_safe(tls_modes: TlsModes, mode: str) -> None:
    async with tls_modes.envoys[mode].scenario(
        third=True, tls=(tls_modes.trusted, None, tls_modes.trusted)
    ) as scenario:
        scenario.drain()
        await scenario.expect_migrated(scenario.third)
        assert is_over_tls(scenario.third)
        assert not received_token(scenario.new)


def contexts(tls_modes: TlsModes, has_tls: bool, offers_tls: bool) -> tuple[ssl.SSLContext | None, ...]:
    """Return TLS contexts of the session's node, of a target that denies the session, and of a third node."""
    return tls_modes.tls(has_tls), tls_modes.tls(has_tls), tls_modes.tls(offers_tls)


@pytest.mark.parametrize(("mode", "has_tls", "offers_tls"), COMBINATIONS)
@in_module
async def test_saved_states_are_restored_only_on_an_equally_safe_node(
    tls_modes: TlsModes, mode: str, has_tls: bool, offers_tls: bool
) -> None:
    async with tls_modes.envoys[mode].scenario(
        third=True, tls=contexts(tls_modes, has_tls, offers_tls)
    ) as scenario:
        link = await scenario.fail_migration()
        await scenario.old.stop_listening()  # if it listened, Envoy would assume a KILL
        await link.reset()
        # If the session has TLS and the third node offers none, Envoy tries the new node again.
        target = scenario.new if has_tls and not offers_tls else scenario.third
        await wait_until(target.migration_completed.is_set)
        await scenario.expect_on(target)
        assert is_over_tls(target) == (has_tls or offers_tls)
        assert target is scenario.third or not received_token(scenario.third)


@pytest.mark.parametrize("mode", MODES)
@in_module
async def test_session_ends_instead_of_becoming_less_safe(tls_modes: TlsModes, mode: str) -> None:
    async with tls_modes.envoys[mode].scenario(
        third=True, tls=contexts(tls_modes, has_tls=True, offers_tls=False)
    ) as scenario:
        link = await scenario.fail_migration()
        scenario.envoy.publish(
            Host(scenario.old.endpoint, scenario.old.name, state="draining"), to_host(scenario.third)
        )

        async def is_removed() -> bool:
            return scenario.new.endpoint not in await scenario.envoy.proxy.hosts("tidb")

        await wait_until(is_removed)
        await scenario.old.stop_listening()
        await link.reset()
        await scenario.expect_ended(1053)
        assert not received_token(scenario.third)
