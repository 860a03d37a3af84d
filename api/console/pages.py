"""Render templates to responses: whole pages, their live parts that refresh themselves, and dialogs.

Static files have a content hash in their path, so that browsers can cache them.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from api.console import charts, comparison_charts, formatting
from api.problems import ProblemError, ProblemKind
from controlplane.model.nodes import State
from controlplane.verification.texts import DIGEST_DIGITS, NO_DIGEST, format_microseconds, format_ratio
from controlplane.version import VERSION

router = APIRouter(include_in_schema=False)

# These headers determine whether the response is JSON, a whole page, its live part, or a dialog.
_VARY = {"Vary": "Accept, HX-Request, HX-Target"}
_DIALOG_ID = "dialog-body"
_STATIC = Path(__file__).parent / "static"
_ASSET_SUFFIXES = frozenset({".css", ".js", ".svg"})
_ASSET_HEADERS = {"Cache-Control": "public, max-age=31536000, immutable"}


@cache
def _assets() -> Mapping[str, tuple[str, bytes]]:
    """Return the URL and content of each static file, by names such as `vendor/htmx.min.js`."""
    assets = {}
    for path in _STATIC.rglob("*"):
        if path.suffix in _ASSET_SUFFIXES:
            content, name = path.read_bytes(), path.relative_to(_STATIC)
            digest = hashlib.sha256(content).hexdigest()[:12]
            assets[name.as_posix()] = f"/static/{name.with_stem(f'{name.stem}.{digest}').as_posix()}", content
    return assets


@router.get("/static/{name:path}")
async def get_asset(name: str) -> Response:
    content = dict(_assets().values()).get(f"/static/{name}")
    if content is None:
        raise ProblemError(ProblemKind.NOT_FOUND, "this version has no such file; reload the page")
    return Response(content, media_type=mimetypes.guess_type(name)[0], headers=_ASSET_HEADERS)


def node_link(address: str) -> str:
    """Return the path of a node's page; its forms are below this path."""
    return f"/console/nodes/{quote(address, safe=':[]')}"


def envoy_link(envoy: str) -> str:
    """Return the path below which the forms of an Envoy are."""
    return f"/console/envoys/{quote(envoy, safe='')}"


def rollout_link(rollout_id: str) -> str:
    """Return the path of a rollout's page; its forms are below this path."""
    return f"/console/rollouts/{quote(rollout_id, safe='')}"


def verification_link(rollout_id: str, address: str) -> str:
    """Return the path of the comparison of a rollout's node with an old one."""
    return f"{rollout_link(rollout_id)}/verifications/{quote(address, safe=':[]')}"


def statement_link(digest: str) -> str:
    """Return the path of a statement's page."""
    return f"/console/statements/{quote(digest, safe='')}"


_templates = Environment(
    loader=PackageLoader(__package__),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals |= {
    "asset": lambda name: _assets()[name][0],
    "version": VERSION,
    "State": State,
    "charts": charts,
    "DIGEST_DIGITS": DIGEST_DIGITS,
    "NO_DIGEST": NO_DIGEST,
    "INTERVAL_WIDTH": comparison_charts.INTERVAL_WIDTH,
    "SCATTER_WIDTH": comparison_charts.SCATTER_WIDTH,
    "SCATTER_HEIGHT": comparison_charts.SCATTER_HEIGHT,
    "node_link": node_link,
    "envoy_link": envoy_link,
    "rollout_link": rollout_link,
    "verification_link": verification_link,
    "statement_link": statement_link,
}
_templates.filters |= {
    "count": formatting.format_count,
    "rate": formatting.format_rate,
    "latency": formatting.format_latency,
    "microseconds": format_microseconds,
    "ratio": format_ratio,
    "percent": formatting.format_percent,
    "duration": formatting.format_duration,
    "time": formatting.format_time,
    "iso_time": formatting.format_iso_time,
    "humanize": formatting.humanize,
}


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """Return a whole page."""
    return HTMLResponse(_render(request, template, values), status, headers=_VARY)


def live_page(
    request: Request, template: str, topic: str, link: str, /, values: Mapping[str, Any], **page_values: Any
) -> Response:
    """Return a page with a live part, rendered from `_{template}`, which the browser refreshes after changes.

    `topic` is a topic of `api.console.live_updates`; `link` is the page's address. The refresh URL contains
    a digest of the live part; if the content has not changed, the response is 204. `page_values` are for the
    rest of the page.
    """
    content = _render(request, f"_{template}", values)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    if request.query_params.get("seen") == digest:
        return Response(status_code=204, headers=_VARY)
    separator = "&" if "?" in link else "?"
    part = _templates.get_template("live.html").render(
        content=Markup(content),  # noqa: S704 - rendered above, with everything escaped
        refresh_url=f"{link}{separator}seen={digest}",
        topic=topic,
    )
    if request.headers.get("hx-target") == "live":
        # Only a user's navigation changes the address in the browser; a refresh does not.
        push_url = {} if "seen" in request.query_params else {"HX-Push-Url": link}
        return HTMLResponse(part, headers=_VARY | push_url)
    return page(request, template, **{**values, **page_values, "live": Markup(part)})  # noqa: S704 - as above


def form_page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """Return a form: in the page's dialog if the dialog requested it, otherwise as a separate page."""
    if is_dialog_request(request):
        return HTMLResponse(_render(request, template, values), status, headers=_VARY)
    content = Markup(_render(request, template, values))  # noqa: S704 - rendered with everything escaped
    return page(request, "form.html", status, content=content)


def success(request: Request, text: str, next_path: str, *, leave_page: bool = False) -> Response:
    """Return the response after a successful form.

    The dialog closes and the page announces `text`; with `leave_page`, or without JavaScript, the browser
    goes to `next_path`.
    """
    if not is_dialog_request(request):
        return RedirectResponse(next_path, 303)
    if leave_page:
        return Response(status_code=204, headers={"HX-Redirect": next_path})
    return Response(headers={"HX-Trigger": json.dumps({"done": {"text": text}}), "HX-Reswap": "none"})


def render_file(template: str, /, **values: Any) -> str:
    """Return a page as a file of its own, with the style sheet in it and without links."""
    css = _assets()["console.css"][1].decode()
    return _templates.get_template(template).render(css=Markup(css), **values)  # noqa: S704 - our own file


def is_dialog_request(request: Request) -> bool:
    """Whether the response goes into the dialog of an open page."""
    return request.headers.get("hx-target") == _DIALOG_ID


def _render(request: Request, template: str, values: Mapping[str, Any]) -> str:
    return _templates.get_template(template).render(
        caller=request.state.caller,
        requires_auth=request.app.state.access.requires_auth,
        path=request.url.path,
        **values,
    )
