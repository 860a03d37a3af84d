"""Rollouts over the wire: strict orders, and answers made from the control plane's words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from api.schemas.common import utc_datetime
from api.schemas.nodes import MAX_DEADLINE_SECONDS, address_pattern, coerce_integer
from controlplane.model import rollout as model
from controlplane.model.intents import OnDeadline
from controlplane.rollouts.preflight import PreflightResult

# Characters, each of which may be written as an escape of 12 bytes: with more, the body would be too large.
MAX_SELECTOR_LENGTH = 32_768
MAX_NODE_COUNT = 10_000


def _selector_pattern() -> str:
    """`all`, addresses, or labels; names and values of labels as far as they need no quoting."""
    address = address_pattern()[1:-1]
    label = r"[!-+\x2d-<>-~]+=[!-+\x2d-<>-~]*"
    return rf"^(?:all|{address}(?:,{address})*|{label}(?:,{label})*)$"


_SELECTOR_PATTERN = re.compile(_selector_pattern()[1:-1])


def _check_selector(value: str) -> str:
    if _SELECTOR_PATTERN.fullmatch(value) is None:
        raise ValueError("write it as all, as name=value,..., or as host:port,... without spaces")
    return value


Selector = Annotated[
    str,
    AfterValidator(_check_selector),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": _selector_pattern(),
            "maxLength": MAX_SELECTOR_LENGTH,
            "examples": ["all", "zone=a", "10.0.0.1:4000,10.0.0.2:4000"],
        }
    ),
]
RolloutId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
Seconds = Annotated[float, Field(ge=0, le=MAX_DEADLINE_SECONDS, allow_inf_nan=False)]


class StartRolloutRequest(BaseModel):
    """What is to be done to which nodes, and how carefully."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: Selector = Field(
        description="`all`, labels that a node must have (`zone=a,disk=ssd`), or addresses in the order of"
        " their turns (`host:port,host:port`).",
        max_length=MAX_SELECTOR_LENGTH,
    )
    action: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(
        model.MANUAL,
        description="A name in `rollouts.actions` of the configuration; `manual`: somebody else restarts the"
        " nodes.",
    )
    max_unavailable: Annotated[int, Field(ge=1, le=MAX_NODE_COUNT), BeforeValidator(coerce_integer)] = Field(
        1, description="Nodes that may be out of service at a time."
    )
    drain_deadline_seconds: Seconds = Field(
        600.0, description="How long the sessions of a node may take to leave."
    )
    on_deadline: Literal["keep", "close"] = Field(
        "keep",
        description="What happens to sessions that are left then: they stay until the action ends them, or"
        " they are ended, for which every Envoy must have Tidevoy's module.",
    )
    return_deadline_seconds: Seconds = Field(
        600.0, description="How long a node may take after the action to be back and steady."
    )
    healthy_for_seconds: Seconds = Field(
        10.0, description="How long a node that is back must pass its checks before it gets sessions."
    )
    version: Annotated[str, Field(pattern=r"^[!-~]{0,64}$")] = Field(
        "", description="That each node is to have afterwards, as it registers it (`v8.5.4`); empty: any."
    )
    failure_budget: Annotated[int, Field(ge=0, le=MAX_NODE_COUNT), BeforeValidator(coerce_integer)] = Field(
        0, description="Nodes that may fail before the rollout pauses."
    )
    dry_run: bool = Field(
        False, description="Start nothing; answer what would be done, and what is against it."
    )
    force: bool = Field(False, description="Start in spite of what is against it, as far as that can be.")

    def to_spec(self, addresses: tuple[str, ...]) -> model.RolloutSpec:
        """As the control plane takes it, with the addresses of the nodes that are meant."""
        return model.RolloutSpec(
            nodes=addresses,
            action=self.action,
            max_unavailable=self.max_unavailable,
            drain_deadline=self.drain_deadline_seconds,
            on_deadline=OnDeadline(self.on_deadline),
            return_deadline=self.return_deadline_seconds,
            healthy_for=self.healthy_for_seconds,
            version=self.version,
            failure_budget=self.failure_budget,
            selector=self.nodes,
        )


class RolloutSpecSchema(BaseModel):
    """What was asked for."""

    selector: str = Field(description="The nodes as they were asked for.")
    nodes: list[str] = Field(description="Their addresses, in the order of their turns.")
    action: str
    max_unavailable: int
    drain_deadline_seconds: float
    on_deadline: OnDeadline
    return_deadline_seconds: float
    healthy_for_seconds: float
    version: str
    failure_budget: int


