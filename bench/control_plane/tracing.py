"""Runs `tidevoy` and records when it reaches each stage of a change, and what takes long meanwhile.

    python -m bench.control_plane.tracing FILE serve --config FILE

Events are kept in memory, so that they cost next to nothing, and written to FILE when the process ends,
one line of JSON each. Their times are of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sandbox.control_plane import ControlPlane

_SHORT = 0.001  # seconds; shorter garbage collections and writes to disk are not recorded
_fsync = os.fsync


class Event(NamedTuple):
    """Something that happened. `seconds`: how long it took, where that is known."""

    what: str
    at: float
    seconds: float = 0.0


class TracedControlPlane(ControlPlane):
    """A control plane whose events can be read when it has ended."""

    def command(self) -> list[str]:
        """`tidevoy serve` by way of this module."""
        words = super().command()
        return [
            sys.executable,
            "-P",
            "-m",
            "bench.control_plane.tracing",
            str(self._file),
            *words[words.index("serve") :],
        ]

    def events(self) -> list[Event]:
        """All events in the order of their times."""
        return sorted(
            (Event(*json.loads(line)) for line in self._file.read_text().splitlines()),
            key=lambda event: event.at,
        )

    @property
    def _file(self) -> Path:
        return self.directory / f"{self.name}.trace"


class _Trace:
    """Records events."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._collecting = 0.0

    def note(self, what: str, seconds: float = 0.0) -> None:
        self._events.append(Event(what, time.perf_counter(), seconds))

    def on_garbage(self, phase: str, info: dict[str, int]) -> None:
        """See `gc.callbacks`."""
        if phase == "start":
            self._collecting = time.perf_counter()
        elif (took := time.perf_counter() - self._collecting) > _SHORT:
            self.note(f"garbage of generation {info['generation']} collected", took)

    def sync(self, fd: Any) -> None:
        """`os.fsync`, which any thread may call."""
        start = time.perf_counter()
        _fsync(fd)
        if (took := time.perf_counter() - start) > _SHORT:
            self.note("synced to disk", took)

    def write(self, file: Path) -> None:
        file.write_text("".join(json.dumps(event) + "\n" for event in self._events))

    def follow(self) -> None:
        """Note the stages of a change, from the request to the message that goes to Envoy."""
        from api.auth.middleware import Doors
        from controlplane.storage.file_store import StateDirectory
        from controlplane.xds.server import XdsServer
        from controlplane.xds.stream import Stream

        os.fsync = self.sync
        self._around(Doors, "__call__", before="request received", after="request over")
        self._around(StateDirectory, "save_intents", after="intent stored")
        self._around(StateDirectory, "save_plan", before="plan is being saved", after="plan saved")
        self._around(XdsServer, "_push", before="plan decided", after="snapshot published")
        self._around(Stream, "next", after="message for Envoy")

    def _around(self, owner: type, name: str, *, before: str = "", after: str = "") -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        async def awaited(*args: Any) -> Any:
            if before:
                self.note(before)
            answer = await inner(*args)
            self.note(after)
            return answer

        def called(*args: Any) -> Any:
            if before:
                self.note(before)
            answer = inner(*args)
            if after and (answer is not None or before):  # else there was nothing to send
                self.note(after)
            return answer

        outer = awaited if asyncio.iscoroutinefunction(inner) else called
        setattr(owner, name, functools.wraps(inner)(outer))


def main() -> None:
    """The arguments: the file for the events, then the command line of `tidevoy`."""
    trace = _Trace()
    atexit.register(trace.write, Path(sys.argv.pop(1)))
    gc.callbacks.append(trace.on_garbage)
    trace.follow()
    from cli.main import main as tidevoy

    tidevoy()


if __name__ == "__main__":
    main()
