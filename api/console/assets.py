"""Static files of the console, each at a path that contains a content hash, so that browsers can cache it."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import APIRouter, Response

from api.problems import ProblemError, ProblemKind

router = APIRouter(include_in_schema=False)

_URL_PREFIX = "/static/"
_DIGEST_LENGTH = 12
_CACHE_CONTROL = "public, max-age=31536000, immutable"
_SUFFIXES = frozenset({".css", ".js", ".svg"})


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    content: bytes
    media_type: str


def asset_url(name: str) -> str:
    """Return the URL of a file such as `console.css` or `vendor/htmx.min.js`. Raises KeyError."""
    return _urls()[name]


@router.get(_URL_PREFIX + "{name:path}")
async def get_asset(name: str) -> Response:
    try:
        asset = _assets()[_URL_PREFIX + name]
    except KeyError:
        detail = "this version has no such file; reload the page"
        raise ProblemError(ProblemKind.NOT_FOUND, detail) from None
    return Response(asset.content, media_type=asset.media_type, headers={"Cache-Control": _CACHE_CONTROL})


@cache
def _urls() -> Mapping[str, str]:
    return {name: _asset_path(name, content) for name, content in _files().items()}


@cache
def _assets() -> Mapping[str, Asset]:
    return {
        _asset_path(name, content): Asset(
            content, mimetypes.guess_type(name)[0] or "application/octet-stream"
        )
        for name, content in _files().items()
    }


@cache
def _files() -> Mapping[str, bytes]:
    root = files(__package__) / "static"
    contents = {file.name: file.read_bytes() for file in root.iterdir() if file.is_file()}
    contents |= {f"vendor/{file.name}": file.read_bytes() for file in (root / "vendor").iterdir()}
    return {name: content for name, content in contents.items() if PurePosixPath(name).suffix in _SUFFIXES}


def _asset_path(name: str, content: bytes) -> str:
    path = PurePosixPath(name)
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]
    return _URL_PREFIX + str(path.with_name(f"{path.stem}.{digest}{path.suffix}"))
