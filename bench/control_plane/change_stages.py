"""What single changes spent their time on: the stages of each, and which process waited for a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.control_plane.tracing import TraceEvent


@dataclass(frozen=True, slots=True)
class MeasuredChange:
    """A change that was asked for by REST; times by `time.perf_counter`.

    `passed`: the message with it was read from the control plane. `waits`: seconds that each process's main
    thread waited for a CPU from the request to the ACK.
    """

    number: int
    sent_at: float
    answered_at: float
    relayed_at: float
    acked_at: float
    cpu_wait_seconds: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the request to the ACK."""
        return self.acked_at - self.sent_at

    @property
    def seconds_without_cpu_waits(self) -> float:
        """The same without the time in which one of the processes waited for a CPU."""
        return max(0.0, self.seconds - sum(self.cpu_wait_seconds.values()))


def describe_slowest(
    changes: Iterable[MeasuredChange], trace: Sequence[TraceEvent], limit: int
) -> Iterator[str]:
    """The slowest changes, each with its stages in milliseconds since the request was sent."""
    for change in sorted(changes, key=lambda change: change.seconds, reverse=True)[:limit]:
        own = [
            TraceEvent("answered", change.answered_at),
            TraceEvent("read from the control plane", change.relayed_at),
            TraceEvent("ACK", change.acked_at),
        ]
        stages = sorted([*_events_during(change, trace), *own], key=lambda event: event.at)
        waits = ", ".join(f"{who} {1000 * seconds:.1f}" for who, seconds in change.cpu_wait_seconds.items())
        yield (
            f"change {change.number} took {1000 * change.seconds:.1f} ms: "
            + ", ".join(_format_event(event, change.sent_at) for event in stages)
            + f"; waits for a CPU: {waits}"
        )


def _events_during(change: MeasuredChange, trace: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    end = max(change.acked_at, change.answered_at)
    return (event for event in trace if event.at >= change.sent_at and event.at - event.seconds <= end)


def _format_event(event: TraceEvent, start: float) -> str:
    took = f" (took {1000 * event.seconds:.1f})" if event.seconds else ""
    return f"{event.name} {1000 * (event.at - start):.1f}{took}"
