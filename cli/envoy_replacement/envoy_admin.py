"""Client of an Envoy's admin port: fetch its state, drain its listeners and its sessions, stop it.

Envoy's admin interface: https://www.envoyproxy.io/docs/envoy/v1.40.0/operations/admin
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from cli.errors import CliError, UsageError
from controlplane import address as addresses

_TIMEOUT_SECONDS = 5.0  # a busy main thread answers late
_STATS_FILTER = (
    r"^(listener\..*|tcp\..*\.upstream_flush_active|listener_manager\.listener_stopped"
    r"|tidevoy\.drain_phase)$"
)
_HEALTH_LISTENER = "health"  # for load balancers, in the bootstrap


@dataclass(frozen=True, slots=True)
class EnvoyState:
    """An Envoy as its admin port reports it."""

    id: str
    version: str
    is_live: bool  # it has its first configuration
    uptime_seconds: float
    listeners: Mapping[str, str]  # name -> `ip:port`
    has_stopped_accepting: bool  # it accepts no more connections; irreversible in one process
    sessions: int  # client connections, including those that have no node yet
    # 0: its module does not drain it; 2: sessions end when they are idle; 3: the last ones are closed.
    drain_phase: int = 0


class EnvoyAdmin:
    """The admin port at `host:port`."""

    def __init__(self, address: str) -> None:
        """Raises UsageError if `address` is invalid."""
        try:
            self.address = addresses.join(*addresses.split(address))
        except ValueError as error:
            raise UsageError(f"{error}; write an admin port as 127.0.0.1:9901") from None

    def fetch_state(self) -> EnvoyState | None:
        """Return the Envoy's state, or None if nothing listens. Raises CliError if another program listens.

        Also returns None if an Envoy that is starting or stopping closes the connection without an answer.
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
            return parse_envoy_state(info, listeners, stats)
        except (httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError):
            return None
        except httpx2.TransportError:
            raise CliError(
                f"the process that listens at {self.address} does not answer within {_TIMEOUT_SECONDS:g} s"
            ) from None
        except (httpx2.HTTPStatusError, KeyError, TypeError, ValueError, AttributeError):
            raise CliError(f"{self.address} is not the admin port of an Envoy") from None

    def drain_listeners(self) -> None:
        """Make the Envoy stop accepting connections; existing connections stay. Raises CliError."""
        self._post("/drain_listeners", "did not stop accepting sessions")

    def drain_sessions(self, *, is_on: bool = True) -> None:
        """Make the module refuse new clients and end sessions when they are idle, or no longer.

        Raises CliError.
        """
        self._post(f"/runtime_modify?tidevoy.drain={str(is_on).lower()}", "did not change its drain")

    def quit(self) -> None:
        """Stop the Envoy at once, with all its connections. Raises CliError."""
        self._post("/quitquitquit", "did not stop")

    def _post(self, path: str, problem: str) -> None:
        try:
            with self._http() as http:
                http.post(path).raise_for_status()
        except (httpx2.TransportError, httpx2.HTTPStatusError) as error:
            raise CliError(f"the Envoy at {self.address} {problem}: {error}") from None

    def _http(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=f"http://{self.address}", timeout=_TIMEOUT_SECONDS, trust_env=False, verify=False
        )


def parse_envoy_state(
    info: Mapping[str, Any], listeners: Mapping[str, Any], stats: Mapping[str, Any]
) -> EnvoyState:
    """Combine the JSON of an Envoy's `/server_info`, `/listeners` and `/stats`.

    Raises KeyError, TypeError or ValueError if they are not responses of an Envoy.
    """
    values = {stat["name"]: int(stat["value"]) for stat in stats["stats"] if "value" in stat}
    return EnvoyState(
        id=str(info["node"].get("id", "")),
        version=str(info["version"]).split("/")[1] if "/" in info["version"] else str(info["version"]),
        is_live=info["state"] == "LIVE",
        uptime_seconds=float(info["uptime_current_epoch"].removesuffix("s")),
        listeners={
            listener["name"]: _join_address(listener["local_address"]["socket_address"])
            for listener in listeners.get("listener_statuses", [])
            if "socket_address" in listener["local_address"] and listener["name"] != _HEALTH_LISTENER
        },
        has_stopped_accepting=values.get("listener_manager.listener_stopped", 0) > 0,
        sessions=sum(value for name, value in values.items() if _is_client_gauge(name)),
        drain_phase=values.get("tidevoy.drain_phase", 0),
    )


def _join_address(socket_address: Mapping[str, Any]) -> str:
    return addresses.join(str(socket_address["address"]), int(socket_address["port_value"]))


def _is_client_gauge(name: str) -> bool:
    """Return whether a gauge counts SQL clients: those of a listener, not those of one worker.

    `upstream_flush_active` counts connections that clients have closed, but whose last bytes Envoy still
    sends to a node.
    """
    head, *_, last = parts = name.split(".")
    if head == "tcp":
        return last == "upstream_flush_active"
    if (
        head != "listener"
        or parts[1] in ("admin", _HEALTH_LISTENER)
        or last not in ("downstream_cx_active", "downstream_pre_cx_active")
    ):
        return False
    return not parts[-2].startswith(("worker_", "main_thread"))
