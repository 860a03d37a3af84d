"""What can go wrong, one class a failure; the message is one sentence that names the thing and the remedy.

    TidevoyError
    ├── ConfigError            a setting that cannot be used (file, key, what is wrong, what would be right)
    ├── UnknownNode            no node has that address
    ├── NodeExists             a node with that address is there already
    ├── InvalidRequest         a value that cannot be used, with the field that holds it
    ├── NeedsModule            asked for something that only the Tidevoy module in Envoy can do
    ├── StateUnavailable       intents could not be written down, so nothing was changed
    └── PdError                PD (etcd) could not be reached or refused; always retryable

`retryable` says whether the same call may succeed later without a change by the caller.
"""

from __future__ import annotations

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


class UnknownNode(TidevoyError):
    """No node has that address."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"no node has the address {address}; `tidevoy nodes` lists those that are known")


class NodeExists(TidevoyError):
    """A node with that address is there already."""

    def __init__(self, address: str, source: str) -> None:
        self.address = address
        super().__init__(f"the node {address} is there already (from {source}); change it with PATCH instead")


class InvalidRequest(TidevoyError):
    """A value that cannot be used; `field` is its path in the request."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


class NeedsModule(TidevoyError):
    """Asked for something that only the Tidevoy module in Envoy can do."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(f"{what} needs the Tidevoy module in every Envoy, and none reports it; {instead}")


class StateUnavailable(TidevoyError):
    """Intents could not be written down, so nothing was changed."""

    retryable = True

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"nothing was changed, because {path} could not be written: {problem}")


class PdError(TidevoyError):
    """PD could not be reached, or refused."""

    retryable = True
