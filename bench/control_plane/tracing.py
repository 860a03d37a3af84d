"""Run `tidevoy` and record when it reaches each stage of a change, and slow operations meanwhile.

    python -m bench.control_plane.tracing FILE serve --config FILE

Events are kept in memory, so that they cost almost nothing, and written to FILE when the process exits, one
line of JSON each. Their times are of `time.perf_counter`, which all processes of a machine share.
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

from sandbox.control_plane import ControlPlaneProcess

_MIN_RECORDED_SECONDS = 0.001  # shorter garbage collections and writes to disk are not recorded
_original_fsync = os.fsync


class TraceEvent(NamedTuple):
    """An event. `seconds`: its duration if known, else 0."""

    name: str
    at: float
    seconds: float = 0.0


class TracedControlPlane(ControlPlaneProcess):
    """A control plane whose trace events can be read after it has exited."""

    def command(self) -> list[str]:
        """Return the command that runs `tidevoy serve` through this module."""
        arguments = super().command()
        return [
            sys.executable,
            "-P",
            "-m",
            "bench.control_plane.tracing",
            str(self._trace_file),
            *arguments[arguments.index("serve") :],
        ]

    def events(self) -> list[TraceEvent]:
        """Return all events in the order of their times."""
        return sorted(
            (TraceEvent(*json.loads(line)) for line in self._trace_file.read_text().splitlines()),
            key=lambda event: event.at,
        )

    @property
    def _trace_file(self) -> Path:
        return self.directory / f"{self.name}.trace"


class _TraceRecorder:
    """Records events in memory."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._gc_started_at = 0.0

    def record(self, name: str, seconds: float = 0.0) -> None:
        self._events.append(TraceEvent(name, time.perf_counter(), seconds))

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        """Record a slow garbage collection (a callback of `gc.callbacks`)."""
        if phase == "start":
            self._gc_started_at = time.perf_counter()
        elif (seconds := time.perf_counter() - self._gc_started_at) > _MIN_RECORDED_SECONDS:
            self.record(f"garbage of generation {info['generation']} collected", seconds)

    def timed_fsync(self, fd: Any) -> None:
        """Replace `os.fsync` and record slow calls. Any thread may call it."""
        start = time.perf_counter()
        _original_fsync(fd)
        if (seconds := time.perf_counter() - start) > _MIN_RECORDED_SECONDS:
            self.record("synced to disk", seconds)

    def write(self, file: Path) -> None:
        file.write_text("".join(json.dumps(event) + "\n" for event in self._events))

    def instrument(self) -> None:
        """Record the stages of a change, from the REST request to the message for Envoy."""
        from api.auth.middleware import AuthMiddleware
        from controlplane.storage.file_store import FileStore
        from controlplane.xds.server import XdsServer
        from controlplane.xds.stream import Stream

        os.fsync = self.timed_fsync
        self._wrap_method(
            AuthMiddleware, AuthMiddleware.__call__.__name__, before="request received", after="request over"
        )
        self._wrap_method(FileStore, FileStore.save_intents.__name__, after="intent stored")
        self._wrap_method(
            FileStore, FileStore.save_plan.__name__, before="plan is being saved", after="plan saved"
        )
        self._wrap_method(
            XdsServer, XdsServer._push.__name__, before="plan decided", after="snapshot published"
        )
        self._wrap_method(Stream, Stream.next_message.__name__, after="message for Envoy")

    def _wrap_method(self, cls: type, name: str, *, before: str = "", after: str = "") -> None:
        method: Callable[..., Any] = getattr(cls, name)

        async def async_wrapper(*args: Any) -> Any:
            if before:
                self.record(before)
            result = await method(*args)
            self.record(after)
            return result

        def sync_wrapper(*args: Any) -> Any:
            if before:
                self.record(before)
            result = method(*args)
            if after and (result is not None or before):  # None: there was nothing to send
                self.record(after)
            return result

        wrapper = async_wrapper if asyncio.iscoroutinefunction(method) else sync_wrapper
        setattr(cls, name, functools.wraps(method)(wrapper))


def main() -> None:
    """Run `tidevoy` with tracing. Arguments: the file for the events, then the command line of `tidevoy`."""
    trace = _TraceRecorder()
    atexit.register(trace.write, Path(sys.argv.pop(1)))
    gc.callbacks.append(trace.on_gc)
    trace.instrument()
    from cli.main import main as tidevoy

    tidevoy()


if __name__ == "__main__":
    main()
