"""The module's metrics, checked with sessions in which the test knows every packet."""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path

import pytest

from controlplane.model.traffic import SESSION_STATES
from sandbox.tidb_sim.greeting import OFFERED_CAPABILITIES, parse_capabilities, parse_greeting
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, MySqlCommand, err, frame, ok
from tests.support.fake_servers import run_fake_server
from tests.support.module.bootstrap import Host, ModuleConfig, publish_nodes
from tests.support.module.envoy import (
    OK_PAYLOAD,
    accept_login,
    connect_logged_in,
    greeting_packet,
    login_packet,
    run_envoy,
    serve_ok,
    with_timeout,
)
from tests.support.tidb_sim_clients import RawClient
from tests.support.waiting import assert_nothing_received

IN_TRANSACTION = ok(AUTOCOMMIT | 1)
PREPARED = b"\0" + struct.pack("<IHHBH", 1, 0, 0, 0, 0)


class ScriptedAnswers:
    """A node that answers each command with the next item of `answers`."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await accept_login(reader, writer)
        while True:
            _, command = await node.read_packet()
            if command[0] not in (
                MySqlCommand.STMT_CLOSE,
                MySqlCommand.STMT_SEND_LONG_DATA,
                MySqlCommand.QUIT,
            ):
                writer.write(await self.answers.get())

    async def exchange(
        self, client: RawClient, command: MySqlCommand, body: bytes = b"", *, answer: bytes = OK_PAYLOAD
    ) -> int:
        """Send one command, and answer it with one packet. Return the command's length in bytes."""
        self.answers.put_nowait(frame(1, answer))
        await with_timeout(client.send_command(command, body))
        return 5 + len(body)


def session_counts(**counts: int) -> dict[tuple[str, ...], int]:
    """Return the values of the gauge `sessions` for the node n in all states."""
    return {("sessions", "n", state): counts.get(state, 0) for state in SESSION_STATES}


async def test_session_state_gauges_follow_a_session(tmp_path: Path) -> None:
    node_script = ScriptedAnswers()
    async with (
        run_fake_server(node_script) as node,
        run_envoy(tmp_path, [Host(node.endpoint, "n")], workers=2) as proxy,
    ):
        instance = await proxy.instance_id()
        assert len(bytes.fromhex(instance)) == 8
        await proxy.wait_for_metrics({("module_info", instance, "0.1.0"): 1})
        client = await proxy.connect()
        greeting = await with_timeout(client.read_packet())
        assert greeting[1][0] == 10
        await proxy.wait_for_metrics(session_counts(login=1))
        client.writer.write(login_packet())
        assert (await with_timeout(client.read_packet()))[1][0] == 0
        await proxy.wait_for_metrics(session_counts(idle=1) | {("logins", "n"): 1})
        client.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + b"begin"))
        await proxy.wait_for_metrics(session_counts(busy=1))
        node_script.answers.put_nowait(frame(1, IN_TRANSACTION))
        await with_timeout(client.read_packet())
        await proxy.wait_for_metrics(
            session_counts(transaction=1) | {("sessions_pinned", "n", "transaction"): 1}
        )
        await node_script.exchange(client, MySqlCommand.QUERY, b"commit")
        await proxy.wait_for_metrics(session_counts(idle=1) | {("sessions_pinned", "n", "transaction"): 0})
        # The session is idle, but a parameter that was sent in advance pins it.
        await node_script.exchange(client, MySqlCommand.STMT_PREPARE, b"select 1", answer=PREPARED)
        client.writer.write(
            frame(0, bytes((MySqlCommand.STMT_SEND_LONG_DATA,)) + struct.pack("<IH", 1, 0) + b"data")
        )
        await proxy.wait_for_metrics(session_counts(idle=1) | {("sessions_pinned", "n", "long_data"): 1})
        await node_script.exchange(client, MySqlCommand.RESET_CONNECTION)
        await proxy.wait_for_metrics(session_counts(idle=1) | {("sessions_pinned", "n", "long_data"): 0})
        # After an unsolicited packet the session is opaque: the module cannot parse it any more.
        node.writers[0].write(frame(0, OK_PAYLOAD))
        await with_timeout(client.read_packet())
        await proxy.wait_for_metrics(session_counts(opaque=1) | {("sessions_pinned", "n", "opaque"): 1})
        client.writer.close()
        await proxy.wait_for_metrics(session_counts() | {("sessions_pinned", "n", "opaque"): 0})


