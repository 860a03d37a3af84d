"""Write captured traffic as the module does: TiProxy's native format, and a results file beside it."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

START_NS = 1_795_818_400_000_000_000
_STAMP = "2026-11-27T22-27-02.123"


@dataclass(frozen=True)
class CapturedCommand:
    """One command of a client, and what the server answered."""

    conn: int
    payload: bytes = b""
    command: str = "Query"
    at_ms: int = 0
    prepared_id: int = 0
    prepared_text: str = ""
    is_success: bool = True
    user: str = "app"
    database: str = ""
    digest: str | None = None

    @property
    def time_ns(self) -> int:
        return START_NS + self.at_ms * 1_000_000

    def encode(self) -> bytes:
        """Return the record."""
        seconds, nanoseconds = divmod(self.time_ns, 1_000_000_000)
        time = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        lines = [f"# Time: {time}.{nanoseconds:09}Z", f"# Conn_ID: {self.conn}"]
        if self.command != "Query":
            lines.append(f"# Cmd_type: {self.command}")
        if not self.is_success:
            lines.append("# Success: false")
        if self.prepared_id:
            lines.append(f"# Captured_ps_id: {self.prepared_id}")
        if self.prepared_text:
            lines.append(f"# Prepared_stmt: {json.dumps(self.prepared_text)}")
        lines.append(f"# Payload_len: {len(self.payload)}")
        return "\n".join(lines).encode() + b"\n" + self.payload + b"\n"

    def result(self) -> dict[str, Any]:
        """Return the line of the results file."""
        return {
            "conn": self.conn,
            "time": self.time_ns,
            "us": 100,
            "rows": 0,
            "bytes": 11,
            "error": 0,
            "checksum": None,
            "digest": self.digest,
            "user": self.user,
            "database": self.database,
            "node": "tidb-0:4000",
        }


@dataclass
class Capture:
    """Commands in the order in which they end. By default each begins 1 ms after the one before it."""

    commands: list[CapturedCommand] = field(default_factory=list)

    def add(self, conn: int, text: str | bytes = b"", command: str = "Query", **more: Any) -> Self:
        """Add a command; `more`: fields of CapturedCommand."""
        payload = text.encode() if isinstance(text, str) else text
        next_ms = self.commands[-1].at_ms + 1 if self.commands else 0
        added = CapturedCommand(conn, payload, command, at_ms=next_ms)
        self.commands.append(replace(added, **more))
        return self

    def prepare(self, conn: int, statement_id: int, text: str, **more: Any) -> Self:
        return self.add(conn, text, "StmtPrepare", prepared_id=statement_id, **more)

    def execute(self, conn: int, statement_id: int, number: int, **more: Any) -> Self:
        """Execute a statement that has one parameter, a number."""
        payload = struct.pack("<IBI", statement_id, 0, 1) + b"\0\1\x08\0" + struct.pack("<q", number)
        return self.add(conn, payload, "StmtExecute", prepared_id=statement_id, **more)

    def write(self, directory: Path, *, has_results: bool = True) -> Path:
        """Write the files into `directory`, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        records = b"".join(command.encode() for command in self.commands)
        (directory / f"traffic-{_STAMP}.log.gz").write_bytes(gzip.compress(records))
        if has_results:
            lines = "".join(json.dumps(command.result()) + "\n" for command in self.commands)
            (directory / f"results-{_STAMP}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return directory


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Read all results files in `directory`, by connection and time."""
    lines: Iterable[str] = (
        line
        for file in sorted(directory.glob("results-*.jsonl.gz*"))
        for line in gzip.decompress(file.read_bytes()).decode().splitlines()
    )
    return sorted((json.loads(line) for line in lines), key=lambda result: (result["conn"], result["time"]))