class PreflightResultSchema(BaseModel):
    """What a rollout would do, and what speaks against it."""

    order: RolloutSpecSchema
    problems: list[str] = Field(description="Why it would be refused without `force`, a sentence each.")
    refusals: list[str] = Field(description="Those of the problems that `force` does not help against.")
    cautions: list[str] = Field(description="What to know before it is started, a sentence each.")


class RolloutStepSchema(BaseModel):
    """One node of a rollout."""

    address: str
    stage: model.Stage
    reason: str = Field(description="Why it is in this stage, as a sentence.")
    since: datetime | None = Field(description="When it came into this stage; null: its turn has not come.")
    begun: datetime | None = Field(description="When its drain was asked for.")
    ended: datetime | None
    drained_by_rollout: bool = Field(description="It is drained, and the rollout is to take that back.")
    attempts: int = Field(description="How often its action was started.")
    cut_off: bool = Field(description="Its action may have been cut off, since the control plane ended.")
    started_before: datetime | None = Field(
        description="When the TiDB server started that was to be replaced."
    )
    version_before: str
    version_after: str
    sessions: int | None = Field(description="That it had when its drain was asked for; null: not known.")
    moved: int = Field(description="Sessions that moved to other nodes.")
    failed: int = Field(description="Tries to move a session after which it stayed; each may be tried again.")
    closed: int = Field(description="Sessions that were still there when the action began.")


class RolloutSchema(BaseModel):
    """A rollout, and how far it is."""

    id: str
    phase: model.RolloutPhase
    reason: str = Field(description="Why it is in this phase, as a sentence.")
    since: datetime = Field(description="When it came into this phase.")
    by: str = Field(description="Who asked for it.")
    created: datetime
    ended: datetime | None
    forced: bool = Field(description="It was started in spite of what was against it.")
    order: RolloutSpecSchema
    steps: list[RolloutStepSchema] = Field(description="In the order of their turns.")


class RolloutList(BaseModel):
    """The rollouts that are known: all that go on, and the last that ended."""

    rollouts: list[RolloutSchema] = Field(description="The newest first.")


# --- from the control plane's words ------------------------------------------------------------------------


def to_rollout_schema(rollout: model.Rollout) -> RolloutSchema:
    """A rollout as the API shows it."""
    return RolloutSchema(
        id=rollout.id,
        phase=rollout.phase,
        reason=rollout.reason,
        since=utc_datetime(rollout.since),
        by=rollout.by,
        created=utc_datetime(rollout.created),
        ended=_optional_utc_datetime(rollout.ended),
        forced=rollout.forced,
        order=_to_spec_schema(rollout.spec),
        steps=[_to_step_schema(step) for step in rollout.steps.values()],
    )


def to_rollout_list(rollouts: Iterable[model.Rollout]) -> RolloutList:
    """All rollouts as the API shows them."""
    newest_first = sorted(rollouts, key=lambda rollout: (rollout.created, rollout.id), reverse=True)
    return RolloutList(rollouts=[to_rollout_schema(one) for one in newest_first])


def to_preflight_schema(result: PreflightResult) -> PreflightResultSchema:
    """What a dry run tells."""
    return PreflightResultSchema(
        order=_to_spec_schema(result.spec),
        problems=list(result.problems),
        refusals=list(result.unforceable_problems),
        cautions=list(result.warnings),
    )


def _optional_utc_datetime(timestamp: float | None) -> datetime | None:
    return None if timestamp is None else utc_datetime(timestamp)


def _to_spec_schema(spec: model.RolloutSpec) -> RolloutSpecSchema:
    return RolloutSpecSchema(
        selector=spec.selector,
        nodes=list(spec.nodes),
        action=spec.action,
        max_unavailable=spec.max_unavailable,
        drain_deadline_seconds=spec.drain_deadline,
        on_deadline=spec.on_deadline,
        return_deadline_seconds=spec.return_deadline,
        healthy_for_seconds=spec.healthy_for,
        version=spec.version,
        failure_budget=spec.failure_budget,
    )


def _to_step_schema(step: model.Step) -> RolloutStepSchema:
    return RolloutStepSchema(
        address=step.address,
        stage=step.stage,
        reason=step.reason,
        since=utc_datetime(step.since) if step.since else None,
        begun=_optional_utc_datetime(step.drain_requested_at),
        ended=_optional_utc_datetime(step.ended),
        drained_by_rollout=step.drained_by_us,
        attempts=step.attempts,
        cut_off=step.interrupted,
        started_before=_optional_utc_datetime(step.started_before),
        version_before=step.version_before,
        version_after=step.version_after,
        sessions=step.sessions,
        moved=step.moved,
        failed=step.failed,
        closed=step.closed,
    )
