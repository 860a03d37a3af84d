"""A node that runs statements slowly or with errors, and the settings of the statement log."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

from sandbox.tidb_sim.packets import AUTOCOMMIT, IN_TRANSACTION, MySqlCommand, err, frame, ok
from tests.support.module.envoy import OK_PAYLOAD, greeting_packet
from tests.support.tidb_sim_clients import RawClient

SLOW_SECONDS = 0.2


def statement_log(path: Path | str, **changes: Any) -> dict[str, Any]:
    """Return the live settings that switch the log on, for all statements unless `changes` say otherwise."""
    settings = {
        "path": str(path),
        "format": "json",
        "threshold": 0.0,
        "sample": 1.0,
        "errors": False,
        "redact": True,
        "max_bytes": 0,
        "keep": 0,
    }
    return {"statement_log": settings | changes}


async def serve_statements(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer every command with OK, but one with `fail` with error 1064 (a handler of a node).

    A command with `slow` takes `SLOW_SECONDS`. A statement gets the id 1 when it is prepared. A transaction
    is open from `begin` to `commit`.
    """
    node = RawClient(reader, writer)
    writer.write(greeting_packet())
    await node.read_packet()
    writer.write(frame(2, OK_PAYLOAD))
    status = AUTOCOMMIT
    while True:
        _, payload = await node.read_packet()
        if b"slow" in payload:
            await asyncio.sleep(SLOW_SECONDS)
        if b"begin" in payload or b"commit" in payload:
            status = AUTOCOMMIT | (IN_TRANSACTION if b"begin" in payload else 0)
        if payload[0] == MySqlCommand.STMT_CLOSE:
            continue
        if b"fail" in payload:
            writer.write(frame(1, err(1064, "You have an error in your SQL syntax", "42000")))
        elif payload[0] == MySqlCommand.STMT_PREPARE:
            writer.write(frame(1, struct.pack("<BIHHBH", 0, 1, 0, 0, 0, 0)))
        else:
            writer.write(frame(1, ok(status)))
