"""What can go wrong, one class a failure; the message is one sentence that names the thing and the remedy.

    TidevoyError
    ├── ConfigError            a setting that cannot be used (file, key, what is wrong, what would be right)
    │   └── ConfigErrors       several of them, one line each
    ├── UnknownNode            no node has that address
    ├── NodeExists             a node with that address is there already
    ├── NeedsModule            asked for what takes Tidevoy's module, and some Envoys lack it
    ├── CannotListen           a port of ours could not be opened (setting, address, why)
    ├── StateUnavailable       intents could not be written down, so nothing was changed
    ├── Superseded             somebody else changed it meanwhile, so nothing was changed
    ├── NotLeading             only the leader may do that, and this control plane does not lead (any more)
    ├── UnknownRollout         no rollout has that id
    ├── RolloutRefused         a rollout cannot be started, or not be moved on, as things are
    └── PdError                PD (etcd) could not be reached or refused; always retryable
        ├── Compacted          the changes since a revision are no longer to be had: list again
        ├── LeaseLost          a lease ended, or could not be kept alive in time; its keys are gone or will be
        └── Uncertain          nobody can say whether PD did what it was asked: read it back

`retryable` says whether the same call may succeed later without a change by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class TidevoyError(Exception):
    """Base of all errors that Tidevoy raises on purpose."""

    retryable: ClassVar[bool] = False


class ConfigError(TidevoyError):
    """One setting that cannot be used."""

    def __init__(self, where: str, key: str, problem: str, remedy: str) -> None:
        self.where, self.key, self.problem, self.remedy = where, key, problem, remedy
        subject = f"{where}: {key}" if key else where
        super().__init__(f"{subject}: {problem}; {remedy}")


class ConfigErrors(ConfigError):
    """Several settings that cannot be used: attributes are of the first, the text has a line for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.where, first.key, first.problem, first.remedy)
        self.args = ("\n".join(map(str, self.errors)),)


class UnknownNode(TidevoyError):
    """No node has that address."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"no node has the address {address}; `tidevoy nodes` lists those that are known")


class NodeExists(TidevoyError):
    """A node with that address is there already."""

    def __init__(self, address: str, source: str) -> None:
        self.address = address
        super().__init__(
            f"the node {address} is there already (from {source}); "
            "change its weight (`tidevoy weight`) or labels (PATCH) instead"
        )


class NeedsModule(TidevoyError):
    """Asked to end sessions, which Tidevoy's module in each Envoy does; `envoys` are those that lack it."""

    def __init__(self, operation: str, envoys: Sequence[str], alternative: str) -> None:
        self.envoys = tuple(envoys)
        more = f" and {len(envoys) - 3} more" if len(envoys) > 3 else ""
        super().__init__(
            f"{operation} takes Tidevoy's module in every Envoy, and it is not in use in"
            f" {', '.join(envoys[:3])}{more}; {alternative}"
        )


class UnknownEnvoy(TidevoyError):
    """No Envoy has that id, or it is forgotten already."""

    def __init__(self, envoy: str) -> None:
        self.envoy = envoy
        super().__init__(f"no Envoy has the id {envoy}; `tidevoy envoys` lists those that are known")


class EnvoyConnected(TidevoyError):
    """Said to have ended, and it is connected."""

    def __init__(self, envoy: str) -> None:
        self.envoy = envoy
        super().__init__(f"{envoy} is connected, so it has not ended; end it first")


class CannotListen(TidevoyError):
    """A port of ours could not be opened; `key` is the setting that names it."""

    def __init__(self, key: str, address: str, problem: str) -> None:
        self.key, self.address = key, address
        super().__init__(
            f"{key}: cannot listen on {address}: {problem}; "
            f"stop what uses it (`ss -ltnp` shows it), or set {key} to another address"
        )


class StateUnavailable(TidevoyError):
    """What was asked for could not be written down, so nothing was changed as far as is known."""

    retryable = True

    def __init__(self, path: str, problem: str, *, is_certain: bool = True) -> None:
        """Not `is_certain`: it may have been written down, and then it will be in force."""
        self.is_certain = is_certain
        super().__init__(
            f"nothing was changed, because {path} could not be written: {problem}"
            if is_certain
            else f"{path} may or may not have been written ({problem}); look again when PD answers"
        )


class VersionConflict(TidevoyError):
    """Somebody else changed it meanwhile, so nothing was changed."""

    retryable = True

    def __init__(self, subject: str) -> None:
        super().__init__(f"nothing was changed, because somebody else changed {subject} meanwhile; try again")


class NotLeader(TidevoyError):
    """Only the leader may do that, and this control plane does not lead, or not any more."""

    retryable = True

    def __init__(self, operation: str) -> None:
        super().__init__(
            f"{operation} is for the leader alone, and this control plane does not lead; try again"
        )


class UnknownRollout(TidevoyError):
    """No rollout has that id."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no rollout has the id {name}; `tidevoy rollout status` lists those that are known")


class RolloutRefused(TidevoyError):
    """A rollout cannot be started, or not be moved on, as things are; `problems` are sentences."""

    def __init__(self, operation: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{operation}: {'; '.join(problems)}")


class PdError(TidevoyError):
    """PD could not be reached, or refused."""

    retryable = True


class Compacted(PdError):
    """The changes since a revision are no longer to be had; `revision` is the oldest that is (or 0)."""

    def __init__(self, revision: int, problem: str) -> None:
        self.revision = revision
        super().__init__(f"{problem}; list again and watch from the revision of that list")


class OutcomeUnknown(PdError):
    """PD may or may not have done what it was asked."""


class LeaseLost(PdError):
    """A lease ended, or could not be kept alive in time."""

    def __init__(self, lease: int, problem: str) -> None:
        self.lease = lease
        super().__init__(
            f"the lease {lease:x} is lost: {problem}; ask for a new one and write its keys again"
        )
