"""What a rollout sees of its nodes, and of the others as far as it matters to it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from controlplane.decide import session_counts
from controlplane.decide.health_verdict import Verdict, judge
from controlplane.decide.node_sources import complete
from controlplane.model.envoys import EnvoyStatus
from controlplane.model.facts import Facts
from controlplane.model.health import Health, Outcome, Probe
from controlplane.model.intents import Drain, Intents
from controlplane.model.nodes import NOTHING, State
from controlplane.model.plan import NodePlan, Plan, Policy
from controlplane.model.rollout import TAKEN, Rollout, Stage
from controlplane.model.views import Departure

_UNCHECKED = Health()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the engine knows, as of one moment."""

    plan: Plan
    facts: Facts
    intents: Intents
    policy: Policy
    envoys: Sequence[EnvoyStatus] = ()
    departure: Callable[[str], Departure | None] = lambda _: None  # what came of a node's sessions


@dataclass(frozen=True, slots=True)
class Login:
    """What came of a session that was opened on a node and ran the statement of `rollouts.probe`."""

    at: float
    problem: str = ""  # why it failed, as a sentence; empty: it did not


@dataclass(frozen=True, slots=True)
class Seen:
    """One node."""

    state: State
    reason: str = ""  # of the state
    empty: bool = False  # surely no session is left on it
    sessions: int | None = None
    started_at: float | None = None
    version: str = ""  # its release; empty: not known
    drain: Drain | None = None
    removed: bool = False  # an operator removed it
    # Since when it has been registered with this start time and has passed its checks; None: it does not.
    steady_since: float | None = None
    ailing: str = ""  # why it is not steady, as a sentence without its subject
    greeted_at: float | None = None  # when the check of its SQL port passed last
    warm: bool = False  # it is in service, and its slow start is over
    moved: int = 0  # sessions that moved away since it is being left
    failed: int = 0  # tries to move after which a session stayed
    login: Login | None = None  # the latest


@dataclass(frozen=True, slots=True)
class Sight:
    """All that one rollout is decided by."""

    nodes: Mapping[str, Seen] = field(default_factory=lambda: NOTHING)  # those of its steps that are known
    since: float = 0.0  # when this control plane began to look
    complete: bool = True  # what is not among the nodes is not there: every source has told of all of its own
    # Nodes that are out of service and were neither drained nor removed by an operator, nor drained by this
    # rollout; each with a sentence.
    out: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    active: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # nodes in service -> their group
    ours: frozenset[str] = frozenset()  # drained by this rollout
    busy: Mapping[str, str] = field(
        default_factory=lambda: NOTHING
    )  # nodes -> the other rollout that has them
    checks_sql: bool = True  # SQL ports are checked
    asks_login: bool = False  # a session is to be opened, too


class Footing(NamedTuple):
    """Since when a node stands as it does; kept from one look to the next."""

    started_at: float | None
    since: float
    streaks: tuple[int, int]  # of the checks: one that is shorter than before has failed meanwhile


def look(
    outlook: Outlook, rollout: Rollout, past: Mapping[str, Footing], now: float
) -> tuple[Sight, Mapping[str, Footing]]:
    """What one rollout sees, but for `since`, `busy` and logins; and where its nodes stand, for the next.

    Whether a node is steady matters from when its turn comes: there may be thousands that wait for theirs.
    """
    plan, intents = outlook.plan, outlook.intents
    out, active = {}, {}
    for address, planned in plan.nodes.items():
        if planned.state is State.ACTIVE:
            active[address] = planned.group
        elif _is_missed(address, planned, intents, rollout.id):
            out[address] = f"{address} is {planned.state}: {planned.reason}"
    nodes, footings = {}, {}
    for address, step in rollout.steps.items():
        if step.stage in (Stage.DONE, Stage.SKIPPED) or address not in plan.nodes:
            continue
        footing, ailing = None, ""
        if step.begun is not None:
            footing, ailing = _footing(plan.nodes[address], outlook, past.get(address), now)
        if footing is not None:
            footings[address] = footing
        nodes[address] = _seen(address, outlook, footing, ailing, now)
    ours = frozenset(address for address, drain in intents.drains.items() if drain.by == rollout.id)
    sight = Sight(
        nodes,
        complete=complete(outlook.facts),
        out=out,
        active=active,
        ours=ours,
        checks_sql=outlook.policy.sql_check,
    )
    return sight, footings


