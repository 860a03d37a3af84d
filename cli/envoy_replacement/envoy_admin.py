"""An Envoy by its admin port: what it is doing, and the two things that a recycle asks of it.

Envoy's admin interface: https://www.envoyproxy.io/docs/envoy/v1.40.0/operations/admin
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from cli.envoy_replacement.compatibility import proxy
from cli.envoy_replacement.model import Proxy
from cli.errors import USAGE, Failure
from controlplane import address as addresses

_TIMEOUT = 5.0  # seconds; a busy main thread answers late
_STATS = r"^(listener\..*|tcp\..*\.upstream_flush_active|listener_manager\.listener_stopped)$"


class Admin:
    """The admin port at `host:port`. Failure (usage) when that is no address."""

    def __init__(self, address: str) -> None:
        try:
            self.address = addresses.join(*addresses.split(address))
        except ValueError as error:
            raise Failure(f"{error}; write an admin port as 127.0.0.1:9901", USAGE) from None

    def look(self) -> Proxy | None:
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
                        ("/stats", {"format": "json", "filter": _STATS}),
                    )
                )
        except (httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError):
            return None
        except httpx2.TransportError:
            raise self._mute() from None
        except (httpx2.HTTPStatusError, ValueError):
            raise self._foreign() from None
        try:
            return proxy(info, listeners, stats)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._foreign() from None

    def close(self) -> None:
        """Let it accept nobody any more. Who is connected stays. Failure."""
        with self._telling("to accept no new sessions"):
            self._post("/drain_listeners")

    def end(self) -> None:
        """Let it end at once, with all that is connected. Failure."""
        with self._telling("to end"):
            self._post("/quitquitquit")

    def _post(self, path: str) -> None:
        with self._http() as http:
            http.post(path).raise_for_status()

    def _http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"http://{self.address}", timeout=_TIMEOUT, trust_env=False, verify=False
        )

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
            raise Failure(f"the Envoy at {self.address} could not be told {what}: {error}") from None

    def _mute(self) -> Failure:
        return Failure(f"what listens at {self.address} does not answer within {_TIMEOUT:g} s")

    def _foreign(self) -> Failure:
        return Failure(f"what listens at {self.address} is not the admin port of an Envoy")
