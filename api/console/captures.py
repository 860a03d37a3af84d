"""The Capture page: the running or last capture of traffic, and the forms that start and stop one."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from api.console import pages
from api.console.errors import ConsoleRoute
from api.console.forms import Form, submit
from api.dependencies import EngineDep
from api.schemas.captures import StartCaptureRequest
from controlplane.engine.engine import Engine

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_PAGE = "/console/capture"
_DEFAULT_MINUTES = 60.0
_SECONDS_PER_MINUTE = 60.0


@router.get(_PAGE)
async def show_capture(request: Request, engine: EngineDep) -> Response:
    values = {"view": engine.cluster.capture(), "is_off": engine.settings.capture.directory is None}
    return pages.live_page(request, "capture.html", "capture", _PAGE, values)


@router.get(f"{_PAGE}/start")
async def show_start_form(request: Request, engine: EngineDep) -> Response:
    return _start_form(request, Form())


@router.post(f"{_PAGE}/start")
async def start_capture(request: Request, engine: EngineDep) -> Response:
    async def start(form: Form) -> Response:
        minutes = form.number("minutes", "Minutes", _DEFAULT_MINUTES)
        body = StartCaptureRequest.model_validate(
            {
                "name": form.get("name") or None,
                "duration_seconds": minutes * _SECONDS_PER_MINUTE,
                **{field: _names(form, field) for field in ("envoys", "users", "groups")},
            }
        )
        await engine.captures.start(
            body.name,
            duration=body.duration_seconds,
            envoys=body.envoys,
            users=body.users,
            groups=body.groups,
        )
        capture = engine.cluster.capture().capture
        request.state.audit_subject = capture and capture.name
        return pages.success(request, "the capture has started", _PAGE)

    return await submit(request, start, partial(_start_form, request))


@router.get(f"{_PAGE}/stop")
async def show_stop_form(request: Request, engine: EngineDep) -> Response:
    return _stop_form(request, engine, Form())


@router.post(f"{_PAGE}/stop")
async def stop_capture(request: Request, engine: EngineDep) -> Response:
    async def stop(form: Form) -> Response:
        await engine.captures.stop()
        return pages.success(request, "the capture has ended", _PAGE)

    return await submit(request, stop, partial(_stop_form, request, engine))


def _names(form: Form, field: str) -> list[str]:
    """Return the names in a field, which are separated by commas."""
    return [name for part in form.get(field).split(",") if (name := part.strip())]


def _start_form(request: Request, form: Form) -> Response:
    return pages.form_page(
        request, "_capture_start.html", form.status, form=form, default_minutes=_DEFAULT_MINUTES
    )


def _stop_form(request: Request, engine: Engine, form: Form) -> Response:
    return pages.form_page(
        request, "_capture_stop.html", form.status, form=form, view=engine.cluster.capture()
    )
