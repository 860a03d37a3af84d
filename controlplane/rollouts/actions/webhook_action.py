"""Runs an action's webhook: one POST of JSON; a 2xx response means success."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

_MAX_TOKEN_BYTES = 65_536


async def post(
    url: str, body: Mapping[str, Any], idempotency_key: str, timeout: float, token_file: Path | None
) -> str:
    """Send the request once; return why it failed, as a clause about the action, or an empty string.

    `idempotency_key` is the same for the same attempt. The response body is ignored. Redirects are failures:
    the configuration alone decides where the token goes.
    """
    headers = {"Idempotency-Key": idempotency_key}
    if token_file is not None:
        try:
            token = (await asyncio.to_thread(_read_token, token_file)).strip()
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            return f"was not started: {token_file} cannot be read: {problem}"
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            return f"was not started: {token_file} contains no valid token"
        headers["Authorization"] = f"Bearer {token}"
    try:
        async with (
            asyncio.timeout(timeout),
            httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, json=dict(body), headers=headers) as response,
        ):
            status = response.status_code
    except (TimeoutError, httpx2.TimeoutException):
        return f"was not answered within {timeout:g} s and may have been executed"
    except httpx2.ConnectError:
        return "was not started: cannot connect to the webhook's server"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"was not answered ({type(error).__name__}) and may have been executed"
    return "" if 200 <= status < 300 else f"was answered with HTTP {status}"


def _read_token(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_TOKEN_BYTES).decode("ascii")