def beside(sight: Sight, rollout: Rollout, live: Iterable[Rollout]) -> Sight:
    """The same, with what other rollouts have in hand. `live`: all that are not over, oldest first.

    What they have taken counts as out of service by the record: its drain may not be seen yet. What an older
    one still waits for, or has failed at, is left to it.
    """
    busy, taken, is_older = {}, {}, True
    for other in live:
        if other.id == rollout.id:
            is_older = False
            continue
        for address, step in other.steps.items():
            if step.stage in TAKEN:
                busy[address] = other.id
                taken[address] = f"the rollout {other.id} has {address} in hand"
            elif is_older and step.stage in (Stage.PENDING, Stage.FAILED):
                busy[address] = other.id
    active = {address: group for address, group in sight.active.items() if address not in taken}
    return replace(sight, busy=busy, out={**sight.out, **taken}, active=active)


def _is_missed(address: str, planned: NodePlan, intents: Intents, rollout: str) -> bool:
    """Whether a node that is not in service should be, for all that operators asked for."""
    if planned.state is State.JOINING or address in intents.removed:
        return False
    drain = intents.drains.get(address)
    return drain is None or drain.by not in ("", rollout)


def _seen(address: str, outlook: Outlook, footing: Footing | None, ailing: str, now: float) -> Seen:
    planned, policy = outlook.plan.nodes[address], outlook.policy
    sql = outlook.facts.health.get(address, _UNCHECKED).sql
    departure = outlook.departure(address)
    active_since = planned.active_since
    return Seen(
        state=planned.state,
        reason=planned.reason,
        empty=planned.state is State.DRAINED or (planned.state is State.GONE and planned.advice is None),
        sessions=session_counts.sessions(address, planned.endpoint, outlook.facts),
        started_at=planned.node.started_at,
        version=planned.version,
        drain=outlook.intents.drains.get(address),
        removed=address in outlook.intents.removed,
        steady_since=footing.since if footing is not None else None,
        ailing=ailing,
        greeted_at=sql.at if sql is not None and sql.outcome is Outcome.PASS else None,
        warm=active_since is not None and now - active_since >= policy.slow_start,
        moved=departure.moved if departure is not None else 0,
        failed=sum(departure.failed.values()) if departure is not None else 0,
    )


def _footing(
    planned: NodePlan, outlook: Outlook, past: Footing | None, now: float
) -> tuple[Footing | None, str]:
    """Since when a node is registered with its start time and passes; or why it does not."""
    node = planned.node
    if planned.leaving_since is not None:
        return None, "is not registered"
    if not node.registered:
        return None, "is registered, but its `ttl` is missing"
    health = outlook.facts.health.get(node.address, _UNCHECKED)
    has_status = node.status_address is not None
    judgement = judge(health, has_status=has_status, recovering=False, serving=False, policy=outlook.policy)
    if judgement.verdict is not Verdict.UP:
        return None, f"does not pass its checks: {judgement.reason}"
    streaks = (_streak(health.sql), _streak(health.status))
    same = past is not None and past.started_at == node.started_at
    if past is not None and same and all(now >= was for now, was in zip(streaks, past.streaks, strict=True)):
        return past._replace(streaks=streaks), ""
    return Footing(node.started_at, now, streaks), ""


def _streak(probe: Probe | None) -> int:
    return probe.streak if probe is not None else 0
