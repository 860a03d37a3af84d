"""A running Envoy with the module applies changed settings to new connections, and ends no session."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox.ports import Ports
from sandbox.tidb_sim.packets import Capability
from tests.conftest import StartEnvoy
from tests.support.controlplane.xds_server import make_node_plan, make_plan
from tests.support.fake_servers import full_backlog
from tests.support.module.envoy import login_packet, with_timeout
from tests.support.module.live_settings import LiveEnvoy, Sections, run_live_envoy
from tests.support.waiting import wait_until

_SESSIONS = 3
_ERROR_1040, _ERROR_1105 = b"\xff\x10\x04", b"\xff\x51\x04"
_PROXY = "127.0.0.5"
_V1_HEADER = b"PROXY TCP4 192.0.2.7 192.0.2.8 4711 6000\r\n"
_SILENCE_SECONDS = 0.3


@dataclass(frozen=True)
class Change:
    """A changed setting. `is_in_force` returns whether a new connection shows it."""

    setting: str
    before: Any
    after: Any
    is_in_force: Callable[[LiveEnvoy], Awaitable[bool]]
    other_settings: Sections | None = None
    nodes: int = 1
    behavior: str = "serve"  # of the nodes towards new connections, once the sessions are open
    is_reversible: bool = True
    sessions: int = _SESSIONS

    def sections(self, value: Any) -> dict[str, Any]:
        """Return the settings with this value."""
        settings = copy.deepcopy(dict(self.other_settings or {}))
        *sections, key = self.setting.split(".")
        section = settings
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
        return settings


async def is_refused_with_1040(live: LiveEnvoy) -> bool:
    return (await live.first_payload() or b"").startswith(_ERROR_1040)


async def is_refused_with_1105(live: LiveEnvoy) -> bool:
    return (await live.first_payload() or b"").startswith(_ERROR_1105)


async def is_second_login_refused(live: LiveEnvoy) -> bool:
    first = await live.connect()
    await with_timeout(first.read_packet())
    try:
        return await is_refused_with_1040(live)
    finally:
        first.writer.transport.abort()


async def is_second_login_accepted(live: LiveEnvoy) -> bool:
    return not await is_second_login_refused(live)


async def is_large_login_refused(live: LiveEnvoy) -> bool:
    client = await live.connect()
    await with_timeout(client.read_packet())
    client.writer.write(b"\x00\x20\x00\x01" + login_packet()[4:36] + bytes(2000))
    try:
        async with asyncio.timeout(_SILENCE_SECONDS):
            return (await client.read_packet())[1].startswith(_ERROR_1040)
    except TimeoutError:
        return False
    finally:
        client.writer.transport.abort()


async def is_untrusted_client_disconnected(live: LiveEnvoy) -> bool:
    return await live.first_payload() == b""


async def is_header_awaited(live: LiveEnvoy) -> bool:
    client = await live.connect(_PROXY)
    try:
        async with asyncio.timeout(_SILENCE_SECONDS):
            await client.read_packet()
            return False
    except TimeoutError:
        client.writer.write(_V1_HEADER)
        return (await with_timeout(client.login()))[0] == 0
    finally:
        client.writer.transport.abort()


async def is_header_sent_to_nodes(live: LiveEnvoy) -> bool:
    before = len(live.nodes.headers)
    await live.log_in()
    return len(live.nodes.headers) > before


async def is_compression_offered(live: LiveEnvoy) -> bool:
    greeting = await live.first_payload()
    assert greeting is not None
    version_end = greeting.index(b"\0", 1)
    low_flags = int.from_bytes(greeting[version_end + 14 : version_end + 16], "little")
    return bool(low_flags & Capability.COMPRESS)


async def is_silent_node_given_up_soon(live: LiveEnvoy) -> bool:
    return (await live.first_payload(seconds=1.5) or b"").startswith(_ERROR_1105)


async def is_one_node_tried(live: LiveEnvoy) -> bool:
    before = sum(server.connections for server in live.nodes.servers)
    assert await is_refused_with_1105(live)
    return sum(server.connections for server in live.nodes.servers) == before + 1


async def is_no_node_retried(live: LiveEnvoy) -> bool:
    """Whether the node that closes its connections is not tried again for a second."""
    before = live.nodes.servers[0].connections

    async def is_retried() -> bool:
        await live.first_payload()
        return live.nodes.servers[0].connections != before

    try:
        await wait_until(is_retried, timeout_seconds=1.0)
    except TimeoutError:
        return True
    return False


async def has_no_idle_connection(live: LiveEnvoy) -> bool:
    return live.nodes.open_connections() == _SESSIONS


def client_option(option: int, value: int) -> Callable[[LiveEnvoy], Awaitable[bool]]:
    async def has_value(live: LiveEnvoy) -> bool:
        client = await live.log_in()
        near, far = (client.writer.get_extra_info(name) for name in ("peername", "sockname"))
        return live.socket_option(near, far, option) == value

    return has_value


def node_option(option: int, value: int) -> Callable[[LiveEnvoy], Awaitable[bool]]:
    async def has_value(live: LiveEnvoy) -> bool:
        (node,) = live.nodes.servers
        await live.log_in()
        writer = node.writers[-1]
        near, far = (writer.get_extra_info(name) for name in ("peername", "sockname"))
        return live.socket_option(near, far, option) == value

    return has_value


_NO_HEALTH_CONNECTIONS = {"backend": {"health_connections": False}}
_CHANGES = [
    Change("sql.max_connections", 0, _SESSIONS, is_refused_with_1040),
    Change("sql.login_limits.max_logins", 100, 1, is_second_login_refused),
    Change("sql.login_limits.max_logins_per_address", 100, 1, is_second_login_refused),
    Change("sql.login_limits.max_bytes", 0, 500, is_large_login_refused),
    Change("sql.login_limits.max_bytes_per_address", 0, 500, is_large_login_refused),
    Change(
        *("sql.login_limits.shared_addresses", [], ["127.0.0.0/8"], is_second_login_accepted),
        other_settings={"sql": {"login_limits": {"max_logins_per_address": 1}}},
    ),
    Change("sql.keepalive_idle", 60, 77, client_option(socket.TCP_KEEPIDLE, 77)),
    Change("sql.keepalive_interval", 10, 7, client_option(socket.TCP_KEEPINTVL, 7)),
    Change("sql.keepalive_probes", 3, 9, client_option(socket.TCP_KEEPCNT, 9)),
    Change(
        *("sql.proxy_protocol", "off", "required", is_untrusted_client_disconnected),
        other_settings={"sql": {"trusted_proxies": [f"{_PROXY}/32"]}},
    ),
    Change(
        *("sql.proxy_protocol", "off", "optional", is_header_awaited),
        other_settings={"sql": {"trusted_proxies": [f"{_PROXY}/32"]}},
    ),
    Change(
        *("sql.trusted_proxies", ["192.0.2.0/24"], [f"{_PROXY}/32"], is_header_awaited),
        other_settings={"sql": {"proxy_protocol": "optional"}},
    ),
    Change("sql.compression", "off", "passthrough", is_compression_offered),
    Change("backend.connect_timeout", 30.0, 0.3, is_silent_node_given_up_soon, behavior="silent"),
    Change("backend.max_connect_attempts", 3, 1, is_one_node_tried, nodes=3, behavior="close"),
    Change(
        *("backend.max_connections", 0, _SESSIONS, is_refused_with_1105),
        other_settings=_NO_HEALTH_CONNECTIONS,
    ),
    Change(
        *("backend.ejection_time", 0.05, 300.0, is_no_node_retried),
        nodes=2,
        behavior="close first",
        sessions=4,  # as many at each node, so that both get new ones
        is_reversible=False,  # an ejection that has begun keeps its duration
    ),
    Change("backend.health_connections", True, False, has_no_idle_connection),
    Change("backend.keepalive_idle", 60, 77, node_option(socket.TCP_KEEPIDLE, 77)),
    Change("backend.keepalive_interval", 3, 7, node_option(socket.TCP_KEEPINTVL, 7)),
    Change("backend.keepalive_probes", 5, 9, node_option(socket.TCP_KEEPCNT, 9)),
    Change("backend.proxy_protocol", "off", "v1", is_header_sent_to_nodes),
]


@pytest.mark.parametrize("change", _CHANGES, ids=[f"{change.setting}-{change.after}" for change in _CHANGES])
async def test_changed_setting_applies_to_new_connections(
    ports: Ports, envoy_process: StartEnvoy, change: Change
) -> None:
    before = change.sections(change.before)
    async with run_live_envoy(ports, envoy_process, before, nodes=change.nodes) as live:
        sessions = [await live.log_in() for _ in range(change.sessions)]
        live.nodes.behavior = change.behavior

        async def is_in_force() -> bool:
            return await change.is_in_force(live)

        async def is_not_in_force() -> bool:
            return not await is_in_force()

        await wait_until(is_not_in_force)
        live.change(change.sections(change.after))
        seconds = await live.seconds_until(is_in_force)
        print(f"\n{change.setting}: in force after {seconds:.3f} s")
        await live.expect_undisturbed(sessions)
        if not change.is_reversible:
            return
        live.change(before)
        await wait_until(is_not_in_force)
        await live.expect_undisturbed(sessions)


@pytest.mark.parametrize("delta", [False, True], ids=["sotw", "delta"])
async def test_a_new_control_plane_with_other_settings_changes_no_listener(
    ports: Ports, envoy_process: StartEnvoy, delta: bool
) -> None:
    async with run_live_envoy(ports, envoy_process, {}, delta=delta) as live:
        sessions = [await live.log_in() for _ in range(_SESSIONS)]
        (node,) = live.nodes.servers
        changed = {"sql": {"max_connections": _SESSIONS}}
        live.test_bed.settings = live.test_bed.with_settings(changed)
        await live.test_bed.restart_server(make_plan(make_node_plan("n0:4000", node.endpoint)))
        await wait_until(lambda: is_refused_with_1040(live))
        await live.expect_undisturbed(sessions)
        # In the state-of-the-world variant, the new control plane cannot repeat the listener of the old one.
        olap = {"name": "olap", "listen": f"127.0.0.1:{ports.allocate()}", "labels": {"use": "olap"}}
        live.change({**changed, "groups": [olap]})
        if delta:
            await wait_until(lambda: has_listener(live, "sql-olap"))
            await live.expect_undisturbed(sessions)
        else:
            await wait_until(lambda: live.test_bed.status.stale_resources == ("listener",))
            assert not await has_listener(live, "sql-olap")


async def has_listener(live: LiveEnvoy, name: str) -> bool:
    return f"{name}::" in (await live.test_bed.envoy.get("/listeners")).text


async def test_a_group_is_added_after_live_settings_have_changed(
    ports: Ports, envoy_process: StartEnvoy
) -> None:
    """In the state-of-the-world variant, the other listeners are repeated as the Envoy has them."""
    async with run_live_envoy(ports, envoy_process, {}) as live:
        sessions = [await live.log_in() for _ in range(_SESSIONS)]
        olap = {"name": "olap", "listen": f"127.0.0.1:{ports.allocate()}", "labels": {"use": "olap"}}
        changed = {"sql": {"max_connections": _SESSIONS}}
        live.change(changed)
        await wait_until(lambda: is_refused_with_1040(live))
        live.change({**changed, "groups": [olap]})
        await wait_until(lambda: has_listener(live, "sql-olap"))
        await live.expect_undisturbed(sessions)


async def test_connect_timeout_ends_an_unanswered_attempt(ports: Ports, envoy_process: StartEnvoy) -> None:
    without_waiting = {"sql": {"wait_for_node": 0.0}}
    settings = {**without_waiting, "backend": {"connect_timeout": 30.0}}
    async with run_live_envoy(ports, envoy_process, settings) as live:
        with full_backlog() as dead:
            await live.test_bed.publish(make_plan(make_node_plan("dead:4000", dead)))
            assert not await is_silent_node_given_up_soon(live)
            live.change({**without_waiting, "backend": {"connect_timeout": 0.3}})
            await wait_until(lambda: is_silent_node_given_up_soon(live))


async def test_settings_for_new_envoys_are_reported_as_stale(
    ports: Ports, envoy_process: StartEnvoy, tmp_path: Path
) -> None:
    async with run_live_envoy(ports, envoy_process, {}) as live:
        session = await live.log_in()
        live.change({"sql": {"access_log": str(tmp_path / "sessions.log")}})
        await wait_until(lambda: live.test_bed.status.stale_resources == ("listener",))
        assert live.test_bed.status.stale_settings == ("sql.access_log",)
        assert (await session.send_command(0x0E))[0] == 0
        live.change({})
        await wait_until(lambda: live.test_bed.status.stale_resources == ())
        assert not live.test_bed.status.stale_settings
