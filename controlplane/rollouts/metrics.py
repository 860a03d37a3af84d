"""Prometheus metrics of rollouts. Labels are limited to phases, stages and action names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.model.rollout import Rollout, RolloutPhase, Stage


class RolloutMetrics:
    """Counters of steps and actions, and gauges that are computed at each scrape."""

    def __init__(self, registry: CollectorRegistry, list_rollouts: Callable[[], list[Rollout]]) -> None:
        self._list_rollouts = list_rollouts
        rollouts = Gauge("tidevoy_rollouts", "Stored rollouts.", ["phase"], registry=registry)
        for phase in RolloutPhase:
            rollouts.labels(phase.value).set_function(partial(self._count_rollouts, phase))
        nodes = Gauge("tidevoy_rollout_nodes", "Nodes of active rollouts.", ["stage"], registry=registry)
        for stage in Stage:
            nodes.labels(stage.value).set_function(partial(self._count_nodes, stage))
        self._steps = Counter(
            "tidevoy_rollout_steps_total",
            "Rollout nodes that reached a final stage, by result; each control plane counts all of them.",
            ["result"],
            registry=registry,
        )
        self._actions = Counter(
            "tidevoy_rollout_actions_total",
            "Actions that this control plane started, by result; interrupted: stopped by the control plane.",
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
            if step.stage.is_final and (before is None or before.steps[address].stage is not step.stage):
                self._steps.labels(step.stage.value).inc()

    def count_action(self, name: str, problem: str | None, seconds: float) -> None:
        """Count an ended action; `problem` is empty if it succeeded, and None if it was interrupted."""
        if problem is None:
            self._actions.labels(name, "interrupted").inc()
            return
        self._actions.labels(name, "failed" if problem else "ok").inc()
        self._seconds.labels(name).observe(seconds)

    def _count_rollouts(self, phase: RolloutPhase) -> int:
        return sum(rollout.phase is phase for rollout in self._list_rollouts())

    def _count_nodes(self, stage: Stage) -> int:
        active = [rollout for rollout in self._list_rollouts() if not rollout.phase.is_over]
        return sum(step.stage is stage for rollout in active for step in rollout.steps.values())
