"""A session that sends a small statement repeatedly, and the latencies of its statements.

`python -m bench.migration.stopwatch` is a separate program, so that nothing else in a benchmark delays it.
Its statement queries CONNECTION_ID(), whose value changes when the session migrates. On SIGTERM, the program
prints its measurements as the last line and exits.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pymysql

from sandbox.child_process import ChildProcess, ProcessFailed, describe_exit

_READY_LINE = "ready"
_ANSWER_TIMEOUT_SECONDS = 60
_START_STOP_TIMEOUT_SECONDS = 30.0  # until the program is ready, and until it has stopped
_POLL_SECONDS = 0.02


class TimedStatement(NamedTuple):
    """One statement: when it was sent (time.monotonic), and its latency in seconds.

    `migrated`: the session has migrated since the previous response.
    """

    sent_at: float
    seconds: float
    migrated: bool


class TimeWindow(NamedTuple):
    begin: float
    end: float

    def overlaps(self, statement: TimedStatement) -> bool:
        return statement.sent_at < self.end and statement.sent_at + statement.seconds > self.begin


def statements_during(
    statements: Iterable[TimedStatement], windows: Sequence[TimeWindow], *, inside: bool = True
) -> list[TimedStatement]:
    """Return the statements that overlap with any of the windows; with `inside=False`, those that do not."""
    return [
        statement
        for statement in statements
        if any(window.overlaps(statement) for window in windows) is inside
    ]


def latencies_ms(statements: Iterable[TimedStatement]) -> list[float]:
    """Return the latencies in milliseconds, slowest first."""
    return sorted((statement.seconds * 1000 for statement in statements), reverse=True)


def slowest_ms(statements: Iterable[TimedStatement]) -> float:
    """Return the highest latency in milliseconds; 0 without statements."""
    return max(latencies_ms(statements), default=0.0)


@asynccontextmanager
async def run_stopwatch(
    port: int, directory: Path, *, interval: float = 0.001, ca: Path | None = None
) -> AsyncIterator[ChildProcess]:
    """Run a stopwatch against 127.0.0.1:`port` with one statement per `interval` seconds; `ca` enables TLS.

    Use `stop_stopwatch` to get its statements. Raises ProcessFailed if the login fails, and TimeoutError.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "bench.migration.stopwatch",
        f"--port={port}",
        f"--every={interval}",
    ]
    command += [f"--ca={ca}"] if ca is not None else []
    process = ChildProcess("stopwatch", command, directory=directory)
    try:
        async with asyncio.timeout(_START_STOP_TIMEOUT_SECONDS):
            while _READY_LINE not in process.output():
                if process.returncode is not None:
                    raise ProcessFailed("the stopwatch", describe_exit(process.returncode), process.tail())
                await asyncio.sleep(_POLL_SECONDS)
        yield process
    finally:
        await process.kill()  # no effect if the process has exited


async def stop_stopwatch(process: ChildProcess) -> list[TimedStatement]:
    """Stop a stopwatch and return all statements. Raises ProcessFailed on any error."""
    code = await process.terminate(_START_STOP_TIMEOUT_SECONDS)
    if code != 0:
        raise ProcessFailed("the stopwatch", describe_exit(code), process.tail(3)[-2000:])
    return [TimedStatement(*timing) for timing in json.loads(process.output().splitlines()[-1])]


def _query_connection_id(session: pymysql.Connection) -> int:
    with session.cursor() as cursor:
        cursor.execute("select connection_id()")
        ((connection_id,),) = cursor.fetchall()
        return int(connection_id)


def _measure(
    session: pymysql.Connection, interval: float, stop_requested: Sequence[object]
) -> list[TimedStatement]:
    """Send one statement per `interval` seconds until `stop_requested` is not empty."""
    statements: list[TimedStatement] = []
    due, last_id = time.monotonic(), _query_connection_id(session)
    while not stop_requested:
        sent_at = time.monotonic()
        connection_id = _query_connection_id(session)
        now = time.monotonic()
        statements.append(TimedStatement(sent_at, now - sent_at, connection_id != last_id))
        last_id = connection_id
        due = max(due + interval, now)
        time.sleep(due - now)
    return statements


def main() -> None:
    """Run the stopwatch: print `ready` after the login, and one line of JSON at the end."""
    parser = argparse.ArgumentParser(prog="python -m bench.migration.stopwatch", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--every", type=float, required=True, help="seconds between two statements")
    parser.add_argument("--ca", help="use TLS and trust this CA file (PEM)")
    options = parser.parse_args()
    stop_requested: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_requested.append(number))
    try:
        session = pymysql.connect(
            host="127.0.0.1",
            port=options.port,
            user="root",
            ssl_ca=options.ca,
            ssl_verify_cert=options.ca is not None,
            ssl_disabled=options.ca is None,
            autocommit=None,  # do not send SET autocommit
            read_timeout=_ANSWER_TIMEOUT_SECONDS,
        )
        gc.disable()  # its pauses would be attributed to the proxy
        print(_READY_LINE, flush=True)
        statements = _measure(session, options.every, stop_requested)
    except (pymysql.Error, OSError) as error:
        sys.exit(f"stopwatch: {error}")
    print(json.dumps(statements))


if __name__ == "__main__":
    main()
