"""What the module counts, against conversations of which every packet is known."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from sandbox.tidb_sim.greeting import OFFERED, parse_greeting, requested
from sandbox.tidb_sim.packets import AUTOCOMMIT, Capability, Command, err, frame, ok
from tests.support.fake_servers import listening
from tests.support.module.bootstrap import Host, Parts
from tests.support.module.envoy import OK, admit, envoy, greets, logged_in, response, within
from tests.support.tidb_sim_clients import Raw
from tests.support.waiting import nothing_comes

IN_TRANSACTION = ok(AUTOCOMMIT | 1)
PREPARED = b"\0" + struct.pack("<IHHBH", 1, 0, 0, 0, 0)
STATES = ("login", "idle", "busy", "transaction", "opaque")


class Script:
    """A node that answers each command with what a test says next."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = await admit(reader, writer)
        while True:
            _, command = await node.packet()
            if command[0] not in (Command.STMT_CLOSE, Command.STMT_SEND_LONG_DATA, Command.QUIT):
                writer.write(await self.answers.get())

    async def ask(self, client: Raw, command: Command, body: bytes = b"", *, answer: bytes = OK) -> int:
        """One command, answered with one packet; how long the two are in bytes."""
        self.answers.put_nowait(frame(1, answer))
        await within(client.command(command, body))
        return 5 + len(body)


def standing(**counts: int) -> dict[tuple[str, ...], int]:
    """The gauge `sessions` of the node n, in full."""
    return {("sessions", "n", state): counts.get(state, 0) for state in STATES}


async def test_every_state_of_a_session(tmp_path: Path) -> None:
    script = Script()
    async with listening(script) as node, envoy(tmp_path, [Host(node.endpoint, "n")], workers=2) as proxy:
        instance = await proxy.instance()
        assert len(bytes.fromhex(instance)) == 8
        await proxy.reports({("module_info", instance, "0.1.0"): 1})
        client = await proxy.client()
        greeting = await within(client.packet())
        assert greeting[1][0] == 10
        await proxy.reports(standing(login=1))
        client.writer.write(response())
        assert (await within(client.packet()))[1][0] == 0
        await proxy.reports(standing(idle=1) | {("logins", "n"): 1})
        client.writer.write(frame(0, bytes((Command.QUERY,)) + b"begin"))
        await proxy.reports(standing(busy=1))
        script.answers.put_nowait(frame(1, IN_TRANSACTION))
        await within(client.packet())
        await proxy.reports(standing(transaction=1) | {("sessions_pinned", "n", "transaction"): 1})
        await script.ask(client, Command.QUERY, b"commit")
        await proxy.reports(standing(idle=1) | {("sessions_pinned", "n", "transaction"): 0})
        # A parameter that was sent ahead holds the session, idle as it is.
        await script.ask(client, Command.STMT_PREPARE, b"select 1", answer=PREPARED)
        client.writer.write(
            frame(0, bytes((Command.STMT_SEND_LONG_DATA,)) + struct.pack("<IH", 1, 0) + b"data")
        )
        await proxy.reports(standing(idle=1) | {("sessions_pinned", "n", "long_data"): 1})
        await script.ask(client, Command.RESET_CONNECTION)
        await proxy.reports(standing(idle=1) | {("sessions_pinned", "n", "long_data"): 0})
        # Nobody asked for this.
        node.writers[0].write(frame(0, OK))
        await within(client.packet())
        await proxy.reports(standing(opaque=1) | {("sessions_pinned", "n", "opaque"): 1})
        client.writer.close()
        await proxy.reports(standing() | {("sessions_pinned", "n", "opaque"): 0})


async def test_commands_errors_and_bytes_are_counted(tmp_path: Path) -> None:
    script = Script()
    async with listening(script) as node, envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await logged_in(proxy)
        sent = received = 0

        async def ask(command: Command, body: bytes = b"", answer: bytes = OK) -> None:
            nonlocal sent, received
            sent += await script.ask(client, command, body, answer=answer)
            received += 4 + len(answer)

        for query in (b"set @a=1", b"begin", b"rollback"):
            await ask(Command.QUERY, query)
        await ask(Command.PING)
        await ask(Command.STMT_PREPARE, b"select 1", PREPARED)
        await ask(Command.STMT_EXECUTE, struct.pack("<IBI", 1, 0, 1))
        await ask(Command.RESET_CONNECTION)
        await ask(Command.INIT_DB, b"mysql")
        closing = frame(0, bytes((Command.STMT_CLOSE,)) + struct.pack("<I", 1))
        client.writer.write(closing)
        sent += len(closing)
        classes = {
            "access": (1044, 1045, 1142),
            "deadlock": (1213, 1205, 8022, 9007),
            "shutdown": (1053,),
            "killed": (1317,),
            "limit": (1226, 8175),
            "cluster": (9001, 9005),
            "syntax": (1064, 1146),
            "other": (1062, 1105),
        }
        for codes in classes.values():
            for code in codes:
                await ask(Command.QUERY, b"do 1", err(code, "text", "HY000"))
        failed = sum(map(len, classes.values()))
        ended = 8 + failed
        await proxy.reports(
            {
                ("commands", "query", "n"): 3 + failed,
                ("commands", "ping", "n"): 1,
                ("commands", "prepare", "n"): 1,
                ("commands", "execute", "n"): 1,
                ("commands", "reset", "n"): 1,
                ("commands", "other", "n"): 2,
                ("commands", "change_user", "n"): 0,
                ("bytes", "to_node", "n"): sent,
                ("bytes", "to_client", "n"): received,
                ("command_seconds_bucket", "+Inf", "n"): ended,
            }
            | {("errors", name, "n"): len(codes) for name, codes in classes.items()}
        )