async def test_commands_errors_and_bytes_are_counted(tmp_path: Path) -> None:
    node_script = ScriptedAnswers()
    async with run_fake_server(node_script) as node, run_envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await connect_logged_in(proxy)
        sent = received = 0

        async def exchange(command: MySqlCommand, body: bytes = b"", answer: bytes = OK_PAYLOAD) -> None:
            nonlocal sent, received
            sent += await node_script.exchange(client, command, body, answer=answer)
            received += 4 + len(answer)

        for query in (b"set @a=1", b"begin", b"rollback"):
            await exchange(MySqlCommand.QUERY, query)
        await exchange(MySqlCommand.PING)
        await exchange(MySqlCommand.STMT_PREPARE, b"select 1", PREPARED)
        await exchange(MySqlCommand.STMT_EXECUTE, struct.pack("<IBI", 1, 0, 1))
        await exchange(MySqlCommand.RESET_CONNECTION)
        await exchange(MySqlCommand.INIT_DB, b"mysql")
        close_packet = frame(0, bytes((MySqlCommand.STMT_CLOSE,)) + struct.pack("<I", 1))
        client.writer.write(close_packet)
        sent += len(close_packet)
        error_classes = {
            "access": (1044, 1045, 1142),
            "deadlock": (1213, 1205, 8022, 9007),
            "shutdown": (1053,),
            "killed": (1317,),
            "limit": (1226, 8175),
            "cluster": (9001, 9005),
            "syntax": (1064, 1146),
            "other": (1062, 1105),
        }
        for codes in error_classes.values():
            for code in codes:
                await exchange(MySqlCommand.QUERY, b"do 1", err(code, "text", "HY000"))
        failed_count = sum(map(len, error_classes.values()))
        command_count = 8 + failed_count
        await proxy.wait_for_metrics(
            {
                ("commands", "query", "n"): 3 + failed_count,
                ("commands", "ping", "n"): 1,
                ("commands", "prepare", "n"): 1,
                ("commands", "execute", "n"): 1,
                ("commands", "reset", "n"): 1,
                ("commands", "other", "n"): 2,
                ("commands", "change_user", "n"): 0,
                ("bytes", "to_node", "n"): sent,
                ("bytes", "to_client", "n"): received,
                ("command_seconds_bucket", "+Inf", "n"): command_count,
            }
            | {("errors", name, "n"): len(codes) for name, codes in error_classes.items()}
        )


async def test_command_durations_are_measured(tmp_path: Path) -> None:
    node_script = ScriptedAnswers()
    async with run_fake_server(node_script) as node, run_envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await connect_logged_in(proxy)
        for _ in range(5):
            await node_script.exchange(client, MySqlCommand.PING)
        client.writer.write(frame(0, bytes((MySqlCommand.QUERY,)) + b"select sleep(0.6)"))
        await assert_nothing_received(client.reader, 0.6)
        node_script.answers.put_nowait(frame(1, OK_PAYLOAD))
        await with_timeout(client.read_packet())
        await proxy.wait_for_metrics({("command_seconds_bucket", "+Inf", "n"): 6})
        metrics = await proxy.metrics()
        buckets = {
            float(labels[0]): value for (name, labels), value in metrics.items() if name.endswith("_bucket")
        }
        assert buckets.keys() <= {
            0.0005,
            0.001,
            0.0025,
            0.005,
            0.01,
            0.025,
            0.05,
            0.1,
            0.25,
            0.5,
            1,
            2.5,
            10,
            float("inf"),
        }
        assert [buckets[bound] for bound in sorted(buckets)] == sorted(buckets.values())
        assert buckets.get(0.5, 0) <= 5 <= buckets[10.0] - 1
        microseconds = metrics["command_microseconds", ("n",)]
        assert 590_000 <= microseconds < 20_000_000


