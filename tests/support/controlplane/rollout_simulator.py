"""A small world for the rollout machine: nodes, intents, a durable record, and a runner that may die."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from controlplane.intents import changes as intent_changes
from controlplane.model.intents import DrainIntent, Intents
from controlplane.model.nodes import State
from controlplane.model.rollout import Rollout, RolloutSpec, Stage, Step
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import RolloutNodeView, RolloutView
from controlplane.rollouts.state_machine import Effect, RunAction, UndrainNode

OLD_VERSION, NEW_VERSION = "v8.5.3", "v8.5.4"
ROLLOUT_ID = "r1"


def rollout_spec(*nodes: str, **more: object) -> RolloutSpec:
    """An order with an action, for the new version, unless said otherwise."""
    said: dict[str, object] = {"action": "restart", "version": NEW_VERSION, "healthy_for": 10.0, **more}
    return RolloutSpec(nodes, **said)  # type: ignore[arg-type]


def rollout_with_steps(wanted: RolloutSpec, *steps: Step, **more: object) -> Rollout:
    """A rollout that has these steps already."""
    fresh = state_machine.create(ROLLOUT_ID, wanted, "alice", 0.0)
    known = {**fresh.steps, **{step.address: step for step in steps}}
    return replace(fresh, steps=MappingProxyType(known), **more)  # type: ignore[arg-type]


def node_view(**more: object) -> RolloutNodeView:
    """A node that has been in service since it started at 100, long ago."""
    said: dict[str, object] = {
        "state": State.ACTIVE,
        "sessions": 5,
        "started_at": 100.0,
        "version": OLD_VERSION,
        "healthy_since": 0.0,
        "greeted_at": 1e9,
        "is_warmed_up": True,
        **more,
    }
    return RolloutNodeView(**said)  # type: ignore[arg-type]


def drained_node_view(owner: str = ROLLOUT_ID, **more: object) -> RolloutNodeView:
    """The same, drained, and empty."""
    said: dict[str, object] = {
        "state": State.DRAINED,
        "is_empty": True,
        "sessions": 0,
        "is_warmed_up": False,
        **more,
    }
    return node_view(drain=DrainIntent(0.0, 600.0, owner=owner), **said)


def rollout_view(nodes: Mapping[str, RolloutNodeView], **more: object) -> RolloutView:
    """What is to be seen of these nodes and of no others."""
    said: dict[str, object] = {
        "active": {a: "" for a, n in nodes.items() if n.state is State.ACTIVE} | {"other": ""},
        "drained_by_us": frozenset(
            a for a, n in nodes.items() if n.drain is not None and n.drain.owner == ROLLOUT_ID
        ),
        "observing_since": -1000.0,
        **more,
    }
    return RolloutView(nodes, **said)  # type: ignore[arg-type]


@dataclass
class SimulatedServer:
    """A node as it is."""

    started_at: float = 100.0
    version: str = OLD_VERSION
    healthy: bool = True
    steady_since: float = 0.0
    sessions: int = 3
    active_since: float = 0.0


@dataclass
class RolloutSimulation:
    """Servers, intents and the record are what survives; `running` is what a control plane has in memory."""

    record: Rollout
    servers: dict[str, SimulatedServer]
    now: float = 1000.0
    intents: Intents = field(default_factory=Intents)
    observing_since: float = 1000.0
    running_actions: dict[tuple[str, int], bool] = field(
        default_factory=dict
    )  # whether it has restarted its node
    action_results: dict[tuple[str, int], str] = field(default_factory=dict)
    started_actions: list[tuple[str, int]] = field(default_factory=list)  # all that were ever begun

    def view(self) -> RolloutView:
        """What the rollout sees now."""
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
            drained_by_us=frozenset(a for a, drain in drains.items() if drain.owner == ROLLOUT_ID),
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
        """Time goes by; sessions leave nodes that are drained."""
        self.now += seconds
        for address in self.intents.drains:
            if address in self.servers:
                self.servers[address].sessions = 0

    def run_once(self, *, crashes: bool = False) -> None:
        """One pass of the runner; `dies`: after it has written the record, before it has done anything."""
        current = self.record
        for address, step in current.steps.items():
            if step.stage is Stage.STARTED:
                key = (address, step.attempts)
                if key in self.action_results:
                    current = state_machine.action_finished(
                        current, *key, self.action_results.pop(key), self.now
                    )
                elif key not in self.running_actions:
                    current = state_machine.action_interrupted(current, address, self.now)
        self.record, effects = state_machine.advance(current, self.view(), self.now)
        if crashes:
            self.crash()
            return
        for effect in effects:
            self._execute(effect)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case RunAction(address, attempt):
                assert address in self.intents.drains, "it was acted on while clients were led to it"
                self.started_actions.append((address, attempt))
                self.running_actions[(address, attempt)] = False
            case state_machine.DrainNode(address):
                self.intents = intent_changes.drain(self.intents, address, self.now, 600.0, owner=ROLLOUT_ID)
            case UndrainNode(address):
                assert not any(address == node for node, _ in self.running_actions), "its action still runs"
                self.intents = intent_changes.undrain(self.intents, address, owner=ROLLOUT_ID)

    def crash(self) -> None:
        """The control plane dies; another one, or itself, goes on from what is kept."""
        self.running_actions.clear()
        self.action_results.clear()
        self.observing_since = self.now

    def restart_server(self, address: str, version: str = NEW_VERSION) -> None:
        """The server of a node starts anew."""
        self.servers[address] = SimulatedServer(
            started_at=self.now, version=version, steady_since=self.now, sessions=0, active_since=self.now
        )

    def finish_action(self, key: tuple[str, int], problem: str = "") -> None:
        """An action that runs ends."""
        del self.running_actions[key]
        self.action_results[key] = problem

    @property
    def stages(self) -> dict[str, Stage]:
        """Of all steps."""
        return {address: step.stage for address, step in self.record.steps.items()}