async def test_how_long_commands_take(tmp_path: Path) -> None:
    script = Script()
    async with listening(script) as node, envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await logged_in(proxy)
        for _ in range(5):
            await script.ask(client, Command.PING)
        client.writer.write(frame(0, bytes((Command.QUERY,)) + b"select sleep(0.6)"))
        await nothing_comes(client.reader, 0.6)
        script.answers.put_nowait(frame(1, OK))
        await within(client.packet())
        await proxy.reports({("command_seconds_bucket", "+Inf", "n"): 6})
        told = await proxy.metrics()
        buckets = {
            float(labels[0]): value for (name, labels), value in told.items() if name.endswith("_bucket")
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
        assert [buckets[end] for end in sorted(buckets)] == sorted(buckets.values())
        assert buckets.get(0.5, 0) <= 5 <= buckets[10.0] - 1
        microseconds = told["command_microseconds", ("n",)]
        assert 590_000 <= microseconds < 20_000_000


async def test_commands_sent_ahead_are_timed_one_by_one(tmp_path: Path) -> None:
    script = Script()
    async with listening(script) as node, envoy(tmp_path, [Host(node.endpoint, "n")]) as proxy:
        client = await logged_in(proxy)
        client.writer.write(frame(0, b"\x0e") * 3)
        for _ in range(3):
            await nothing_comes(client.reader, 0.3)
            script.answers.put_nowait(frame(1, OK))
            await within(client.packet())
        await proxy.reports(
            {("command_seconds_bucket", "+Inf", "n"): 3, ("command_seconds_bucket", "0.25", "n"): 0}
        )
        # Not 0.3 + 0.6 + 0.9 s.
        assert (await proxy.metrics())["command_microseconds", ("n",)] >= 850_000


async def test_counts_are_of_the_node_that_they_are_about(tmp_path: Path) -> None:
    one, two = Script(), Script()
    async with listening(one) as a, listening(two) as b:
        hosts = [Host(a.endpoint, "a"), Host(b.endpoint, "b.example:4000")]
        async with envoy(tmp_path, hosts, workers=2) as proxy:
            for _ in range(6):
                await logged_in(proxy)
            for client in proxy.clients:
                for script in (one, two):
                    script.answers.put_nowait(frame(1, OK))
                await within(client.command(Command.PING))
            await proxy.reports(
                {("commands", "ping", name): 3 for name in ("a", "b.example:4000")}
                | {("logins", name): 3 for name in ("a", "b.example:4000")}
                | {("sessions", name, "idle"): 3 for name in ("a", "b.example:4000")}
            )


@pytest.mark.parametrize("asked", [Capability.COMPRESS, Capability(1 << 26)], ids=["zlib", "zstd"])
async def test_compressed_sessions_cannot_be_followed(tmp_path: Path, asked: Capability) -> None:
    capabilities = asked | Capability.PROTOCOL_41 | Capability.SECURE_CONNECTION
    claimed: list[Capability] = []

    async def compresses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = Raw(reader, writer)
        writer.write(greets(offered=OFFERED | asked))
        _, login = await node.packet()
        claimed.append(requested(login))
        writer.write(frame(2, OK))

    async with (
        listening(compresses) as node,
        envoy(tmp_path, [Host(node.endpoint, "n")], Parts(client={"compression": "passthrough"})) as proxy,
    ):
        client = await proxy.client()
        _, greeting = await within(client.packet())
        assert asked in parse_greeting(greeting).capabilities
        client.writer.write(response(capabilities))
        assert (await within(client.packet()))[1][0] == 0
        await proxy.reports(standing(opaque=1))
        assert asked in claimed[0]
