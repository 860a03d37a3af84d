"""The stages of a single measured change, and which process waited for a CPU during it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.control_plane.tracing import TraceEvent


@dataclass(frozen=True, slots=True)
class MeasuredChange:
    """A change requested by REST; times are of `time.perf_counter`.

    `relayed_at`: when the message with the change was read from the control plane. `cpu_wait_seconds`: how
    long each process's main thread waited for a CPU from the request to the ACK.
    """

    number: int
    sent_at: float
    answered_at: float
    relayed_at: float
    acked_at: float
    cpu_wait_seconds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds from the request to the ACK."""
        return self.acked_at - self.sent_at

    @property
    def seconds_without_cpu_waits(self) -> float:
        """`seconds` without the time that the processes waited for a CPU."""
        return max(0.0, self.seconds - sum(self.cpu_wait_seconds.values()))


def describe_slowest(
    changes: Iterable[MeasuredChange], trace: Sequence[TraceEvent], limit: int
) -> Iterator[str]:
    """Yield a line for each of the slowest changes, with its stages in milliseconds since the request."""
    for change in sorted(changes, key=lambda change: change.seconds, reverse=True)[:limit]:
        own = [
            TraceEvent("answered", change.answered_at),
            TraceEvent("read from the control plane", change.relayed_at),
            TraceEvent("ACK", change.acked_at),
        ]
        stages = sorted([*_events_during(change, trace), *own], key=lambda event: event.at)
        waits = ", ".join(
            f"{process} {1000 * seconds:.1f}" for process, seconds in change.cpu_wait_seconds.items()
        )
        yield (
            f"change {change.number} took {1000 * change.seconds:.1f} ms: "
            + ", ".join(_format_event(event, change.sent_at) for event in stages)
            + f"; waits for a CPU: {waits}"
        )


def _events_during(change: MeasuredChange, trace: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    end = max(change.acked_at, change.answered_at)
    return (event for event in trace if event.at >= change.sent_at and event.at - event.seconds <= end)


def _format_event(event: TraceEvent, start: float) -> str:
    duration = f" (took {1000 * event.seconds:.1f})" if event.seconds else ""
    return f"{event.name} {1000 * (event.at - start):.1f}{duration}"
