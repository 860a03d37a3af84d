"""HTTP `GET` of responses that may be large, over one persistent connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx2

from controlplane.errors import TidevoyError
from controlplane.observe.health.client_tls import ReloadingClientContext

_MAX_BODY_BYTES = 16 * 1024 * 1024  # a longer body cannot be the expected response
_MAX_ERROR_CHARS = 200


class FetchError(TidevoyError):
    """A request failed, or its response is unusable; the message contains URL and reason."""


class HttpFetcher:
    """Sends requests to one server, one at a time."""

    def __init__(self, tls: ReloadingClientContext | None, host: str = "") -> None:
        """`host`: the name for the `Host` header and the certificate, if the URLs contain an IP address."""
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._headers = {"User-Agent": "tidevoy", "Accept-Encoding": "gzip"} | (
            {"Host": host} if host else {}
        )
        # The URL has the resolved IP address, but the certificate has the name.
        self._extensions = {"sni_hostname": host.rpartition(":")[0].strip("[]")} if host else None
        self._client: httpx2.AsyncClient | None = None

    async def get(
        self,
        url: str,
        timeout: float,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the response body. Raises FetchError, also after `timeout` seconds."""
        body = bytearray()
        try:
            async with asyncio.timeout(timeout):
                client = await self._get_client()
                async with client.stream(
                    "GET", url, params=params, headers=headers, extensions=self._extensions
                ) as response:
                    if response.status_code != httpx2.codes.OK:
                        raise FetchError(f"{url} answers HTTP {response.status_code}")
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > _MAX_BODY_BYTES:
                            raise FetchError(f"{url} answers with more than {_MAX_BODY_BYTES >> 20} MiB")
        except TimeoutError:
            raise FetchError(f"{url} does not answer completely within {timeout:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
            text = "".join(c if c.isprintable() else " " for c in str(error))[:_MAX_ERROR_CHARS]
            failure = "reached" if isinstance(error, httpx2.ConnectError) else "read"
            raise FetchError(f"{url} cannot be {failure}: {text or type(error).__name__}") from error
        return bytes(body)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _get_client(self) -> httpx2.AsyncClient:
        context = self._tls.current() if self._tls is not None else None
        if self._client is not None and context is not self._context:
            await self.close()  # our client certificate has been renewed
        if self._client is None:
            self._context = context
            self._client = httpx2.AsyncClient(
                verify=context if context is not None else False,
                trust_env=False,  # the proxies in environment variables are not meant for nodes
                timeout=None,
                limits=httpx2.Limits(max_connections=1, keepalive_expiry=90.0),
                headers=self._headers,
            )
        return self._client
