"""Calls to a control plane: JSON in and out, every failure as one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx2

from cli.credentials import TOKEN, TOKEN_FILE, credentials
from cli.errors import FAILED, USAGE, Failure
from controlplane import address as addresses

_TIMEOUT = 15.0  # seconds; an intent has to reach a disk
_SILENCE = 45.0  # seconds; event streams send a heartbeat every 15


class Unreachable(Failure):
    """The control plane does not answer; it may later."""


class Missing(Failure):
    """What was asked for is not there."""


def node_path(address: str) -> str:
    """The path of a node. Failure (usage) when the address is none."""
    try:
        canonical = addresses.join(*addresses.split(address))
    except ValueError as error:
        raise Failure(str(error), USAGE) from None
    return f"/v1/nodes/{quote(canonical, safe='')}"


class Client:
    """A connection to one control plane; a context manager."""

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        if scheme not in ("http", "https"):
            raise Failure(f"{url!r} is no URL of a control plane; write it as http://host:3080", USAGE)
        self._url = url.rstrip("/")
        self._shown = credentials(self._url)
        try:
            # Proxies of the environment are for the internet; and loading CAs takes longer than a plain call.
            self._http = httpx2.Client(
                base_url=self._url,
                timeout=_TIMEOUT,
                trust_env=False,
                headers=self._shown.headers,
                verify=self._shown.tls,
            )
        except httpx2.InvalidURL as error:
            raise Failure(f"{url!r} is no URL of a control plane: {error}", USAGE) from None

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
        """Events, first those kept after the id `after`; with `follow` until the server ends. Unreachable."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        query = {"follow": "true" if follow else "false"}
        with self._unreachable():
            timeout = httpx2.Timeout(_TIMEOUT, read=_SILENCE)
            with self._http.stream(
                "GET", "/v1/events", headers=headers, params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    self._fail(response)
                for event in httpx2.EventSource(response):
                    yield event.json()  # type: ignore[misc]

    def _call(self, method: str, path: str, **options: Any) -> Any:
        with self._unreachable():
            response = self._http.request(method, path, **options)
        if not response.is_success:
            self._fail(response)
        try:
            return response.json()
        except ValueError:
            raise Failure(f"{self._url} answers, but not as a Tidevoy control plane; check --url") from None

    @contextmanager
    def _unreachable(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            text = str(error).partition("] ")[2] or str(error)  # without "[Errno 111]"
            reason = "no answer in time" if isinstance(error, httpx2.TimeoutException) else text.lower()
            raise Unreachable(
                f"the control plane at {self._url} does not answer ({reason}); "
                "start it with `tidevoy serve`, or name another with --url or TIDEVOY_URL"
            ) from None

    def _unknown(self) -> str:
        if self._shown.token:
            return (
                f"{self._url} does not know the token of {self._shown.source}; ask for one that it knows"
                " (`tidevoy token create` makes them)"
            )
        return (
            f"{self._url} asks who is calling; put a token into {TOKEN}, the path of its file into"
            f" {TOKEN_FILE}, or name a certificate that it knows with --cert and --key"
        )

    def _fail(self, response: httpx2.Response) -> NoReturn:
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            raise Failure(
                f"{self._url} answers {response.status_code}, but not as a Tidevoy control plane; check --url"
            ) from None
        if response.status_code == 401:
            raise Failure(self._unknown(), FAILED)
        if response.status_code == 404:
            raise Missing(detail)
        raise Failure(detail, USAGE if response.status_code == 422 else FAILED)
