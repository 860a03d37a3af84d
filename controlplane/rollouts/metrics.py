"""Prometheus metrics of rollouts. Labels are limited to phases, stages and action names."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.model.rollout import Rollout, RolloutPhase, Stage

_FINAL_STAGES = (Stage.DONE, Stage.FAILED, Stage.SKIPPED)


class RolloutMetrics:
    """Counters of steps and actions, and gauges that are computed at each scrape."""

    def __init__(self, registry: CollectorRegistry, list_rollouts: Callable[[], list[Rollout]]) -> None:
        registry.register(_RolloutGauges(list_rollouts))
        self._steps = Counter(
            "tidevoy_rollout_steps_total",
            "Rollout nodes that reached a final stage, by result; each control plane counts all of them.",
            ["result"],
            registry=registry,
        )
        self._actions = Counter(
            "tidevoy_rollout_actions_total",
            "Actions that this control plane started, by result; cut_off: interrupted by the control plane.",
            ["action", "result"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tidevoy_rollout_action_duration_seconds",
            "Duration of the actions that were not interrupted.",
            ["action"],
            buckets=(0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800),
            registry=registry,
        )

    def count_steps(self, before: Rollout | None, after: Rollout) -> None:
        """Count the nodes that reached a final stage between the two records."""
        for address, step in after.steps.items():
            past = before.steps.get(address) if before is not None else None
            if step.stage in _FINAL_STAGES and (past is None or past.stage is not step.stage):
                self._steps.labels(step.stage.value).inc()

    def count_action(self, name: str, result: str, seconds: float | None = None) -> None:
        """Count an ended action; `seconds` is None if it was interrupted."""
        self._actions.labels(name, result).inc()
        if seconds is not None:
            self._seconds.labels(name).observe(seconds)


class _RolloutGauges(Collector):
    def __init__(self, list_rollouts: Callable[[], list[Rollout]]) -> None:
        self._list_rollouts = list_rollouts

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        rollouts = self._list_rollouts()
        phases = Tally(rollout.phase for rollout in rollouts)
        by_phase = GaugeMetricFamily("tidevoy_rollouts", "Stored rollouts.", labels=["phase"])
        for phase in RolloutPhase:
            by_phase.add_metric([phase.value], phases[phase])
        yield by_phase
        stages = Tally(
            step.stage for rollout in rollouts if not rollout.phase.is_over for step in rollout.steps.values()
        )
        by_stage = GaugeMetricFamily("tidevoy_rollout_nodes", "Nodes of active rollouts.", labels=["stage"])
        for stage in Stage:
            by_stage.add_metric([stage.value], stages[stage])
        yield by_stage
