"""Reports of statements, as messages and as the control plane stores them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from controlplane.model.statements import COUNT, StatementReport, StatementWindow
from controlplane.observe.envoy_reports.statement_reports import parse_report
from controlplane.observe.envoy_reports.statements_pb2 import ReportRequest, ReportResponse
from tests.support.controlplane.telemetry_messages import module_info_family, open_metrics_stream
from tests.support.waiting import wait_until

INSTANCE, OTHER_INSTANCE = "0123456789abcdef", "f" * 16
LATENCY_BUCKETS = 14
METHOD = "/tidevoy.statements.v1.StatementReports/Report"


def digest_of(number: int) -> str:
    """Return a digest for tests, 64 hexadecimal digits."""
    return f"{number:02x}" * 32


def text_of(number: int) -> str:
    return f"select `c{number}` from `t` where `id` = ?"


def row(
    statement: int = 1,
    user: str = "app",
    node: str = "10.0.0.1:4000",
    *,
    milliseconds: int = 2,
    bucket: int = 2,
    **values: Any,
) -> dict[str, Any]:
    """Return the fields of a row with one execution. `statement` 0: no digest."""
    latency = [0] * LATENCY_BUCKETS
    latency[bucket] = 1
    fields = {
        "statement": statement,
        "user": user,
        "node": node,
        "count": 1,
        "rows": 3,
        "request_bytes": 40,
        "response_bytes": 400,
        "microseconds": milliseconds * 1000,
        "max_microseconds": milliseconds * 1000,
        "latency": latency,
    }
    return fields | values


def report_message(*rows: dict[str, Any], sequence: int = 1, **values: Any) -> Any:
    """Return a `ReportRequest`; a row's `statement` is the number for `digest_of`."""
    numbers = sorted({item["statement"] for item in rows} - {0})
    positions = {0: 0} | {number: position for position, number in enumerate(numbers, start=1)}
    message = {
        "instance": INSTANCE,
        "sequence": sequence,
        "milliseconds": 5000,
        "statements": [{"digest": bytes.fromhex(digest_of(n)), "text": text_of(n)} for n in numbers],
        "rows": [item | {"statement": positions[item["statement"]]} for item in rows],
    }
    return ReportRequest(**(message | values))


def report(
    *rows: dict[str, Any], sequence: int = 1, envoy: str = "envoy-1", **values: Any
) -> StatementReport:
    """Return a report as the control plane stores it."""
    return parse_report(report_message(*rows, sequence=sequence, **values), envoy)


def executions(window: StatementWindow) -> dict[str, float]:
    """Return the executions by digest."""
    sums: dict[str, float] = {}
    for rows in window.slots:
        for key, counts in rows.items():
            sums[key.digest] = sums.get(key.digest, 0) + counts[COUNT]
    return sums


async def call_module(
    port: int, method: str, request: Any, response_type: Any, *, seconds: float = 10.0
) -> Any:
    """Make one call of a module to the xDS port on this machine. Raises AioRpcError if it is rejected."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(method, response_deserializer=response_type.FromString)
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return await call(data, timeout=seconds)


async def send_report(port: int, message: Any) -> int:
    """Send a report as a module does; return the acknowledged number. Raises AioRpcError."""
    response = await call_module(port, METHOD, message, ReportResponse)
    return int(response.sequence)


async def deliver_report(port: int, message: Any) -> int:
    """Send a report like `send_report`, again and again until the control plane knows the process."""
    sequence = 0

    async def is_accepted() -> bool:
        nonlocal sequence
        try:
            sequence = await send_report(port, message)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    await wait_until(is_accepted)
    return sequence


@asynccontextmanager
async def announced_process(
    port: int, *, envoy: str = "envoy-1", instance: str = INSTANCE
) -> AsyncIterator[None]:
    """Open a metrics stream, from which the control plane learns the Envoy of a process."""
    async with open_metrics_stream(port) as stream:
        await stream.send(module_info_family(instance), envoy=envoy)
        yield
