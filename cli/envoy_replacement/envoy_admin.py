"""An Envoy by its admin port: what it is doing, and the two things that a recycle asks of it.

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

_TIMEOUT_SECONDS = 5.0  # seconds; a busy main thread answers late
_STATS_FILTER = r"^(listener\..*|tcp\..*\.upstream_flush_active|listener_manager\.listener_stopped)$"


class EnvoyAdmin:
    """The admin port at `host:port`. Failure (usage) when that is no address."""

    def __init__(self, address: str) -> None:
        try:
            self.address = addresses.join(*addresses.split(address))
        except ValueError as error:
            raise CliError(f"{error}; write an admin port as 127.0.0.1:9901", EXIT_USAGE) from None

    def fetch_state(self) -> EnvoyState | None:
        """The Envoy there; None: nobody listens. Failure when it does not answer as an Envoy does.

        An Envoy that is only starting, or already ending, may take a connection and then say nothing: that
        counts as nobody, too.
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
        """Let it accept nobody any more. Who is connected stays. Failure."""
        with self._wrap_errors("to accept no new sessions"):
            self._post("/drain_listeners")

    def quit(self) -> None:
        """Let it end at once, with all that is connected. Failure."""
        with self._wrap_errors("to end"):
            self._post("/quitquitquit")

    def _post(self, path: str) -> None:
        with self._http() as http:
            http.post(path).raise_for_status()

    def _http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"http://{self.address}", timeout=_TIMEOUT_SECONDS, trust_env=False, verify=False
        )

    @contextmanager
    def _wrap_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
            raise CliError(f"the Envoy at {self.address} could not be told {action}: {error}") from None

    def _timeout_error(self) -> CliError:
        return CliError(f"what listens at {self.address} does not answer within {_TIMEOUT_SECONDS:g} s")

    def _not_envoy_error(self) -> CliError:
        return CliError(f"what listens at {self.address} is not the admin port of an Envoy")
