"""Render templates to responses: whole pages, their live parts that refresh themselves, and dialogs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from api.console import assets, formatting, links, sparkline
from controlplane.model.nodes import State
from controlplane.version import VERSION

# The content at one URL depends on these headers: JSON, whole page, live part, or dialog.
_VARY = {"Vary": "Accept, HX-Request, HX-Target"}
_DIALOG_ID = "dialog-body"

_templates = Environment(
    loader=PackageLoader(__package__),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals |= {
    "asset": assets.asset_url,
    "version": VERSION,
    "State": State,
    "sparkline": sparkline,
    "links": links,
}
_templates.filters |= {
    "count": formatting.format_count,
    "rate": formatting.format_rate,
    "latency": formatting.format_latency,
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
    request: Request, template: str, topics: str, link: str, /, values: Mapping[str, Any], **page_values: Any
) -> Response:
    """Return a page with a live part, rendered from `_{template}`, which is requested again after changes.

    `topics` are those of `api.console.live_updates`; `link` is the page's address. The refresh URL of the
    live part contains a digest of its content; if the content has not changed, the response is 204.
    `page_values` are for the rest of the page.
    """
    content = _render(request, f"_{template}", values)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    if request.query_params.get("seen") == digest:
        return Response(status_code=204, headers=_VARY)
    separator = "&" if "?" in link else "?"
    part = _templates.get_template("live.html").render(
        content=Markup(content),  # noqa: S704 - rendered above, with everything escaped
        refresh_url=f"{link}{separator}seen={digest}",
        triggers=", ".join(f"changed-{topic} from:body" for topic in topics.split()),
    )
    if request.headers.get("hx-target") == "live":
        # Only a user's navigation changes the address in the browser; a refresh does not.
        push_url = {} if "seen" in request.query_params else {"HX-Push-Url": link}
        return HTMLResponse(part, headers=_VARY | push_url)
    return page(request, template, **{**values, **page_values, "live": Markup(part)})  # noqa: S704 - as above


def form_page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """Return a form: in the page's dialog if the dialog requested it, otherwise as a page of its own."""
    if is_dialog_request(request):
        return HTMLResponse(_render(request, template, values), status, headers=_VARY)
    content = Markup(_render(request, template, values))  # noqa: S704 - rendered with everything escaped
    return page(request, "form.html", status, content=content)


def success(request: Request, text: str, next_path: str, *, leave_page: bool = False) -> Response:
    """Return the response after a successful form.

    The dialog closes and shows `text`; with `leave_page`, or without JavaScript, the browser goes to
    `next_path`.
    """
    if not is_dialog_request(request):
        return RedirectResponse(next_path, 303)
    if leave_page:
        return Response(status_code=204, headers={"HX-Redirect": next_path})
    return Response(headers={"HX-Trigger": json.dumps({"done": {"text": text}}), "HX-Reswap": "none"})


def is_dialog_request(request: Request) -> bool:
    """Whether the response goes into the dialog of an open page."""
    return request.headers.get("hx-target") == _DIALOG_ID


def is_htmx_request(request: Request) -> bool:
    """Whether htmx requests content for an open page."""
    return request.headers.get("hx-request") == "true"


def _render(request: Request, template: str, values: Mapping[str, Any]) -> str:
    return _templates.get_template(template).render(
        caller=request.state.caller,
        requires_auth=request.app.state.access.requires_auth,
        path=request.url.path,
        **values,
    )
