"""The runner of actions and login probes: every task ends with its group, and failures are reported."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from controlplane.config.rollouts import ActionSettings
from controlplane.config.settings import Settings
from controlplane.rollouts.actions import actions, login_probe
from controlplane.rollouts.actions.action_runner import ActionRunner
from controlplane.rollouts.actions.actions import ActionContext
from controlplane.rollouts.metrics import RolloutMetrics
from controlplane.rollouts.observation import LoginResult

A = "10.0.0.1:4000"
CONTEXT = ActionContext("r1", "restart", A, 1)
ACTION = ActionSettings.model_validate({"command": ["restart"]})


class RunnerTestBed:
    """A runner whose clock stands still, and its metrics."""

    def __init__(self) -> None:
        self.term: int | None = 1
        self.wake = asyncio.Event()
        self.registry = CollectorRegistry()
        metrics = RolloutMetrics(self.registry, list)
        self.runner = ActionRunner(lambda: 5.0, lambda: self.term, metrics, self.wake)

    def count(self, result: str) -> float | None:
        labels = {"action": "restart", "result": result}
        return self.registry.get_sample_value("tidevoy_rollout_actions_total", labels)


async def fail(*_: object, **__: object) -> str:
    raise LookupError("a bug")


async def run_forever(*_: object, **__: object) -> str:
    await asyncio.Event().wait()
    return ""


async def test_unexpected_failure_of_an_action_is_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "run_action", fail)
    test_bed = RunnerTestBed()
    async with asyncio.TaskGroup() as tasks:
        test_bed.runner.start(tasks, CONTEXT, ACTION, 1)
    problem = "failed and may have been executed: internal error (LookupError)"
    assert test_bed.runner.outcomes == {CONTEXT: problem}
    assert test_bed.wake.is_set()
    assert test_bed.count("failed") == 1


async def test_unexpected_failure_of_a_login_probe_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_probe, "probe_login", fail)
    test_bed = RunnerTestBed()
    async with asyncio.TaskGroup() as tasks:
        test_bed.runner.probe_login(tasks, A, A, Settings())
    problem = "failed the login probe: internal error (LookupError)"
    assert test_bed.runner.logins == {A: LoginResult(5.0, problem)}
    assert test_bed.wake.is_set()


async def test_running_tasks_end_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "run_action", run_forever)
    monkeypatch.setattr(login_probe, "probe_login", run_forever)
    test_bed, before = RunnerTestBed(), asyncio.all_tasks()
    with pytest.RaisesGroup(ValueError):
        async with asyncio.TaskGroup() as tasks:
            test_bed.runner.start(tasks, CONTEXT, ACTION, 1)
            test_bed.runner.probe_login(tasks, A, A, Settings())
            await asyncio.sleep(0)
            assert test_bed.runner.running == {CONTEXT}
            raise ValueError
    assert asyncio.all_tasks() == before
    assert test_bed.runner.outcomes == {}
    assert test_bed.count("interrupted") == 1


async def test_lost_term_cancels_the_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "run_action", run_forever)
    test_bed = RunnerTestBed()
    async with asyncio.TaskGroup() as tasks:
        test_bed.runner.start(tasks, CONTEXT, ACTION, 1)
        await asyncio.sleep(0)
        test_bed.term = 2
    assert not test_bed.runner.running
    assert test_bed.count("interrupted") == 1
