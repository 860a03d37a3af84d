"""Templates become answers: whole pages, the parts of them that refresh themselves, and dialogs."""

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

# What a page is made of depends on who asks for which part of it.
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
    "clock": formatting.format_time,
    "machine": formatting.format_iso_time,
    "words": formatting.humanize,
}


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """A whole page."""
    return HTMLResponse(_render(request, template, values), status, headers=_VARY)


def live_page(
    request: Request, template: str, topics: str, link: str, /, values: Mapping[str, Any], **page_values: Any
) -> Response:
    """A page with a part, `template` with `_` before its name, which is asked for again after changes.

    `topics` are those of `api.console.live_updates`, `link` is the page's address. The part knows what it shows:
    asked for again with that, it comes only when there is something else to show (else 204). `more` is for
    the rest of the page.
    """
    inner = _render(request, f"_{template}", values)
    digest = hashlib.sha256(inner.encode()).hexdigest()[:16]
    if request.query_params.get("seen") == digest:
        return Response(status_code=204, headers=_VARY)
    separator = "&" if "?" in link else "?"
    part = _templates.get_template("live.html").render(
        inner=Markup(inner),  # noqa: S704 - rendered above, with everything escaped
        again=f"{link}{separator}seen={digest}",
        triggers=", ".join(f"changed-{topic} from:body" for topic in topics.split()),
    )
    if request.headers.get("hx-target") == "live":
        # Only what somebody asked for by a click is another page; what refreshes itself is not.
        moved = {} if "seen" in request.query_params else {"HX-Push-Url": link}
        return HTMLResponse(part, headers=_VARY | moved)
    return page(request, template, **{**values, **page_values, "live": Markup(part)})  # noqa: S704 - as above


def form_page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """A form: in the page's dialog when it is asked for by one, else as a page of its own."""
    if is_dialog_request(request):
        return HTMLResponse(_render(request, template, values), status, headers=_VARY)
    inner = Markup(_render(request, template, values))  # noqa: S704 - rendered with everything escaped
    return page(request, "form.html", status, inner=inner)


def success(request: Request, text: str, next_path: str, *, leave_page: bool = False) -> Response:
    """It is done: the dialog closes and says so, or a browser without JavaScript goes to the page `then`.

    With `leave`, the page with the dialog is left for `then`, too.
    """
    if not is_dialog_request(request):
        return RedirectResponse(next_path, 303)
    if leave_page:
        return Response(status_code=204, headers={"HX-Redirect": next_path})
    return Response(headers={"HX-Trigger": json.dumps({"done": {"text": text}}), "HX-Reswap": "none"})


def is_dialog_request(request: Request) -> bool:
    """Whether the answer goes into the dialog of a page that is there already."""
    return request.headers.get("hx-target") == _DIALOG_ID


def is_htmx_request(request: Request) -> bool:
    """Whether a script asks for something to put into a page."""
    return request.headers.get("hx-request") == "true"


def _render(request: Request, template: str, values: Mapping[str, Any]) -> str:
    return _templates.get_template(template).render(
        caller=request.state.caller,
        asks=request.app.state.access.requires_auth,
        path=request.url.path,
        **values,
    )
