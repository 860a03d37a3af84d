"""A simulation for the rollout state machine: nodes, intents, a durable record, a controller that crashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from controlplane.intents import changes as intent_changes
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import State
from controlplane.model.rollout import Rollout, RolloutSpec, Stage, Step
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import RolloutNodeView, RolloutView, VerificationResult
from controlplane.rollouts.state_machine import Effects

OLD_VERSION, NEW_VERSION = "v8.5.3", "v8.5.4"
ROLLOUT_ID = "r1"
NOW = 2000.0
"""The time at which tests advance a rollout."""


def rollout_spec(*nodes: str, **more: object) -> RolloutSpec:
    """Return a spec with an action and the new version. `more` overrides its fields."""
    values: dict[str, object] = {"action": "restart", "version": NEW_VERSION, "healthy_for": 10.0, **more}
    return RolloutSpec(nodes, **values)  # type: ignore[arg-type]


def rollout_with_steps(spec: RolloutSpec, *steps: Step, **more: object) -> Rollout:
    """Return a rollout that already has these steps."""
    new = state_machine.create(ROLLOUT_ID, spec, "alice", 0.0)
    all_steps = {**new.steps, **{step.address: step for step in steps}}
    return replace(new, steps=MappingProxyType(all_steps), **more)  # type: ignore[arg-type]


def node_view(**more: object) -> RolloutNodeView:
    """Return a node that has been in service since its start at time 100."""
    values: dict[str, object] = {
        "state": State.ACTIVE,
        "sessions": 5,
        "started_at": 100.0,
        "version": OLD_VERSION,
        "healthy_since": 0.0,
        "greeted_at": 1e9,
        "is_warmed_up": True,
        **more,
    }
    return RolloutNodeView(**values)  # type: ignore[arg-type]


def drained_node_view(owner: str = ROLLOUT_ID, **more: object) -> RolloutNodeView:
    """Return a drained node without sessions."""
    values: dict[str, object] = {
        "state": State.DRAINED,
        "is_empty": True,
        "sessions": 0,
        "is_warmed_up": False,
        **more,
    }
    return node_view(drain=DrainIntent(0.0, 600.0, owner=owner), **values)


def returned_view(**more: object) -> RolloutNodeView:
    """Return a node after its restart: drained, with the new version, and healthy for long enough."""
    values: dict[str, object] = {
        "started_at": NOW - 30,
        "version": NEW_VERSION,
        "healthy_since": NOW - 20,
        **more,
    }
    return drained_node_view(ROLLOUT_ID, **values)


def rollout_view(nodes: Mapping[str, RolloutNodeView], **more: object) -> RolloutView:
    """Return a view of these nodes and of one other node, which is active."""
    values: dict[str, object] = {
        "active": {a: "" for a, n in nodes.items() if n.state is State.ACTIVE} | {"other": ""},
        "owned_drains": frozenset(
            a for a, n in nodes.items() if n.drain is not None and n.drain.owner == ROLLOUT_ID
        ),
        "observing_since": -1000.0,
        **more,
    }
    return RolloutView(nodes, **values)  # type: ignore[arg-type]


@dataclass
class SimulatedServer:
    """The real state of a node."""

    started_at: float = 100.0
    version: str = OLD_VERSION
    healthy: bool = True
    steady_since: float = 0.0
    sessions: int = 3


@dataclass
class RolloutSimulation:
    """A simulated cluster. Servers, intents and the record survive a crash; what runs does not."""

    record: Rollout
    servers: dict[str, SimulatedServer]
    now: float = 1000.0
    intents: Intents = field(default_factory=Intents)
    observing_since: float = 1000.0
    running_actions: dict[tuple[str, int], bool] = field(default_factory=dict)
    """For each running action, whether it has restarted its node."""
    action_results: dict[tuple[str, int], str] = field(default_factory=dict)
    started_actions: list[tuple[str, int]] = field(default_factory=list)
    """All actions started so far."""
    running_verifications: set[tuple[str, float]] = field(default_factory=set)
    """The address, and when its step began to be verified."""
    verification_results: dict[tuple[str, float], VerificationResult] = field(default_factory=dict)

    def view(self) -> RolloutView:
        """Return what the rollout sees now."""
        nodes = {
            address: self._node_view(address) for address in self.record.steps if address in self.servers
        }
        drains = self.intents.drains
        return RolloutView(
            nodes,
            observing_since=self.observing_since,
            unavailable={
                a: f"{a} is unhealthy"
                for a, server in self.servers.items()
                if not server.healthy and (a not in drains or drains[a].owner not in ("", ROLLOUT_ID))
            },
            active={a: "" for a, s in self.servers.items() if s.healthy and a not in drains},
            owned_drains=frozenset(a for a, drain in drains.items() if drain.owner == ROLLOUT_ID),
        )

    def _node_view(self, address: str) -> RolloutNodeView:
        server, drain = self.servers[address], self.intents.drains.get(address)
        if drain is not None:
            state = State.DRAINED if not server.sessions else State.DRAINING
        else:
            state = State.ACTIVE if server.healthy else State.UNHEALTHY
        return RolloutNodeView(
            state=state,
            is_empty=not server.sessions,
            sessions=server.sessions,
            started_at=server.started_at,
            version=server.version,
            drain=drain,
            healthy_since=server.steady_since if server.healthy else None,
            failure="" if server.healthy else "does not pass its checks",
            greeted_at=self.now if server.healthy else None,
            is_warmed_up=state is State.ACTIVE,
        )

    def advance_time(self, seconds: float) -> None:
        """Advance the clock. Remove the sessions of drained nodes."""
        self.now += seconds
        for address in self.intents.drains:
            if address in self.servers:
                self.servers[address].sessions = 0

    def run_once(self, *, crashes: bool = False) -> None:
        """Run the controller once. With `crashes`, it crashes after writing the record, before any effect."""
        current = self.record
        for address, step in current.steps.items():
            key = (address, step.attempts)
            if step.stage is Stage.STARTED and key not in self.running_actions:
                problem = self.action_results.pop(key, None)
                current = state_machine.action_ended(current, *key, problem, self.now)
        for (address, since), result in self.verification_results.items():
            current = state_machine.verification_ended(current, address, since, result, self.now)
        self.verification_results.clear()
        self.record, effects = state_machine.advance(current, self.view(), self.now)
        if crashes:
            self.crash()
            return
        self._execute(effects)

    def _execute(self, effects: Effects) -> None:
        for address in effects.undrain:
            assert not any(address == node for node, _ in self.running_actions), "the action still runs"
            self.intents = intent_changes.undrain(self.intents, address, owner=ROLLOUT_ID)
        for address in effects.drain:
            self.intents = intent_changes.drain(self.intents, address, self.now, 600.0, owner=ROLLOUT_ID)
        for address in effects.run_action:
            assert address in self.intents.drains, "an action started on a node that is not drained"
            key = (address, self.record.steps[address].attempts)
            self.started_actions.append(key)
            self.running_actions[key] = False
        self.running_verifications = {(a, self.record.steps[a].since) for a in effects.verify}
        for address in effects.verify:
            step = self.record.steps[address]
            assert step.started_before is not None
            assert self.servers[address].started_at > step.started_before, "it was not restarted"

    def crash(self) -> None:
        """Crash the control plane. Its successor continues from the durable state."""
        self.running_actions.clear()
        self.action_results.clear()
        self.running_verifications.clear()
        self.verification_results.clear()
        self.observing_since = self.now

    def restart_server(self, address: str, version: str = NEW_VERSION) -> None:
        self.servers[address] = SimulatedServer(
            started_at=self.now, version=version, steady_since=self.now, sessions=0
        )

    def finish_action(self, key: tuple[str, int], problem: str = "") -> None:
        del self.running_actions[key]
        self.action_results[key] = problem

    def finish_verification(self, key: tuple[str, float], result: VerificationResult) -> None:
        self.running_verifications.remove(key)
        self.verification_results[key] = result

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages of all steps."""
        return {address: step.stage for address, step in self.record.steps.items()}
