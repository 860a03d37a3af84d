"""`/v1/nodes`: list, add, change, drain, and remove nodes."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Query, Response

from api.dependencies import EngineDep, RequireJsonBody
from api.problems import BODY_PROBLEMS, WRITE_PROBLEMS, ProblemKind, openapi_responses
from api.schemas import nodes
from api.schemas.common import Address
from api.schemas.nodes import NodeDetails
from controlplane.model.intents import OnDeadline
from controlplane.model.nodes import EMPTY_MAP

router = APIRouter(tags=["nodes"])

_AddressPath = Annotated[Address, Path(description="`host:port`, percent-encoded where needed.")]
_CREATED_RESPONSE: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The node's path.", "schema": {"type": "string"}}}}
}


@router.get("/v1/nodes", summary="List all nodes", responses=openapi_responses(ProblemKind.INVALID_REQUEST))
async def list_nodes(engine: EngineDep, query: Annotated[nodes.ListNodesQuery, Query()]) -> nodes.NodeList:
    explanations = engine.cluster.explain() if query.explain else EMPTY_MAP
    return nodes.NodeList.model_validate(
        {
            "nodes": [
                NodeDetails.read(view, explanations.get(view.plan.node.address))
                for view in engine.cluster.nodes()
            ],
            "problems": engine.cluster.topology_problems(),
            "other_keyspace": [
                {"address": address, "keyspace": keyspace}
                for address, keyspace in sorted(engine.cluster.other_keyspace().items())
            ],
            "excluded": engine.cluster.excluded_addresses(),
        }
    )


@router.get(
    "/v1/nodes/{address}",
    summary="Show one node",
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, ProblemKind.INVALID_REQUEST),
)
async def get_node(engine: EngineDep, address: _AddressPath) -> NodeDetails:
    view = engine.cluster.node(address)
    return NodeDetails.read(view, engine.cluster.explain([address])[address])


@router.post(
    "/v1/nodes",
    summary="Add a node by hand",
    status_code=201,
    dependencies=[RequireJsonBody],
    responses=_CREATED_RESPONSE | openapi_responses(ProblemKind.NODE_EXISTS, *BODY_PROBLEMS),
)
async def add_node(engine: EngineDep, body: nodes.AddNodeRequest, response: Response) -> NodeDetails:
    view = await engine.operations.add(
        body.address,
        status_address=body.status_address,
        weight=body.weight,
        labels=body.labels,
    )
    response.headers["Location"] = f"/v1/nodes/{quote(body.address, safe='')}"
    return NodeDetails.read(view)


@router.delete(
    "/v1/nodes/{address}",
    summary="Drain a node, then remove it",
    status_code=202,
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, ProblemKind.NEEDS_MODULE, *WRITE_PROBLEMS),
)
async def remove_node(
    engine: EngineDep, address: _AddressPath, query: Annotated[nodes.RemoveNodeQuery, Query()]
) -> NodeDetails:
    return NodeDetails.read(await engine.operations.remove(address, force=query.force))


@router.patch(
    "/v1/nodes/{address}",
    summary="Change a node's capacity or labels",
    dependencies=[RequireJsonBody],
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, *BODY_PROBLEMS),
)
async def change_node(engine: EngineDep, address: _AddressPath, body: nodes.UpdateNodeRequest) -> NodeDetails:
    return NodeDetails.read(await engine.operations.update(address, weight=body.weight, labels=body.labels))


@router.post(
    "/v1/nodes/{address}/drain",
    summary="Stop new sessions on a node, and migrate its sessions to other nodes",
    description="Idempotent. Sessions migrate if their Envoys have Tidevoy's module. A later call with other"
    " values replaces the earlier one.",
    status_code=202,
    dependencies=[RequireJsonBody],
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, ProblemKind.NEEDS_MODULE, *BODY_PROBLEMS),
)
async def drain_node(
    engine: EngineDep, address: _AddressPath, body: nodes.DrainRequest | None = None
) -> NodeDetails:
    body = body or nodes.DrainRequest()
    view = await engine.operations.drain(
        address, deadline_seconds=body.deadline_seconds, on_deadline=OnDeadline(body.on_deadline)
    )
    return NodeDetails.read(view)


@router.post(
    "/v1/nodes/{address}/undrain",
    summary="Cancel the drain of a node",
    description="Idempotent.",
    status_code=202,
    responses=openapi_responses(ProblemKind.UNKNOWN_NODE, *WRITE_PROBLEMS),
)
async def undrain_node(engine: EngineDep, address: _AddressPath) -> NodeDetails:
    return NodeDetails.read(await engine.operations.undrain(address))
