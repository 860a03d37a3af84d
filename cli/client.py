"""HTTP client of the control plane's REST API: JSON in and out, every error as one sentence."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx2

from cli.errors import CliError, UsageError
from cli.output import print_note
from controlplane import address as addresses
from controlplane.config.bearer_token import InvalidTokenFile, is_valid_token, read_bearer_token

# A token is never an argument: every user of the machine can read arguments (`ps`).
TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "TIDEVOY_TOKEN", "TIDEVOY_TOKEN_FILE"
CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "TIDEVOY_CA", "TIDEVOY_CERT", "TIDEVOY_KEY"

_REQUEST_TIMEOUT_SECONDS = 15.0  # the control plane writes an intent to disk before it answers
_STREAM_IDLE_TIMEOUT_SECONDS = 45.0  # event streams send a heartbeat every 15 s
_POLL_SECONDS = 0.5
_OUTAGE_TIMEOUT_SECONDS = 60.0  # how long the control plane may be unreachable, e.g. during its restart


class ControlPlaneUnreachable(CliError):
    """The control plane does not answer; a retry may succeed."""


class NotFound(CliError):
    """The requested resource does not exist."""


def node_path(address: str) -> str:
    """Return the REST path of a node. Raises UsageError if `address` is invalid."""
    try:
        canonical = addresses.join(*addresses.split(address))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return f"/v1/nodes/{quote(canonical, safe='')}"


class ControlPlaneClient:
    """Connection to one control plane; a context manager. Each call raises CliError on failure."""

    def __init__(self, url: str) -> None:
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise UsageError(f"{url!r} is not a control plane URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"{url!r} is not a control plane URL; write it as http://host:3080")
        self._url = url.rstrip("/")
        self._token, self._token_variable = _load_token()
        self._clock_offset = timedelta()
        # `trust_env=False`, because proxies in the environment are meant for the internet. `verify=False`
        # without TLS, because loading the system's CAs takes longer than a call.
        self._http = httpx2.Client(
            base_url=self._url,
            timeout=_REQUEST_TIMEOUT_SECONDS,
            trust_env=False,
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            verify=_make_tls_context() if parsed.scheme == "https" else False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def server_time(self) -> datetime:
        """The control plane's time, from its last response; this machine's clock may be wrong."""
        return datetime.now(UTC) + self._clock_offset

    def get(self, path: str, **query: Any) -> Any:
        """Parameters of the query that are None are left out."""
        return self._call("GET", path, params=_without_none(query))

    def poll(self, path: str) -> Any:
        """Wait half a second, then `get`; retry for a minute while the control plane is unreachable."""
        deadline, was_reported = time.monotonic() + _OUTAGE_TIMEOUT_SECONDS, False
        while True:
            time.sleep(_POLL_SECONDS)
            try:
                return self.get(path)
            except ControlPlaneUnreachable as error:
                if time.monotonic() > deadline:
                    raise
                if not was_reported:
                    print_note(f"{error}; retrying")
                    was_reported = True

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call("POST", path, json=body)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PUT", path, json=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PATCH", path, json=body)

    def delete(self, path: str, **query: Any) -> Any:
        """Parameters of the query that are None are left out."""
        return self._call("DELETE", path, params=_without_none(query))

    def events(self, *, after: int | None, follow: bool) -> Iterator[dict[str, Any]]:
        """Yield the stored events with an id above `after`; with `follow`, then new events as they happen.

        Raises ControlPlaneUnreachable if the connection fails.
        """
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        query = {"follow": "true" if follow else "false"}
        timeout = httpx2.Timeout(_REQUEST_TIMEOUT_SECONDS, read=_STREAM_IDLE_TIMEOUT_SECONDS)
        request = self._http.stream("GET", "/v1/events", headers=headers, params=query, timeout=timeout)
        with self._translate_transport_errors(), request as response:
            if response.is_error:
                response.read()
                self._raise_error(response)
            for event in httpx2.EventSource(response):
                yield event.json()  # type: ignore[misc]

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._translate_transport_errors():
            response = self._http.request(method, path, **options)
        self._clock_offset = _clock_offset(response, default=self._clock_offset)
        if not response.is_success:
            self._raise_error(response)
        try:
            return response.json()
        except ValueError:
            raise CliError(f"{self._url} answers, but is not a Tidevoy control plane; check --url") from None

    @contextmanager
    def _translate_transport_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            text = str(error).partition("] ")[2] or str(error)  # without "[Errno 111]"
            reason = "no answer in time" if isinstance(error, httpx2.TimeoutException) else text.lower()
            if "certificate verify failed" in reason:
                raise ControlPlaneUnreachable(
                    f"the control plane at {self._url} has no valid certificate ({reason}); renew it"
                    f" (api.tls.cert), or name its CA with --ca or {CA_VARIABLE}"
                ) from None
            raise self._unreachable(reason) from None

    def _unreachable(self, reason: str) -> ControlPlaneUnreachable:
        return ControlPlaneUnreachable(
            f"the control plane at {self._url} does not answer ({reason}); "
            "start it with `tidevoy serve`, or set another URL with --url or TIDEVOY_URL"
        )

    def _raise_error(self, response: httpx2.Response) -> NoReturn:
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            if response.status_code == 503:  # sent at the limit `api.limits.connections`, or by a proxy
                raise self._unreachable("HTTP 503: too many connections, or a proxy without it") from None
            raise CliError(
                f"{self._url} answers {response.status_code}, but is not a Tidevoy control plane; check --url"
            ) from None
        if response.status_code == 401 and self._token:
            raise CliError(
                f"{self._url} does not accept the token from {self._token_variable}; use a configured token"
                " (`tidevoy token create` creates one)"
            )
        if response.status_code == 401:
            raise CliError(
                f"{self._url} requires authentication; set {TOKEN_VARIABLE} to a token or"
                f" {TOKEN_FILE_VARIABLE} to a token file, or name a client certificate with --cert and --key"
            )
        if response.status_code == 404:
            raise NotFound(detail)
        raise UsageError(detail) if response.status_code == 422 else CliError(detail)


def _without_none(query: Mapping[str, Any]) -> dict[str, Any] | None:
    # With an empty mapping, httpx2 would delete a query in the path.
    return {name: value for name, value in query.items() if value is not None} or None


def _load_token() -> tuple[str, str]:
    """Return the token and the variable that it comes from. Raises UsageError if the token is unusable."""
    token, source = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    if not token and (file := os.environ.get(TOKEN_FILE_VARIABLE)):
        try:
            return read_bearer_token(Path(file)), TOKEN_FILE_VARIABLE
        except InvalidTokenFile as error:
            raise UsageError(f"{TOKEN_FILE_VARIABLE}: {file} {error}") from None
    if token and not is_valid_token(token):
        raise UsageError(f"{source} does not hold a valid token; `tidevoy token create` creates one")
    return token, source


def _clock_offset(response: httpx2.Response, *, default: timedelta) -> timedelta:
    """Return how far the server's clock is ahead of ours, in whole seconds."""
    try:
        return parsedate_to_datetime(response.headers["Date"]) - datetime.now(UTC).replace(microsecond=0)
    except (KeyError, ValueError, TypeError):  # no date, an invalid one, or one without a time zone
        return default


def _make_tls_context() -> ssl.SSLContext:
    """Return a context with the CA and the client certificate. Raises UsageError if a file is unusable."""
    ca, cert, key = (os.environ.get(name) or None for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE))
    if (cert is None) != (key is None):
        raise UsageError(f"{CERT_VARIABLE} and {KEY_VARIABLE} (--cert and --key) must be set together")
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError:
        raise UsageError(f"{CA_VARIABLE}: {ca} cannot be read, or contains no PEM certificate") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except OSError:
            problem = f"{cert} and {key} cannot be read, or are not a PEM certificate and its key"
            raise UsageError(f"{CERT_VARIABLE}, {KEY_VARIABLE}: {problem}") from None
    return context
