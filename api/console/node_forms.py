"""Forms for the operations on nodes: add, drain, undrain, remove, and set the weight."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from api.console import forms, links, pages
from api.console.context import NodeAddressPath
from api.console.errors import ConsoleRoute
from api.dependencies import EngineDep
from api.schemas import nodes
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import EMPTY_MAP

router = APIRouter(include_in_schema=False, route_class=ConsoleRoute)

_SECONDS_PER_MINUTE = 60.0


@router.get("/console/add")
async def show_add_form(request: Request) -> Response:
    return _add_form(request, EMPTY_MAP)


@router.post("/console/nodes")
async def add_node(request: Request, engine: EngineDep) -> Response:
    async def add(form: forms.FormFields) -> Response:
        node = nodes.AddNodeRequest(
            address=form.get("address", ""),
            status_address=form.get("status_address"),
            weight=forms.integer(form, "weight", "Weight", 0) if "weight" in form else None,
            labels=forms.labels(form, "labels") or None,
        )
        request.state.audit_subject = node.address
        await engine.add(
            node.address,
            status_address=node.status_address,
            weight=node.weight,
            labels=node.labels,
        )
        text = f"{node.address} was added; it gets sessions once it passes its checks"
        return pages.success(request, text, links.node(node.address))

    return await forms.submit(request, add, lambda *args: _add_form(request, *args))


def _add_form(request: Request, form: forms.FormFields, status: int = 200, error: str = "") -> Response:
    return pages.form_page(request, "_add.html", status, form=form, error=error)


@router.get("/console/nodes/{address}/drain")
async def show_drain_form(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    return _node_form(request, engine, "_drain.html", address)


@router.post("/console/nodes/{address}/drain")
async def drain_node(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    async def drain(form: forms.FormFields) -> Response:
        parameters = nodes.DrainRequest.model_validate(
            {
                "deadline_seconds": forms.number(form, "minutes", "Minutes", 10.0) * _SECONDS_PER_MINUTE,
                "on_deadline": form.get("on_deadline", OnDeadline.KEEP.value),
            }
        )
        await engine.drain(
            address,
            deadline_seconds=parameters.deadline_seconds,
            on_deadline=OnDeadline(parameters.on_deadline),
        )
        return pages.success(request, f"{address} is being drained", links.node(address))

    return await _submit(request, engine, "_drain.html", address, drain)


@router.get("/console/nodes/{address}/undrain")
async def show_undrain_form(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    return _node_form(request, engine, "_undrain.html", address)


@router.post("/console/nodes/{address}/undrain")
async def undrain_node(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    async def undrain(form: forms.FormFields) -> Response:
        await engine.undrain(address)
        return pages.success(request, f"the drain of {address} is cancelled", links.node(address))

    return await _submit(request, engine, "_undrain.html", address, undrain)


@router.get("/console/nodes/{address}/remove")
async def show_remove_form(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    return _node_form(request, engine, "_remove.html", address)


@router.post("/console/nodes/{address}/remove")
async def remove_node(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    async def remove(form: forms.FormFields) -> Response:
        await engine.remove(address, force=form.get("force") == "yes")
        return pages.success(request, f"{address} is being removed", "/", leave_page=True)

    return await _submit(request, engine, "_remove.html", address, remove)


@router.get("/console/nodes/{address}/weight")
async def show_weight_form(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    return _node_form(request, engine, "_weight.html", address)


@router.post("/console/nodes/{address}/weight")
async def weigh_node(request: Request, engine: EngineDep, address: NodeAddressPath) -> Response:
    async def set_weight(form: forms.FormFields) -> Response:
        change = nodes.UpdateNodeRequest(weight=forms.integer(form, "weight", "Weight", 0), labels=None)
        await engine.update(address, weight=change.weight)
        return pages.success(request, f"the weight of {address} is now {change.weight}", links.node(address))

    return await _submit(request, engine, "_weight.html", address, set_weight)


async def _submit(request: Request, engine: EngineDep, template: str, address: str, action: Any) -> Response:
    return await forms.submit(
        request, action, lambda *args: _node_form(request, engine, template, address, *args)
    )


def _node_form(
    request: Request,
    engine: EngineDep,
    template: str,
    address: str,
    form: forms.FormFields = EMPTY_MAP,
    status: int = 200,
    error: str = "",
) -> Response:
    view = engine.node(address)
    other_nodes = sum(
        planned.eds_health is not None and planned.weight > 0 and planned.node.address != address
        for planned in engine.plan_and_facts()[0].nodes.values()
    )
    return pages.form_page(
        request,
        template,
        status,
        view=view,
        address=address,
        action=links.node(address),
        other_nodes=other_nodes,
        form=form,
        error=error,
    )
