"""Real servers are restarted one after the other under load, unnoticed by clients.

`make soak` restarts all servers ten times.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from sandbox.local_cluster import LocalCluster
from tests.support.soak import SOAK
from tests.support.tidb.node_operations import drain, undrain, wait_for_state
from tests.support.tidb.sessions import (
    TrackedSessions,
    connect,
    connect_directly,
    query_rows,
    query_value,
    session_port,
)
from tests.support.waiting import wait_until

CLIENTS = 6
ROUNDS = 10 if SOAK else 1
ACCOUNTS, BALANCE = 20, 1_000
_PAUSE_SECONDS = 0.01
"""Pause between two transactions of a client, so that the machine is not overloaded."""


@dataclass
class Load:
    """The number of transactions per client, and the errors of all clients."""

    transactions: list[int] = field(default_factory=lambda: [0] * CLIENTS)
    errors: list[str] = field(default_factory=list)


def run_client(port: int, database: str, number: int, load: Load, stop: threading.Event) -> None:
    """Run transactions as one client, until `stop` or an error.

    Each increments the client's counter, and transfers money between two accounts.
    """
    try:
        with connect(port, database, autocommit=False) as connection:
            query_rows(connection, f"set @me = {number}")
            query_rows(connection, "prepare mine from 'select n from counters where id = ?'")
            while not stop.is_set():
                query_rows(connection, f"update counters set n = n + 1 where id = {number}")
                assert query_value(connection, "execute mine using @me") == load.transactions[number] + 1
                # All clients lock accounts in the order of their ids, so they cannot deadlock.
                giver, taker = sorted(random.sample(range(ACCOUNTS), 2))
                amount = random.randrange(-100, 100)
                query_rows(connection, f"update accounts set balance = balance - {amount} where id = {giver}")
                query_rows(connection, f"update accounts set balance = balance + {amount} where id = {taker}")
                connection.commit()
                load.transactions[number] += 1
                stop.wait(_PAUSE_SECONDS)
    except Exception as error:
        load.errors.append(f"client {number} after {load.transactions[number]} transactions: {error!r}")


@contextmanager
def run_clients(stack: LocalCluster, database: str) -> Iterator[Load]:
    """Run clients. At the end, check that there was no error, and that no commit and no money was lost."""
    with connect_directly(stack.tidb[0], database) as root:
        query_rows(root, "create table counters (id int primary key, n int)")
        query_rows(root, "insert into counters values " + ", ".join(f"({id_}, 0)" for id_ in range(CLIENTS)))
        query_rows(root, "create table accounts (id int primary key, balance int, key (balance))")
        rows = ", ".join(f"({id_}, {BALANCE})" for id_ in range(ACCOUNTS))
        query_rows(root, f"insert into accounts values {rows}")
    load, stop = Load(), threading.Event()
    threads = [
        threading.Thread(target=run_client, args=(stack.sql_port, database, number, load, stop))
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert load.errors == []
    with connect(stack.sql_port, database) as connection:
        counters = [count for (count,) in query_rows(connection, "select n from counters order by id")]
        money = query_value(connection, "select sum(balance) from accounts")
        query_rows(connection, "admin check table counters, accounts")  # an error if an index differs
    assert counters == load.transactions
    assert money == ACCOUNTS * BALANCE


@pytest.mark.timeout(1200 if SOAK else 120)
async def test_rolling_restart_with_drains_is_invisible_to_clients(
    stack: LocalCluster, database: str, sessions: TrackedSessions
) -> None:
    idle = [sessions.through_envoy() for _ in range(6)]
    for number, session in enumerate(idle):
        query_rows(session, f"set @number = {number}")
    with run_clients(stack, database) as load:
        for node in [*stack.tidb] * ROUNDS:
            await drain(stack, node)
            assert await node.terminate() == 0
            await node.launch()
            await undrain(stack, node)
    assert min(load.transactions) > 50
    assert [query_value(session, "select @number") for session in idle] == list(range(6))


async def test_restart_without_a_drain_is_invisible_to_clients(
    stack: LocalCluster, database: str, sessions: TrackedSessions
) -> None:
    """After SIGTERM all sessions leave the server within `graceful-wait-before-shutdown`."""
    node = stack.tidb[1]
    idle = [sessions.on_node(node) for _ in range(4)]
    for number, session in enumerate(idle):
        query_rows(session, f"set @number = {number}")
        query_rows(session, "prepare doubled from 'select @number * 2'")
    with run_clients(stack, database) as load:
        await wait_until(lambda: min(load.transactions) > 0)
        transactions_before = sum(load.transactions)
        assert await node.terminate() == 0
        assert sum(load.transactions) > transactions_before
    assert [query_value(session, "execute doubled") for session in idle] == [0, 2, 4, 6]
    assert node.port not in {session_port(session) for session in idle}
    await node.launch()
    await wait_for_state(stack, node, "active")
