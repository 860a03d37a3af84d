"""Schemas of rollouts: strict requests, and responses converted from the control plane's model."""

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

# Characters. Each may be written as an escape of 12 bytes, so a longer selector could exceed the body limit.
MAX_SELECTOR_LENGTH = 32_768
MAX_NODE_COUNT = 10_000


def _selector_pattern() -> str:
    """Return a regular expression for `all`, addresses, or labels whose names and values need no quoting."""
    address = address_pattern()[1:-1]
    label = r"[!-+\x2d-<>-~]+=[!-+\x2d-<>-~]*"
    return rf"^(?:all|{address}(?:,{address})*|{label}(?:,{label})*)$"


_SELECTOR_PATTERN = re.compile(_selector_pattern()[1:-1])


def _check_selector(value: str) -> str:
    if _SELECTOR_PATTERN.fullmatch(value) is None:
        raise ValueError("must be all, name=value,..., or host:port,... without spaces")
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
    """The nodes, action, limits, and deadlines of a rollout to start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: Selector = Field(
        description="`all`, labels that a node must have (`zone=a,disk=ssd`), or addresses in the order in"
        " which they are processed (`host:port,host:port`).",
        max_length=MAX_SELECTOR_LENGTH,
    )
    action: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(
        model.MANUAL,
        description="A name in `rollouts.actions` of the configuration; `manual`: the nodes are restarted"
        " outside of Tidevoy.",
    )
    max_unavailable: Annotated[int, Field(ge=1, le=MAX_NODE_COUNT), BeforeValidator(coerce_integer)] = Field(
        1, description="Number of nodes that may be out of service at the same time."
    )
    drain_deadline_seconds: Seconds = Field(
        600.0, description="Maximum time to drain the sessions of a node."
    )
    on_deadline: Literal["keep", "close"] = Field(
        "keep",
        description="What happens to the remaining sessions at the deadline: `keep` leaves them until the"
        " action ends them; `close` ends them, for which every Envoy must have Tidevoy's module.",
    )
    return_deadline_seconds: Seconds = Field(
        600.0, description="Maximum time after the action until the node is back and stable."
    )
    healthy_for_seconds: Seconds = Field(
        10.0, description="How long a node that is back must pass its checks before it gets new sessions."
    )
    version: Annotated[str, Field(pattern=r"^[!-~]{0,64}$")] = Field(
        "",
        description="Required version of each node afterwards, as registered (`v8.5.4`); empty: any.",
    )
    failure_budget: Annotated[int, Field(ge=0, le=MAX_NODE_COUNT), BeforeValidator(coerce_integer)] = Field(
        0, description="Number of nodes that may fail before the rollout pauses."
    )
    dry_run: bool = Field(
        False, description="Only run the preflight checks and return their result; start no rollout."
    )
    force: bool = Field(False, description="Start despite preflight problems, except those in `refusals`.")

    def to_spec(self, addresses: tuple[str, ...]) -> model.RolloutSpec:
        """Convert the request to a rollout spec with the selected addresses."""
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
    """The spec of a rollout."""

    selector: str = Field(description="The node selector of the request.")
    nodes: list[str] = Field(description="The selected addresses, in processing order.")
    action: str
    max_unavailable: int
    drain_deadline_seconds: float
    on_deadline: OnDeadline
    return_deadline_seconds: float
    healthy_for_seconds: float
    version: str
    failure_budget: int


class PreflightResultSchema(BaseModel):
    """The result of a rollout's preflight checks."""

    order: RolloutSpecSchema
    problems: list[str] = Field(
        description="Reasons why the rollout is refused without `force`, a sentence each."
    )
    refusals: list[str] = Field(description="The problems that `force` does not override.")
    cautions: list[str] = Field(description="Warnings to consider before the start, a sentence each.")


class RolloutStepSchema(BaseModel):
    """One node of a rollout."""

    address: str
    stage: model.Stage
    reason: str = Field(description="Why it is in this stage, as a sentence.")
    since: datetime | None = Field(description="When it entered this stage; null: not started yet.")
    begun: datetime | None = Field(description="When its drain was requested.")
    ended: datetime | None
    drained_by_rollout: bool = Field(description="Whether the rollout drained it and must undrain it.")
    attempts: int = Field(description="How often its action was started.")
    cut_off: bool = Field(description="Whether a stop of the control plane may have interrupted its action.")
    started_before: datetime | None = Field(
        description="Start time of the TiDB server process before the action."
    )
    version_before: str
    version_after: str
    sessions: int | None = Field(description="Sessions when its drain was requested; null: unknown.")
    moved: int = Field(description="Sessions that migrated to other nodes.")
    failed: int = Field(description="Migration attempts after which the session stayed; may be retried.")
    closed: int = Field(description="Sessions that were still on the node when the action started.")


class RolloutSchema(BaseModel):
    """A rollout and its progress."""

    id: str
    phase: model.RolloutPhase
    reason: str = Field(description="Why it is in this phase, as a sentence.")
    since: datetime = Field(description="When it entered this phase.")
    by: str = Field(description="The caller that requested it.")
    created: datetime
    ended: datetime | None
    forced: bool = Field(description="Whether it was started despite preflight problems.")
    order: RolloutSpecSchema
    steps: list[RolloutStepSchema] = Field(description="In processing order.")


class RolloutList(BaseModel):
    """All active rollouts and the last finished ones."""

    rollouts: list[RolloutSchema] = Field(description="Newest first.")


# --- conversion from the model -----------------------------------------------------------------------------


def to_rollout_schema(rollout: model.Rollout) -> RolloutSchema:
    """Convert a rollout to its schema."""
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
    """Convert rollouts to their schemas, newest first."""
    newest_first = sorted(rollouts, key=lambda rollout: (rollout.created, rollout.id), reverse=True)
    return RolloutList(rollouts=[to_rollout_schema(rollout) for rollout in newest_first])


def to_preflight_schema(result: PreflightResult) -> PreflightResultSchema:
    """Convert the result of a dry run to its schema."""
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
