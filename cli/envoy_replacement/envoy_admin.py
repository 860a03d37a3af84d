"""Client of an Envoy's admin port: read its state, drain its listeners, stop it.

Envoy's admin interface: https://www.envoyproxy.io/docs/envoy/v1.40.0/operations/admin
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from cli.envoy_replacement.compatibility import parse_envoy_state
from cli.envoy_replacement.model import EnvoyState
from cli.errors import EXIT_USAGE, CliError
from controlplane import address as addresses

_TIMEOUT_SECONDS = 5.0  # a busy main thread answers late
_STATS_FILTER = r"^(listener\..*|tcp\..*\.upstream_flush_active|listener_manager\.listener_stopped)$"


class EnvoyAdmin:
    """The admin port at `host:port`."""

    def __init__(self, address: str) -> None:
        """Raises CliError (usage) if `address` is invalid."""
        try:
            self.address = addresses.join(*addresses.split(address))
        except ValueError as error:
            raise CliError(f"{error}; write an admin port as 127.0.0.1:9901", EXIT_USAGE) from None

    def fetch_state(self) -> EnvoyState | None:
        """Return the Envoy's state, or None if no Envoy listens. Raises CliError if the answer is no Envoy's.

        An Envoy that is starting or stopping may accept a connection and close it without an answer: that
        also returns None.
        """
        try:
            with self._http() as http:
                info, listeners, stats = (
                    http.get(path, params=query).raise_for_status().json()
                    for path, query in (
                        ("/server_info", {}),
                        ("/listeners", {"format": "json"}),
                        ("/stats", {"format": "json", "filter": _STATS_FILTER}),
                    )
                )
        except (httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError):
            return None
        except httpx2.TransportError:
            raise self._timeout_error() from None
        except (httpx2.HTTPStatusError, ValueError):
            raise self._not_envoy_error() from None
        try:
            return parse_envoy_state(info, listeners, stats)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._not_envoy_error() from None

    def drain_listeners(self) -> None:
        """Make the Envoy stop accepting connections; existing ones stay. Raises CliError."""
        with self._wrap_errors("did not stop accepting sessions"):
            self._post("/drain_listeners")

    def quit(self) -> None:
        """Stop the Envoy at once, with all its connections. Raises CliError."""
        with self._wrap_errors("did not stop"):
            self._post("/quitquitquit")

    def _post(self, path: str) -> None:
        with self._http() as http:
            http.post(path).raise_for_status()

    def _http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"http://{self.address}", timeout=_TIMEOUT_SECONDS, trust_env=False, verify=False
        )

    @contextmanager
    def _wrap_errors(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
            raise CliError(f"the Envoy at {self.address} {problem}: {error}") from None

    def _timeout_error(self) -> CliError:
        return CliError(
            f"the process that listens at {self.address} does not answer within {_TIMEOUT_SECONDS:g} s"
        )

    def _not_envoy_error(self) -> CliError:
        return CliError(f"{self.address} is not the admin port of an Envoy")
