"""What single changes spent their time on: the stages of each, and which process waited for a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.control_plane.tracing import Event


@dataclass(frozen=True, slots=True)
class Change:
    """A change that was asked for by REST; times by `time.perf_counter`.

    `passed`: the message with it was read from the control plane. `waits`: seconds that each process's main
    thread waited for a CPU from the request to the ACK.
    """

    number: int
    sent: float
    answered: float
    passed: float
    acked: float
    waits: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """From the request to the ACK."""
        return self.acked - self.sent

    @property
    def worked(self) -> float:
        """The same without the time in which one of the processes waited for a CPU."""
        return max(0.0, self.seconds - sum(self.waits.values()))


def slowest(changes: Iterable[Change], trace: Sequence[Event], most: int) -> Iterator[str]:
    """The slowest changes, each with its stages in milliseconds since the request was sent."""
    for change in sorted(changes, key=lambda change: change.seconds, reverse=True)[:most]:
        own = [
            Event("answered", change.answered),
            Event("read from the control plane", change.passed),
            Event("ACK", change.acked),
        ]
        stages = sorted([*_meanwhile(change, trace), *own], key=lambda event: event.at)
        waits = ", ".join(f"{who} {1000 * seconds:.1f}" for who, seconds in change.waits.items())
        yield (
            f"change {change.number} took {1000 * change.seconds:.1f} ms: "
            + ", ".join(_one(event, change.sent) for event in stages)
            + f"; waits for a CPU: {waits}"
        )


def _meanwhile(change: Change, trace: Sequence[Event]) -> Iterator[Event]:
    end = max(change.acked, change.answered)
    return (event for event in trace if event.at >= change.sent and event.at - event.seconds <= end)


def _one(event: Event, start: float) -> str:
    took = f" (took {1000 * event.seconds:.1f})" if event.seconds else ""
    return f"{event.what} {1000 * (event.at - start):.1f}{took}"
