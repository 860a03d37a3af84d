"""`/v1/nodes`: list, add, change, drain, and remove nodes."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Response

from api.dependencies import EngineDep, RequireJsonBody
from api.problems import ProblemKind, openapi_responses
from api.schemas import nodes
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import EMPTY_MAP

router = APIRouter(tags=["nodes"])

_AddressPath = Annotated[nodes.Address, Path(description="`host:port`, percent-encoded where needed.")]
_BODY_PROBLEMS = (ProblemKind.FOREIGN_ORIGIN, ProblemKind.TOO_LARGE, ProblemKind.UNSUPPORTED_MEDIA_TYPE)
_CREATED_RESPONSE: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The node's path.", "schema": {"type": "string"}}}}
}


@router.get("/v1/nodes", summary="List all nodes", responses=openapi_responses(ProblemKind.INVALID_REQUEST))
async def list_nodes(engine: EngineDep, query: Annotated[nodes.ListNodesQuery, Query()]) -> nodes.NodeList:
    explanations = engine.explain() if query.explain else EMPTY_MAP
    return nodes.NodeList(
        nodes=[
            nodes.to_node_schema(view, explanations.get(view.plan.node.address)) for view in engine.nodes()
        ],
        problems=[nodes.to_source_problem_schema(problem) for problem in engine.topology_problems()],
        foreign=[
            nodes.OtherKeyspaceNode(address=address, keyspace=keyspace)
            for address, keyspace in sorted(engine.other_keyspace().items())
        ],
        excluded=engine.excluded_addresses(),
    )


@router.get(
    "/v1/nodes/{address}",
    summary="Show one node",
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, ProblemKind.INVALID_REQUEST),
)
async def get_node(engine: EngineDep, address: _AddressPath) -> nodes.NodeSchema:
    view = engine.node(address)
    return nodes.to_node_schema(view, engine.explain([address])[address])


@router.post(
    "/v1/nodes",
    summary="Add a node by hand",
    status_code=201,
    dependencies=[RequireJsonBody],
    responses=_CREATED_RESPONSE
    | openapi_responses(
        ProblemKind.NODE_EXISTS, ProblemKind.INVALID_REQUEST, ProblemKind.UNAVAILABLE, *_BODY_PROBLEMS
    ),
)
async def add_node(engine: EngineDep, body: nodes.AddNodeRequest, response: Response) -> nodes.NodeSchema:
    view = await engine.add(
        body.address,
        status_address=body.status_address,
        weight=body.weight,
        labels=body.labels,
    )
    response.headers["Location"] = f"/v1/nodes/{quote(body.address, safe='')}"
    return nodes.to_node_schema(view)


@router.delete(
    "/v1/nodes/{address}",
    summary="Drain a node, then remove it",
    status_code=202,
    responses=openapi_responses(
        ProblemKind.UNKNOWN_NODE,
        ProblemKind.NEEDS_MODULE,
        ProblemKind.INVALID_REQUEST,
        ProblemKind.UNAVAILABLE,
        ProblemKind.FOREIGN_ORIGIN,
    ),
)
async def remove_node(
    engine: EngineDep, address: _AddressPath, query: Annotated[nodes.RemoveNodeQuery, Query()]
) -> nodes.NodeSchema:
    return nodes.to_node_schema(await engine.remove(address, force=query.force))


@router.patch(
    "/v1/nodes/{address}",
    summary="Change a node's capacity or labels",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(
        ProblemKind.UNKNOWN_NODE, ProblemKind.INVALID_REQUEST, ProblemKind.UNAVAILABLE, *_BODY_PROBLEMS
    ),
)
async def change_node(
    engine: EngineDep, address: _AddressPath, body: nodes.UpdateNodeRequest
) -> nodes.NodeSchema:
    return nodes.to_node_schema(await engine.update(address, weight=body.weight, labels=body.labels))


@router.post(
    "/v1/nodes/{address}/drain",
    summary="Stop new sessions on a node, and migrate its sessions to other nodes",
    description="Idempotent. Sessions migrate if their Envoys have Tidevoy's module. A later call with other"
    " values replaces the earlier one.",
    status_code=202,
    dependencies=[RequireJsonBody],
    responses=openapi_responses(
        ProblemKind.UNKNOWN_NODE,
        ProblemKind.NEEDS_MODULE,
        ProblemKind.INVALID_REQUEST,
        ProblemKind.UNAVAILABLE,
        *_BODY_PROBLEMS,
    ),
)
async def drain_node(
    engine: EngineDep, address: _AddressPath, body: nodes.DrainRequest | None = None
) -> nodes.NodeSchema:
    body = body or nodes.DrainRequest()
    view = await engine.drain(
        address, deadline_seconds=body.deadline_seconds, on_deadline=OnDeadline(body.on_deadline)
    )
    return nodes.to_node_schema(view)


@router.post(
    "/v1/nodes/{address}/undrain",
    summary="Cancel the drain of a node",
    description="Idempotent.",
    status_code=202,
    responses=openapi_responses(
        ProblemKind.UNKNOWN_NODE,
        ProblemKind.INVALID_REQUEST,
        ProblemKind.UNAVAILABLE,
        ProblemKind.FOREIGN_ORIGIN,
    ),
)
async def undrain_node(engine: EngineDep, address: _AddressPath) -> nodes.NodeSchema:
    return nodes.to_node_schema(await engine.undrain(address))
