"""A small world for the rollout machine: nodes, intents, a durable record, and a runner that may die."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from controlplane.intents import changes as wishes
from controlplane.model.intents import Drain, Intents
from controlplane.model.nodes import State
from controlplane.model.rollout import Order, Rollout, Stage, Step
from controlplane.rollouts import state_machine
from controlplane.rollouts.observation import Seen, Sight
from controlplane.rollouts.state_machine import Act, Effect, Undrain

OLD, NEW = "v8.5.3", "v8.5.4"
ID = "r1"


def order(*nodes: str, **more: object) -> Order:
    """An order with an action, for the new version, unless said otherwise."""
    said: dict[str, object] = {"action": "restart", "version": NEW, "healthy_for": 10.0, **more}
    return Order(nodes, **said)  # type: ignore[arg-type]


def rollout(wanted: Order, *steps: Step, **more: object) -> Rollout:
    """A rollout that has these steps already."""
    fresh = state_machine.create(ID, wanted, "alice", 0.0)
    known = {**fresh.steps, **{step.address: step for step in steps}}
    return replace(fresh, steps=MappingProxyType(known), **more)  # type: ignore[arg-type]


def seen(**more: object) -> Seen:
    """A node that has been in service since it started at 100, long ago."""
    said: dict[str, object] = {
        "state": State.ACTIVE,
        "sessions": 5,
        "started_at": 100.0,
        "version": OLD,
        "steady_since": 0.0,
        "greeted_at": 1e9,
        "warm": True,
        **more,
    }
    return Seen(**said)  # type: ignore[arg-type]


def drained(by: str = ID, **more: object) -> Seen:
    """The same, drained, and empty."""
    said: dict[str, object] = {"state": State.DRAINED, "empty": True, "sessions": 0, "warm": False, **more}
    return seen(drain=Drain(0.0, 600.0, by=by), **said)


def sight(nodes: Mapping[str, Seen], **more: object) -> Sight:
    """What is to be seen of these nodes and of no others."""
    said: dict[str, object] = {
        "active": {a: "" for a, n in nodes.items() if n.state is State.ACTIVE} | {"other": ""},
        "ours": frozenset(a for a, n in nodes.items() if n.drain is not None and n.drain.by == ID),
        "since": -1000.0,
        **more,
    }
    return Sight(nodes, **said)  # type: ignore[arg-type]


@dataclass
class Server:
    """A node as it is."""

    started: float = 100.0
    version: str = OLD
    healthy: bool = True
    steady_since: float = 0.0
    sessions: int = 3
    active_since: float = 0.0


@dataclass
class World:
    """Servers, intents and the record are what survives; `running` is what a control plane has in memory."""

    record: Rollout
    servers: dict[str, Server]
    now: float = 1000.0
    intents: Intents = field(default_factory=Intents)
    since: float = 1000.0
    running: dict[tuple[str, int], bool] = field(default_factory=dict)  # whether it has restarted its node
    outcomes: dict[tuple[str, int], str] = field(default_factory=dict)
    acts: list[tuple[str, int]] = field(default_factory=list)  # all that were ever begun

    def sight(self) -> Sight:
        """What the rollout sees now."""
        nodes = {address: self._seen(address) for address in self.record.steps if address in self.servers}
        drains = self.intents.drains
        return Sight(
            nodes,
            since=self.since,
            out={
                a: f"{a} is unhealthy"
                for a, server in self.servers.items()
                if not server.healthy and (a not in drains or drains[a].by not in ("", ID))
            },
            active={a: "" for a, s in self.servers.items() if s.healthy and a not in drains},
            ours=frozenset(a for a, drain in drains.items() if drain.by == ID),
        )

    def _seen(self, address: str) -> Seen:
        server, drain = self.servers[address], self.intents.drains.get(address)
        if drain is not None:
            state = State.DRAINED if not server.sessions else State.DRAINING
        else:
            state = State.ACTIVE if server.healthy else State.UNHEALTHY
        return Seen(
            state=state,
            empty=not server.sessions,
            sessions=server.sessions,
            started_at=server.started,
            version=server.version,
            drain=drain,
            steady_since=server.steady_since if server.healthy else None,
            ailing="" if server.healthy else "does not pass its checks",
            greeted_at=self.now if server.healthy else None,
            warm=state is State.ACTIVE,
        )

    def passes(self, seconds: float) -> None:
        """Time goes by; sessions leave nodes that are drained."""
        self.now += seconds
        for address in self.intents.drains:
            if address in self.servers:
                self.servers[address].sessions = 0

    def look(self, *, dies: bool = False) -> None:
        """One pass of the runner; `dies`: after it has written the record, before it has done anything."""
        current = self.record
        for address, step in current.steps.items():
            if step.stage is Stage.STARTED:
                key = (address, step.attempts)
                if key in self.outcomes:
                    current = state_machine.act_ended(current, *key, self.outcomes.pop(key), self.now)
                elif key not in self.running:
                    current = state_machine.cut_off(current, address, self.now)
        self.record, effects = state_machine.advance(current, self.sight(), self.now)
        if dies:
            self.crash()
            return
        for effect in effects:
            self._do(effect)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Act(address, attempt):
                assert address in self.intents.drains, "it was acted on while clients were led to it"
                self.acts.append((address, attempt))
                self.running[(address, attempt)] = False
            case state_machine.Drain(address):
                self.intents = wishes.drain(self.intents, address, self.now, 600.0, by=ID)
            case Undrain(address):
                assert not any(address == node for node, _ in self.running), "its action still runs"
                self.intents = wishes.undrain(self.intents, address, by=ID)

    def crash(self) -> None:
        """The control plane dies; another one, or itself, goes on from what is kept."""
        self.running.clear()
        self.outcomes.clear()
        self.since = self.now

    def restart(self, address: str, version: str = NEW) -> None:
        """The server of a node starts anew."""
        self.servers[address] = Server(
            started=self.now, version=version, steady_since=self.now, sessions=0, active_since=self.now
        )

    def ends(self, key: tuple[str, int], problem: str = "") -> None:
        """An action that runs ends."""
        del self.running[key]
        self.outcomes[key] = problem

    @property
    def stages(self) -> dict[str, Stage]:
        """Of all steps."""
        return {address: step.stage for address, step in self.record.steps.items()}
