"""HTTP `GET` of responses that may be large, streamed over one persistent connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping

import httpx2

from controlplane.errors import TidevoyError
from controlplane.observe.health.client_tls import ReloadingClientContext

_MAX_BODY_BYTES = 64 * 1024 * 1024  # a longer body cannot be the expected response
_MAX_ERROR_CHARS = 200


class FetchError(TidevoyError):
    """A request failed; the text names the URL and the reason."""

    retryable = True


class HttpFetcher:
    """Sends requests to one server, one at a time."""

    def __init__(self, tls: ReloadingClientContext | None, host: str = "") -> None:
        """`host`: the name for the `Host` header and the certificate, if the URLs have an IP address."""
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._host = host
        self._client: httpx2.AsyncClient | None = None

    async def get(
        self,
        url: str,
        on_chunk: Callable[[bytes], None],
        timeout: float,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Fetch a URL within `timeout` seconds and pass the body to `on_chunk`. Raises FetchError."""
        try:
            async with asyncio.timeout(timeout):
                client = await self._get_client()
                await self._stream_body(client, url, on_chunk, params, headers)
        except TimeoutError:
            raise FetchError(f"{url} does not answer completely within {timeout:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise FetchError(f"{url} {_describe_error(error)}") from error

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _stream_body(
        self,
        client: httpx2.AsyncClient,
        url: str,
        on_chunk: Callable[[bytes], None],
        params: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        size = 0
        host_header = {"Host": self._host} if self._host else {}
        # Certificates are for names, but we connect to the IP address that the name resolved to.
        extensions = {"sni_hostname": self._host.rpartition(":")[0].strip("[]")} if self._host else None
        async with client.stream(
            "GET", url, params=params, headers={**host_header, **(headers or {})}, extensions=extensions
        ) as response:
            if response.status_code != httpx2.codes.OK:
                raise FetchError(f"{url} answers HTTP {response.status_code}")
            async for chunk in response.aiter_bytes():
                size += len(chunk)
                if size > _MAX_BODY_BYTES:
                    raise FetchError(f"{url} answers with more than {_MAX_BODY_BYTES >> 20} MiB")
                on_chunk(chunk)

    async def _get_client(self) -> httpx2.AsyncClient:
        context = self._tls.current() if self._tls is not None else None
        if self._client is not None and context is not self._context:
            await self.close()  # our client certificate has been renewed
        if self._client is None:
            self._context = context
            self._client = httpx2.AsyncClient(
                verify=context if context is not None else False,
                trust_env=False,  # a proxy for outbound traffic is not for connections to the nodes
                timeout=None,
                limits=httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=90.0),
                headers={"User-Agent": "tidevoy", "Accept-Encoding": "gzip"},
            )
        return self._client


def _describe_error(error: Exception) -> str:
    """Describe an error on one line, to follow the URL."""
    text = "".join(c if c.isprintable() else " " for c in str(error))[:_MAX_ERROR_CHARS]
    if isinstance(error, httpx2.ConnectError):
        return f"cannot be reached: {text}" if text else "cannot be reached"
    return f"cannot be read: {text or type(error).__name__}"
