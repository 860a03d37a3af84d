"""HTTP client of the control plane's REST API: JSON in and out, every error as one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx2

from cli.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, load_credentials
from cli.errors import EXIT_FAILED, EXIT_USAGE, CliError
from controlplane import address as addresses

_REQUEST_TIMEOUT_SECONDS = 15.0  # the control plane writes an intent to disk before it answers
_STREAM_IDLE_TIMEOUT_SECONDS = 45.0  # event streams send a heartbeat every 15 s


class ControlPlaneUnreachable(CliError):
    """The control plane does not answer; a retry may succeed."""


class NotFound(CliError):
    """The requested resource does not exist."""


def node_path(address: str) -> str:
    """Return the REST path of a node. Raises CliError (usage) if `address` is invalid."""
    try:
        canonical = addresses.join(*addresses.split(address))
    except ValueError as error:
        raise CliError(str(error), EXIT_USAGE) from None
    return f"/v1/nodes/{quote(canonical, safe='')}"


class ControlPlaneClient:
    """Connection to one control plane; a context manager. Each call raises CliError on failure."""

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        if scheme not in ("http", "https"):
            raise CliError(f"{url!r} is not a control plane URL; write it as http://host:3080", EXIT_USAGE)
        self._url = url.rstrip("/")
        self._credentials = load_credentials(self._url)
        try:
            # `trust_env=False`: proxies in the environment are meant for the internet, and loading the
            # system's
            # CAs takes longer than a plain call.
            self._http = httpx2.Client(
                base_url=self._url,
                timeout=_REQUEST_TIMEOUT_SECONDS,
                trust_env=False,
                headers=self._credentials.headers,
                verify=self._credentials.tls,
            )
        except httpx2.InvalidURL as error:
            raise CliError(f"{url!r} is not a control plane URL: {error}", EXIT_USAGE) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call("POST", path, json=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._call("PATCH", path, json=body)

    def delete(self, path: str, **query: str) -> Any:
        return self._call("DELETE", path, params=query)

    def events(self, *, after: int | None, follow: bool) -> Iterator[dict[str, Any]]:
        """Yield the stored events with an id above `after`; with `follow`, then new ones as they happen.

        Raises ControlPlaneUnreachable if the connection fails.
        """
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        query = {"follow": "true" if follow else "false"}
        with self._translate_transport_errors():
            timeout = httpx2.Timeout(_REQUEST_TIMEOUT_SECONDS, read=_STREAM_IDLE_TIMEOUT_SECONDS)
            with self._http.stream(
                "GET", "/v1/events", headers=headers, params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    self._raise_error(response)
                for event in httpx2.EventSource(response):
                    yield event.json()  # type: ignore[misc]

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._translate_transport_errors():
            response = self._http.request(method, path, **options)
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
            raise ControlPlaneUnreachable(
                f"the control plane at {self._url} does not answer ({reason}); "
                "start it with `tidevoy serve`, or set another URL with --url or TIDEVOY_URL"
            ) from None

    def _unauthorized_message(self) -> str:
        if self._credentials.token:
            return (
                f"{self._url} does not accept the token from {self._credentials.token_variable}; use a"
                " configured"
                " token (`tidevoy token create` creates one)"
            )
        return (
            f"{self._url} requires authentication; set {TOKEN_VARIABLE} to a token or"
            f" {TOKEN_FILE_VARIABLE} to a token file, or name a client certificate with --cert and --key"
        )

    def _raise_error(self, response: httpx2.Response) -> NoReturn:
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            raise CliError(
                f"{self._url} answers {response.status_code}, but is not a Tidevoy control plane; check --url"
            ) from None
        if response.status_code == 401:
            raise CliError(self._unauthorized_message(), EXIT_FAILED)
        if response.status_code == 404:
            raise NotFound(detail)
        raise CliError(detail, EXIT_USAGE if response.status_code == 422 else EXIT_FAILED)
