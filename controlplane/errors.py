"""The errors of the control plane, one class per failure; each message is one sentence with the remedy.

    TidevoyError
    ├── ConfigError            a setting is unusable (file, key, problem, remedy)
    │   └── ConfigErrors       several of them, one line each
    ├── UnknownNode            no node has that address
    ├── NodeExists             a node with that address exists already
    ├── NeedsModule            the operation needs Tidevoy's module, and some Envoys lack it
    ├── UnknownEnvoy           no Envoy has that id
    ├── EnvoyConnected         the Envoy to forget is connected
    ├── CannotListen           a listening port could not be opened (setting, address, reason)
    ├── StateUnavailable       intents could not be saved, so nothing was changed
    ├── VersionConflict        a concurrent change came first, so nothing was changed
    ├── NotLeader              the operation needs the leader, and this control plane is not
    ├── UnknownRollout         no rollout has that id
    ├── RolloutRefused         a rollout cannot be started or continued in the current state
    └── PdError                PD (etcd) was unreachable or rejected the call; always retryable
        ├── Compacted          the changes since a revision were compacted: list again
        ├── OutcomeUnknown     it is unknown whether PD applied a change: check the current state
        └── LeaseLost          a lease expired or was not kept alive in time; its keys are or will be deleted

`retryable` says whether the same call may succeed later without a change by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TidevoyError(Exception):
    """Base of all errors that Tidevoy raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigError(TidevoyError):
    """One unusable setting."""

    def __init__(self, where: str, key: str, problem: str, remedy: str) -> None:
        self.where, self.key, self.problem, self.remedy = where, key, problem, remedy
        subject = f"{where}: {key}" if key else where
        super().__init__(f"{subject}: {problem}; {remedy}")


class ConfigErrors(ConfigError):
    """Several unusable settings: the attributes are of the first, the text has a line for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.where, first.key, first.problem, first.remedy)
        self.args = ("\n".join(map(str, self.errors)),)


class UnknownNode(TidevoyError):
    """No node has that address."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"no node has the address {address}; `tidevoy nodes` lists the known ones")


class NodeExists(TidevoyError):
    """A node with that address exists already."""

    def __init__(self, address: str, source: str) -> None:
        self.address = address
        super().__init__(
            f"the node {address} exists already (from {source}); "
            "change its weight (`tidevoy weight`) or labels (PATCH) instead"
        )


class NeedsModule(TidevoyError):
    """The operation needs Tidevoy's module in each Envoy; `envoys` are those that lack it."""

    def __init__(self, operation: str, envoys: Sequence[str], alternative: str) -> None:
        self.envoys = tuple(envoys)
        more = f" and {len(envoys) - 3} more" if len(envoys) > 3 else ""
        super().__init__(
            f"{operation} needs Tidevoy's module in every Envoy, and these Envoys do not use it:"
            f" {', '.join(envoys[:3])}{more}; {alternative}"
        )


class UnknownEnvoy(TidevoyError):
    """No Envoy has that id, or it was forgotten already."""

    def __init__(self, envoy: str) -> None:
        self.envoy = envoy
        super().__init__(f"no Envoy has the id {envoy}; `tidevoy envoys` lists the known ones")


class EnvoyConnected(TidevoyError):
    """The Envoy that an operator reported as ended is connected."""

    def __init__(self, envoy: str) -> None:
        self.envoy = envoy
        super().__init__(f"{envoy} is connected, so it is still running; stop it first")


class CannotListen(TidevoyError):
    """A listening port could not be opened; `key` is its setting."""

    def __init__(self, key: str, address: str, problem: str) -> None:
        self.key, self.address = key, address
        super().__init__(
            f"{key}: cannot listen on {address}: {problem}; "
            f"stop the process that uses it (`ss -ltnp` shows it), or set {key} to another address"
        )


class StateUnavailable(TidevoyError):
    """A change could not be saved, so nothing was changed as far as is known."""

    retryable = True

    def __init__(self, path: str, problem: str, *, is_certain: bool = True) -> None:
        """`is_certain=False`: the change may have been saved, and then it will be applied."""
        self.is_certain = is_certain
        super().__init__(
            f"nothing was changed, because {path} could not be written: {problem}"
            if is_certain
            else f"{path} may or may not have been written ({problem}); check again when PD is reachable"
        )


class VersionConflict(TidevoyError):
    """A concurrent change came first, so nothing was changed."""

    retryable = True

    def __init__(self, subject: str) -> None:
        super().__init__(f"nothing was changed, because {subject} was changed in the meantime; try again")


class NotLeader(TidevoyError):
    """Only the leader may do that, and this control plane is not, or no longer, the leader."""

    retryable = True

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} needs the leader, and this control plane is not the leader; try again")


class UnknownRollout(TidevoyError):
    """No rollout has that id."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no rollout has the id {name}; `tidevoy rollout status` lists the known ones")


class RolloutRefused(TidevoyError):
    """A rollout cannot be started or continued in the current state; `problems` are sentences."""

    def __init__(self, operation: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{operation}: {'; '.join(problems)}")


class PdError(TidevoyError):
    """PD was unreachable or rejected the call."""

    retryable = True


class Compacted(PdError):
    """The changes since a revision were compacted; `revision` is the oldest available one (or 0)."""

    def __init__(self, revision: int, problem: str) -> None:
        self.revision = revision
        super().__init__(f"{problem}; list again and watch from the revision of that list")


class OutcomeUnknown(PdError):
    """PD may or may not have applied the change."""


class LeaseLost(PdError):
    """A lease expired, or could not be kept alive in time."""

    def __init__(self, lease: int, problem: str) -> None:
        self.lease = lease
        super().__init__(f"the lease {lease:x} is lost: {problem}; grant a new one and write its keys again")
