"""An action that is a webhook: one POST of JSON, answered with 2xx when it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

_MAX_TOKEN_BYTES = 65_536  # bytes


async def post(
    url: str, body: Mapping[str, Any], idempotency_key: str, timeout: float, token_file: Path | None
) -> str:
    """Ask for it once; how that failed, to be put after the action's name, or nothing when it did not.

    `key` is the same for the same attempt. The answer's body is not looked at, and redirections are failures:
    where the token goes is for the configuration alone to say.
    """
    headers = {"Idempotency-Key": idempotency_key}
    if token_file is not None:
        try:
            token = (await asyncio.to_thread(_read_token, token_file)).strip()
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is no text"
            return f"was not begun: {token_file} cannot be read: {problem}"
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            return f"was not begun: {token_file} holds no token"
        headers["Authorization"] = f"Bearer {token}"
    try:
        async with (
            asyncio.timeout(timeout),
            httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as client,
            client.stream("POST", url, json=dict(body), headers=headers) as response,
        ):
            status = response.status_code
    except (TimeoutError, httpx2.TimeoutException):
        return f"was not answered within {timeout:g} s, and may have been carried out"
    except httpx2.ConnectError:
        return "was not begun: the webhook's server cannot be connected to"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"was not answered ({type(error).__name__}), and may have been carried out"
    return "" if 200 <= status < 300 else f"was answered with HTTP {status}"


def _read_token(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_TOKEN_BYTES).decode("ascii")
