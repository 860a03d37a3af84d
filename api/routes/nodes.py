"""`/v1/nodes`: the TiDB servers, and what operators ask for them."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Response

from api.dependencies import JsonBody, TheEngine
from api.problems import Kind, declared
from api.schemas import nodes
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import NOTHING

router = APIRouter(tags=["nodes"])

_Address = Annotated[nodes.Address, Path(description="`host:port`, percent-encoded where a client must.")]
_BODY = (Kind.FOREIGN_ORIGIN, Kind.TOO_LARGE, Kind.UNSUPPORTED_MEDIA_TYPE)
_ADDED: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The node's path.", "schema": {"type": "string"}}}}
}


@router.get("/v1/nodes", summary="All nodes", responses=declared(Kind.INVALID_REQUEST))
async def list_nodes(engine: TheEngine, query: Annotated[nodes.ListQuery, Query()]) -> nodes.NodeList:
    explained = engine.explain() if query.explain else NOTHING
    return nodes.NodeList(
        nodes=[nodes.node(view, explained.get(view.plan.node.address)) for view in engine.nodes()],
        problems=[nodes.source_problem(problem) for problem in engine.problems()],
        foreign=[
            nodes.ForeignNode(address=address, keyspace=keyspace)
            for address, keyspace in sorted(engine.foreign().items())
        ],
        excluded=engine.excluded(),
    )


@router.get(
    "/v1/nodes/{address}",
    summary="One node",
    responses=declared(Kind.UNKNOWN_NODE, Kind.INVALID_REQUEST),
)
async def get_node(engine: TheEngine, address: _Address) -> nodes.Node:
    view = engine.node(address)
    return nodes.node(view, engine.explain([address])[address])


@router.post(
    "/v1/nodes",
    summary="Add a node by hand",
    status_code=201,
    dependencies=[JsonBody],
    responses=_ADDED | declared(Kind.NODE_EXISTS, Kind.INVALID_REQUEST, Kind.UNAVAILABLE, *_BODY),
)
async def add_node(engine: TheEngine, wanted: nodes.NodeToAdd, response: Response) -> nodes.Node:
    view = await engine.add(
        wanted.address,
        status_address=wanted.status_address,
        weight=wanted.weight,
        labels=wanted.labels,
    )
    response.headers["Location"] = f"/v1/nodes/{quote(wanted.address, safe='')}"
    return nodes.node(view)


@router.delete(
    "/v1/nodes/{address}",
    summary="Drain a node and then forget it",
    status_code=202,
    responses=declared(
        Kind.UNKNOWN_NODE, Kind.NEEDS_MODULE, Kind.INVALID_REQUEST, Kind.UNAVAILABLE, Kind.FOREIGN_ORIGIN
    ),
)
async def remove_node(
    engine: TheEngine, address: _Address, query: Annotated[nodes.RemoveQuery, Query()]
) -> nodes.Node:
    return nodes.node(await engine.remove(address, force=query.force))


@router.patch(
    "/v1/nodes/{address}",
    summary="Change a node's capacity or labels",
    dependencies=[JsonBody],
    responses=declared(Kind.UNKNOWN_NODE, Kind.INVALID_REQUEST, Kind.UNAVAILABLE, *_BODY),
)
async def change_node(engine: TheEngine, address: _Address, change: nodes.NodeChange) -> nodes.Node:
    return nodes.node(await engine.amend(address, weight=change.weight, labels=change.labels))


@router.post(
    "/v1/nodes/{address}/drain",
    summary="Keep new sessions off a node, and let its own move to others",
    description="Idempotent. Sessions move where Envoys have Tidevoy's module. A later call with other values"
    " replaces the earlier one.",
    status_code=202,
    dependencies=[JsonBody],
    responses=declared(Kind.UNKNOWN_NODE, Kind.NEEDS_MODULE, Kind.INVALID_REQUEST, Kind.UNAVAILABLE, *_BODY),
)
async def drain_node(
    engine: TheEngine, address: _Address, wanted: nodes.DrainRequest | None = None
) -> nodes.Node:
    wanted = wanted or nodes.DrainRequest()
    view = await engine.drain(
        address, deadline_seconds=wanted.deadline_seconds, on_deadline=OnDeadline(wanted.on_deadline)
    )
    return nodes.node(view)


@router.post(
    "/v1/nodes/{address}/undrain",
    summary="Take a drain back",
    description="Idempotent.",
    status_code=202,
    responses=declared(Kind.UNKNOWN_NODE, Kind.INVALID_REQUEST, Kind.UNAVAILABLE, Kind.FOREIGN_ORIGIN),
)
async def undrain_node(engine: TheEngine, address: _Address) -> nodes.Node:
    return nodes.node(await engine.undrain(address))
