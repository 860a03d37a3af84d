"""The settings of a capture, and what its files contain."""

from __future__ import annotations

import gzip
import io
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPTURE_SECONDS = 600.0


def capture(directory: Path, name: str = "test", **changes: Any) -> dict[str, Any]:
    """Return the live settings that capture all traffic to `directory`, unless `changes` say otherwise."""
    settings = {
        "name": name,
        "directory": str(directory),
        "until": time.time() + CAPTURE_SECONDS,
        "users": [],
        "groups": [],
        "max_bytes": 0,
        "envoy": "e/1",
    }
    return {"capture": settings | changes}


@dataclass(frozen=True)
class CapturedRecord:
    """A record of a traffic file. `command` has the name that the format gives it."""

    time: str
    connection: int
    command: str
    payload: bytes
    is_success: bool
    prepared_id: int
    prepared_text: str


def capture_files(directory: Path, name: str = "test") -> list[Path]:
    """Return the traffic files, in the order of their names, which is the order of time here."""
    return sorted((directory / name).glob("*/traffic-*"))


def read_records(file: Path) -> list[CapturedRecord]:
    """Read a traffic file up to the end of its last whole gzip member."""
    content, records = io.BytesIO(_decompress(file)), []
    while line := content.readline():
        keys: dict[str, str] = {}
        while "Payload_len" not in keys:
            key, colon, value = line.decode().rstrip("\n").removeprefix("# ").partition(": ")
            assert line[:2].decode() + colon == "# : ", line
            keys[key] = value
            line = b"" if key == "Payload_len" else content.readline()
        payload = content.read(int(keys["Payload_len"]))
        assert content.read(1) == b"\n"
        records.append(
            CapturedRecord(
                keys["Time"],
                int(keys["Conn_ID"]),
                keys.get("Cmd_type", "Query"),
                payload,
                keys.get("Success", "true") == "true",
                int(keys.get("Captured_ps_id", "0")),
                json.loads(keys.get("Prepared_stmt", '""')),
            )
        )
    return records


def read_results(traffic_file: Path) -> list[dict[str, Any]]:
    """Read the results file beside a traffic file."""
    name = traffic_file.name.replace("traffic-", "results-").replace(".log.gz", ".jsonl.gz")
    return [json.loads(line) for line in _decompress(traffic_file.with_name(name)).splitlines()]


def read_all_records(directory: Path, name: str = "test") -> list[CapturedRecord]:
    """Read all traffic files of a capture."""
    return [record for file in capture_files(directory, name) for record in read_records(file)]


def _decompress(file: Path) -> bytes:
    content = bytearray()
    with gzip.open(file) as stream:
        try:
            while piece := stream.read(1 << 20):
                content += piece
        except EOFError:
            assert file.suffix == ".open", file
    return bytes(content)