async def test_pipelined_commands_are_timed_individually(tmp_path: Path) -> None:
    node_script = ScriptedAnswers()
    async with run_fake_server(node_script) as node, run_envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await connect_logged_in(proxy)
        started_at = time.monotonic()
        client.writer.write(frame(0, b"\x0e") * 3)
        for _ in range(3):
            await assert_nothing_received(client.reader, 0.3)
            node_script.answers.put_nowait(frame(1, OK_PAYLOAD))
            await with_timeout(client.read_packet())
        elapsed_seconds = time.monotonic() - started_at
        await proxy.wait_for_metrics(
            {("command_seconds_bucket", "+Inf", "n"): 3, ("command_seconds_bucket", "0.25", "n"): 0}
        )
        # The time of a pipelined command starts at the previous answer, so the sum is about 3 * 0.3 s. If it
        # started when the command arrived, the sum would be twice the elapsed time.
        microseconds = (await proxy.metrics())["command_microseconds", ("n",)]
        assert 850_000 <= microseconds <= elapsed_seconds * 1_000_000


async def test_metrics_are_counted_per_node(tmp_path: Path) -> None:
    first, second = ScriptedAnswers(), ScriptedAnswers()
    async with run_fake_server(first) as a, run_fake_server(second) as b:
        hosts = [Host(a.endpoint, "a"), Host(b.endpoint, "b.example:4000")]
        async with run_envoy(tmp_path, hosts, workers=2) as proxy:
            for _ in range(6):
                await connect_logged_in(proxy)
            for client in proxy.clients:
                for node_script in (first, second):
                    node_script.answers.put_nowait(frame(1, OK_PAYLOAD))
                await with_timeout(client.send_command(MySqlCommand.PING))
            await proxy.wait_for_metrics(
                {("commands", "ping", name): 3 for name in ("a", "b.example:4000")}
                | {("logins", name): 3 for name in ("a", "b.example:4000")}
                | {("sessions", name, "idle"): 3 for name in ("a", "b.example:4000")}
            )


@pytest.mark.parametrize("compression", [Capability.COMPRESS, Capability(1 << 26)], ids=["zlib", "zstd"])
async def test_compressed_sessions_are_opaque(tmp_path: Path, compression: Capability) -> None:
    capabilities = compression | Capability.PROTOCOL_41 | Capability.SECURE_CONNECTION
    client_capabilities: list[Capability] = []

    async def accept_compression(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = RawClient(reader, writer)
        writer.write(greeting_packet(offered=OFFERED_CAPABILITIES | compression))
        _, login = await node.read_packet()
        client_capabilities.append(parse_capabilities(login))
        writer.write(frame(2, OK_PAYLOAD))

    async with (
        run_fake_server(accept_compression) as node,
        run_envoy(
            tmp_path, [Host(node.endpoint, "n")], ModuleConfig(client={"compression": "passthrough"})
        ) as proxy,
    ):
        client = await proxy.connect()
        _, greeting = await with_timeout(client.read_packet())
        assert compression in parse_greeting(greeting).capabilities
        client.writer.write(login_packet(capabilities))
        assert (await with_timeout(client.read_packet()))[1][0] == 0
        await proxy.wait_for_metrics(session_counts(opaque=1))
        assert compression in client_capabilities[0]


async def test_counters_continue_when_a_node_returns(tmp_path: Path) -> None:
    """The module forgets a node that has gone, after its last report. Envoy keeps the node's series."""
    endpoints = tmp_path / "endpoints.json"
    async with run_fake_server(serve_ok) as a, run_fake_server(serve_ok) as b:
        first, second = Host(a.endpoint, "a"), Host(b.endpoint, "b")
        config = ModuleConfig(endpoints=endpoints)
        async with run_envoy(tmp_path, [second], config, workers=2) as proxy:
            for count in (1, 2, 3):
                async with proxy.wait_applied():
                    publish_nodes(endpoints, [first])
                client = await connect_logged_in(proxy)
                await with_timeout(client.send_command(MySqlCommand.PING))
                await proxy.wait_for_metrics({("sessions", "a", "idle"): 1, ("logins", "a"): count})
                client.writer.close()
                async with proxy.wait_applied():
                    publish_nodes(endpoints, [second])
                await proxy.wait_for_metrics({("sessions", "a", "idle"): 0, ("commands", "ping", "a"): count})
                # The report that has this login comes after the one that has forgotten the node.
                client = await connect_logged_in(proxy)
                await proxy.wait_for_metrics({("logins", "b"): count, ("logins", "a"): count})
                client.writer.close()
