"""The errors of the control plane. Most messages say what to do about the error."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.texts import some_of


class TidevoyError(Exception):
    """Base of all errors that Tidevoy raises on purpose."""

    retryable = False  # whether the same call may succeed later without a change by the caller


class ConfigError(TidevoyError):
    """One unusable setting."""

    def __init__(self, where: str, key: str, problem: str, remedy: str) -> None:
        self.where, self.key, self.problem, self.remedy = where, key, problem, remedy
        subject = f"{where}: {key}" if key else where
        super().__init__(f"{subject}: {problem}; {remedy}")


class ConfigErrors(ConfigError):
    """Several unusable settings. The attributes describe the first one; the message has a line for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        first = self.errors[0]
        super().__init__(first.where, first.key, first.problem, first.remedy)
        self.args = ("\n".join(map(str, self.errors)),)


class UnknownNode(TidevoyError):
    def __init__(self, address: str) -> None:
        super().__init__(f"no node has the address {address}; `tidevoy nodes` lists the known ones")


class NodeExists(TidevoyError):
    def __init__(self, address: str, source: str) -> None:
        super().__init__(
            f"the node {address} exists already (from {source}); "
            "change its weight (`tidevoy weight`) or labels (PATCH) instead"
        )


class ModuleRequired(TidevoyError):
    """The operation needs Tidevoy's module in every Envoy, and some Envoys do not use it."""

    def __init__(self, operation: str, envoys: Sequence[str], alternative: str) -> None:
        super().__init__(
            f"{operation} needs Tidevoy's module in every Envoy, and these Envoys do not use it:"
            f" {some_of(envoys)}; {alternative}"
        )


class UnknownEnvoy(TidevoyError):
    def __init__(self, envoy: str) -> None:
        super().__init__(f"no Envoy has the id {envoy}; `tidevoy envoys` lists the known ones")


class UnknownSession(TidevoyError):
    def __init__(self, id_: int) -> None:
        super().__init__(f"no session has the id {id_}; `tidevoy sessions` lists the sessions")


class AmbiguousSession(TidevoyError):
    """An id means several sessions."""


class SessionsUnavailable(TidevoyError):
    """The sessions of some Envoys are unknown."""

    retryable = True


class EnvoyConnected(TidevoyError):
    """An operator reported that an Envoy has ended, but this Envoy is connected."""

    def __init__(self, envoy: str) -> None:
        super().__init__(f"{envoy} is connected, so it is still running; stop it first")


class ListenError(TidevoyError):
    """A listening port could not be opened; `key` is the setting with its address."""

    def __init__(self, key: str, address: str, problem: str) -> None:
        super().__init__(
            f"{key}: cannot listen on {address}: {problem}; "
            f"stop the process that uses it (`ss -ltnp` shows it), or set {key} to another address"
        )


class UnknownRule(TidevoyError):
    def __init__(self, name: str, remedy: str = "`tidevoy rules` lists the known ones") -> None:
        super().__init__(f"no rule that the API has set is named {name}; {remedy}")


class RuleExists(TidevoyError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"a rule that the API has set is named {name} already; remove it first, or choose another name"
        )


class InvalidRules(TidevoyError):
    """Rules cannot be used. `problems` have the places in the request, and the reasons."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{place}: {problem}" for place, problem in problems))


class CapturesOff(TidevoyError):
    def __init__(self) -> None:
        super().__init__(
            "captures are off; set capture.directory to a directory on the machines of the Envoys, and reload"
        )


class CaptureRunning(TidevoyError):
    def __init__(self, name: str) -> None:
        super().__init__(f"the capture {name} is running; stop it first (`tidevoy traffic capture stop`)")


class UnknownGroup(TidevoyError):
    def __init__(self, group: str) -> None:
        super().__init__(f"no group of nodes in the settings is named {group}")


class StateUnavailable(TidevoyError):
    """A change could not be saved: `path` could not be written, or could not be read before the write."""

    retryable = True

    def __init__(self, path: str, problem: str, *, is_certain: bool = True, retryable: bool = True) -> None:
        """`is_certain=False`: the change may have been saved. A saved change takes effect."""
        self.is_certain, self.retryable = is_certain, retryable
        super().__init__(
            f"nothing was changed, because {path} could not be written: {problem}"
            if is_certain
            else f"{path} may or may not have been written ({problem}); check the current state before you"
            " try again"
        )


class VersionConflict(TidevoyError):
    """The change was not saved, because a concurrent change was saved first."""

    retryable = True

    def __init__(self, subject: str) -> None:
        super().__init__(f"nothing was changed, because {subject} was changed in the meantime; try again")


class NotLeader(TidevoyError):
    """Only the leader may do this operation, and this control plane is not the leader."""

    retryable = True

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} needs the leader, and this control plane is not the leader; try again")


class UnknownRollout(TidevoyError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no rollout has the id {name}; `tidevoy rollout status` lists the known ones")


class UnknownVerification(TidevoyError):
    def __init__(self, rollout: str, address: str) -> None:
        super().__init__(
            f"the rollout {rollout} has no comparison of {address} with an old node; the last ones are kept"
        )


class RolloutRejected(TidevoyError):
    """A rollout cannot be started or continued in the current state; each of `problems` says why."""

    def __init__(self, operation: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{operation}: {'; '.join(problems)}")


class PdError(TidevoyError):
    """PD (etcd) was unreachable or rejected the call."""

    retryable = True


class Compacted(PdError):
    """etcd has compacted the requested revision, so the changes since then cannot be read."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; list again and watch from the revision of that list")


class OutcomeUnknown(PdError):
    """PD may or may not have applied the change."""


class LeaseLost(PdError):
    """A lease expired, or could not be kept alive in time."""

    def __init__(self, lease: int, problem: str) -> None:
        super().__init__(f"the lease {lease:x} is lost: {problem}; grant a new one and write its keys again")
