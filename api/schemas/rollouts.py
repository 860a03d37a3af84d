"""Schemas of rollouts: the request to start one, and its progress."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from api.schemas.common import (
    Integer,
    ResponseModel,
    Seconds,
    StrictQuery,
    StrictRequest,
    address_pattern,
    attribute,
)
from controlplane.model import rollout as model
from controlplane.model.comparison import DEFAULT_MAX_RATIO
from controlplane.model.intents import OnDeadline

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
_CAPTURE_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
# Not `..`: the capture is below a directory of the configuration.
_VERIFY_PATTERN = rf"^(?:replay:{_CAPTURE_PART}(?:/{_CAPTURE_PART})*)?$"
RolloutId = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class StartRolloutRequest(StrictRequest):
    """The nodes, action, limits, and deadlines of a rollout to start."""

    nodes: Selector = Field(
        description="`all`, labels that a node must have (`zone=a,disk=ssd`), or addresses in the order in"
        " which they are processed (`host:port,host:port`).",
        max_length=MAX_SELECTOR_LENGTH,
    )
    action: str = Field(
        model.MANUAL,
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="A name in `rollouts.actions` of the configuration; `manual` if the nodes are"
        " restarted outside of Tidevoy.",
    )
    max_unavailable: Integer = Field(
        1, ge=1, le=MAX_NODE_COUNT, description="Number of nodes that may be out of service at the same time."
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
    version: str = Field(
        "",
        pattern=r"^[!-~]{0,64}$",
        description="Required version of each node afterwards, as registered (`v8.5.4`); empty if none is"
        " required.",
    )
    failure_budget: Integer = Field(
        0, ge=0, le=MAX_NODE_COUNT, description="Number of nodes that may fail before the rollout pauses."
    )
    verify: str = Field(
        "",
        pattern=_VERIFY_PATTERN,
        max_length=256,
        description="`replay:` and the name of a capture in `rollouts.verification.directory`: before a node"
        " returns to service, reads of the capture run on it and on an old node. If it gives new errors or is"
        " slower, the rollout pauses. Empty: nodes are not verified.",
        examples=["replay:monday"],
    )
    verify_ratio: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = Field(
        DEFAULT_MAX_RATIO,
        description="A statement is slower if it takes at least this many times as long on the upgraded node,"
        " and the whole confidence interval of the ratio is above 1.",
    )
    dry_run: bool = Field(
        False, description="Only run the preflight checks and return their result; start no rollout."
    )
    force: bool = Field(
        False, description="Start despite preflight problems, except those in `problems_despite_force`."
    )

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
            verify=self.verify,
            verify_ratio=self.verify_ratio,
        )


class RolloutSpecDetails(ResponseModel):
    """The spec of a rollout."""

    selector: str = Field(description="The node selector of the request.")
    nodes: list[str] = Field(description="The selected addresses, in processing order.")
    action: str
    max_unavailable: int
    drain_deadline_seconds: float = attribute("drain_deadline")
    on_deadline: OnDeadline
    return_deadline_seconds: float = attribute("return_deadline")
    healthy_for_seconds: float = attribute("healthy_for")
    version: str
    failure_budget: int
    verify: str = Field(description="What verifies nodes: `replay:` and a capture; empty: nothing.")
    verify_ratio: float


class PreflightDetails(ResponseModel):
    """The result of a rollout's preflight checks."""

    spec: RolloutSpecDetails
    problems: list[str] = Field(
        description="Reasons why the rollout is refused without `force`, a sentence each."
    )
    problems_despite_force: list[str] = Field(description="The problems that `force` does not override.")
    warnings: list[str] = Field(description="What to consider before the start, a sentence each.")


class RolloutStep(ResponseModel):
    """One node of a rollout."""

    address: str
    stage: model.Stage
    reason: str = Field(description="Why the node is in this stage, as a sentence.")
    since: Annotated[datetime | None, BeforeValidator(lambda since: since or None)] = Field(
        description="When the node entered this stage; null if the rollout has not started with it."
    )
    drain_requested_at: datetime | None = Field(description="When the node's drain was requested.")
    ended_at: datetime | None
    drained_by_rollout: bool = attribute(
        "owns_drain", "Whether the rollout drained the node and must undrain it."
    )
    attempts: int = Field(description="How often the node's action was started.")
    interrupted: bool = Field(
        description="Whether a stop of the control plane may have interrupted the action."
    )
    started_before: datetime | None = Field(
        description="Start time of the TiDB server process before the action."
    )
    version_before: str
    version_after: str
    sessions: int | None = Field(description="Sessions when the drain was requested; null if unknown.")
    migrated_sessions: int = Field(description="Sessions that migrated to other nodes.")
    failed_migrations: int = Field(description="Failed migrations, after which the session stayed.")
    terminated_sessions: int = Field(description="Sessions still on the node when the action started.")
    verification: model.Verification = Field(
        description="Whether the node was compared with an old one: `none`: not yet, or the rollout does not"
        " verify nodes; `skipped`: an operator accepted a failed verification."
    )


class ResumeQuery(StrictQuery):
    """How a rollout is resumed."""

    skip_verification: bool = Field(
        False, description="Return nodes whose verification failed to service, without another verification."
    )


class RolloutDetails(ResponseModel):
    """A rollout and its progress."""

    id: str
    phase: model.RolloutPhase
    reason: str = Field(description="Why the rollout is in this phase, as a sentence.")
    since: datetime = Field(description="When the rollout entered this phase.")
    created_by: str = Field(description="The caller that requested the rollout.")
    created_at: datetime
    ended_at: datetime | None
    forced: bool = Field(description="Whether the rollout was started despite preflight problems.")
    spec: RolloutSpecDetails
    steps: Annotated[list[RolloutStep], BeforeValidator(lambda steps: list(steps.values()))] = Field(
        description="The nodes, in processing order."
    )


class RolloutList(ResponseModel):
    """All active rollouts and the last finished ones."""

    rollouts: list[RolloutDetails] = Field(description="Newest first.")


def newest_first(rollouts: Iterable[model.Rollout]) -> list[model.Rollout]:
    """Return the rollouts, the latest created first."""
    return sorted(rollouts, key=lambda rollout: (rollout.created_at, rollout.id), reverse=True)
