"""What operators do to nodes: the forms that say what will happen, and what they do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api.console import forms, links, pages
from api.console.context import TheAddress
from api.console.errors import ConsoleRoute
from api.dependencies import TheEngine
from api.schemas import nodes
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import NOTHING

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_MINUTE = 60.0


@router.get("/console/add")
async def show_adding(request: Request) -> Response:
    return _adding(request, NOTHING)


@router.post("/console/nodes")
async def add_node(request: Request, engine: TheEngine) -> Response:
    async def add(form: forms.Form) -> Response:
        wanted = nodes.NodeToAdd(
            address=form.get("address", ""),
            status_address=form.get("status_address"),
            weight=forms.whole(form, "weight", "Weight", 0) if "weight" in form else None,
            labels=forms.labels(form, "labels") or None,
        )
        request.state.audit_subject = wanted.address
        await engine.add(
            wanted.address,
            status_address=wanted.status_address,
            weight=wanted.weight,
            labels=wanted.labels,
        )
        text = f"{wanted.address} is known now; it gets sessions when it passes its checks"
        return pages.done(request, text, links.node(wanted.address))

    return await forms.attempt(request, add, lambda *again: _adding(request, *again))


def _adding(request: Request, form: forms.Form, status: int = 200, refused: str = "") -> Response:
    return pages.form(request, "_add.html", status, form=form, refused=refused)


@router.get("/console/nodes/{address}/drain")
async def show_draining(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    return _asking(request, engine, "_drain.html", address)


@router.post("/console/nodes/{address}/drain")
async def drain_node(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    async def drain(form: forms.Form) -> Response:
        wanted = nodes.DrainRequest.model_validate(
            {
                "deadline_seconds": forms.number(form, "minutes", "Minutes", 10.0) * _MINUTE,
                "on_deadline": form.get("on_deadline", OnDeadline.KEEP.value),
            }
        )
        await engine.drain(
            address, deadline_seconds=wanted.deadline_seconds, on_deadline=OnDeadline(wanted.on_deadline)
        )
        return pages.done(request, f"{address} is being drained", links.node(address))

    return await _attempt(request, engine, "_drain.html", address, drain)


@router.get("/console/nodes/{address}/undrain")
async def show_undraining(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    return _asking(request, engine, "_undrain.html", address)


@router.post("/console/nodes/{address}/undrain")
async def undrain_node(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    async def undrain(form: forms.Form) -> Response:
        await engine.undrain(address)
        return pages.done(request, f"the drain of {address} is taken back", links.node(address))

    return await _attempt(request, engine, "_undrain.html", address, undrain)


@router.get("/console/nodes/{address}/remove")
async def show_removing(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    return _asking(request, engine, "_remove.html", address)


@router.post("/console/nodes/{address}/remove")
async def remove_node(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    async def remove(form: forms.Form) -> Response:
        await engine.remove(address, force=form.get("force") == "yes")
        return pages.done(request, f"{address} is being removed", "/", leave=True)

    return await _attempt(request, engine, "_remove.html", address, remove)


@router.get("/console/nodes/{address}/weight")
async def show_weighing(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    return _asking(request, engine, "_weight.html", address)


@router.post("/console/nodes/{address}/weight")
async def weigh_node(request: Request, engine: TheEngine, address: TheAddress) -> Response:
    async def weigh(form: forms.Form) -> Response:
        change = nodes.NodeChange(weight=forms.whole(form, "weight", "Weight", 0), labels=None)
        await engine.amend(address, weight=change.weight)
        return pages.done(request, f"the weight of {address} is {change.weight} now", links.node(address))

    return await _attempt(request, engine, "_weight.html", address, weigh)


async def _attempt(request: Request, engine: TheEngine, template: str, address: str, deed: Any) -> Response:
    return await forms.attempt(
        request, deed, lambda *again: _asking(request, engine, template, address, *again)
    )


def _asking(
    request: Request,
    engine: TheEngine,
    template: str,
    address: str,
    form: forms.Form = NOTHING,
    status: int = 200,
    refused: str = "",
) -> Response:
    view = engine.node(address)
    others = sum(
        planned.advice is not None and planned.weight > 0 and planned.node.address != address
        for planned in engine.seen()[0].nodes.values()
    )
    return pages.form(
        request,
        template,
        status,
        view=view,
        address=address,
        action=links.node(address),
        others=others,
        form=form,
        refused=refused,
    )
