"""The gRPC service to which Tidevoy's module in an Envoy reports statistics of statements.

It runs on the xDS port, with the authorization and the message limit of that port (4 MiB). A message has
the id of the Envoy process. The Envoy's id comes from the metrics with the same process id.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import grpc

from controlplane.clock import Clock
from controlplane.grpc_auth import AuthorizeEnvoy
from controlplane.model.statements import (
    COLUMNS,
    LATENCY_COLUMNS,
    StatementCounts,
    StatementKey,
    StatementReport,
    add_to,
)
from controlplane.module_calls import InvalidModuleMessage, read_call
from controlplane.observe.envoy_reports.metrics_service import ReportForwarder
from controlplane.observe.envoy_reports.statements_pb2 import ReportRequest, ReportResponse

_SERVICE, _METHOD = "tidevoy.statements.v1.StatementReports", "Report"
_DIGEST_BYTES = 32
_MAX_STATEMENTS, _MAX_ROWS = 5_000, 20_000
_MAX_TEXT_BYTES, _MAX_NAME_BYTES = 2_048, 512
_VALUE_LIMIT = 1 << 53  # larger numbers are not exact as doubles
_LATENCY_BUCKETS = LATENCY_COLUMNS.stop - LATENCY_COLUMNS.start


class StatementReportService:
    """Receives reports and calls `publish` with each of them."""

    def __init__(
        self,
        publish: Callable[[StatementReport], None],
        clock: Clock,
        *,
        envoy_of: Callable[[str], str | None],
        forwarder: ReportForwarder | None = None,
    ) -> None:
        """`envoy_of`: see `read_call`; `forwarder` passes reports on to other replicas."""
        self._publish = publish
        self._clock = clock
        self._envoy_of = envoy_of
        self._forwarder = forwarder

    def register(self, server: grpc.aio.Server, authorize: AuthorizeEnvoy) -> None:
        """Add the service to a server that has not started; `authorize` decides which Envoys may report."""
        handler = grpc.unary_unary_rpc_method_handler(partial(self._serve, authorize))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))

    async def _serve(
        self, authorize: AuthorizeEnvoy, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        message, envoy = await read_call(ReportRequest, data, context, authorize, self._envoy_of)
        try:
            report = parse_report(message, envoy)
        except InvalidModuleMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._publish(report)
        if self._forwarder is not None:
            self._forwarder.forward_statements(envoy, self._clock(), data)
        response: bytes = ReportResponse(sequence=report.sequence).SerializeToString()
        return response


def parse_report(message: Any, envoy: str) -> StatementReport:
    """Check a message of this Envoy and convert it. Raises InvalidModuleMessage."""
    if not message.sequence:
        raise InvalidModuleMessage("sequence is 0")
    if len(message.statements) > _MAX_STATEMENTS or len(message.rows) > _MAX_ROWS:
        raise InvalidModuleMessage(f"it has more than {_MAX_STATEMENTS} statements or {_MAX_ROWS} rows")
    digests, texts = [""], {}
    for statement in message.statements:
        if len(statement.digest) != _DIGEST_BYTES:
            raise InvalidModuleMessage(f"a digest does not have {_DIGEST_BYTES} bytes")
        if len(statement.text.encode()) > _MAX_TEXT_BYTES:
            raise InvalidModuleMessage(f"a text has more than {_MAX_TEXT_BYTES} bytes")
        digests.append(statement.digest.hex())
        texts[digests[-1]] = statement.text
    rows: dict[StatementKey, StatementCounts] = {}
    for row in message.rows:
        if row.statement >= len(digests):
            raise InvalidModuleMessage("a row names a statement that the report does not have")
        key = StatementKey(digests[row.statement], row.user, row.node, envoy)
        add_to(rows, key, _parse_counts(row))
    return StatementReport(message.instance, message.sequence, texts, rows)


def _parse_counts(row: Any) -> StatementCounts:
    if len(row.user.encode()) > _MAX_NAME_BYTES or len(row.node.encode()) > _MAX_NAME_BYTES:
        raise InvalidModuleMessage(f"a user or a node has more than {_MAX_NAME_BYTES} bytes")
    if len(row.latency) != _LATENCY_BUCKETS:
        raise InvalidModuleMessage(f"a row does not have {_LATENCY_BUCKETS} latency buckets")
    values = (
        *(row.count, row.errors, row.rows, row.request_bytes, row.response_bytes),
        *(row.microseconds, row.max_microseconds),
    )
    if max(chain(values, row.latency)) >= _VALUE_LIMIT:
        raise InvalidModuleMessage(f"a number is {_VALUE_LIMIT} or more")
    counts = array("d", (*values, *row.latency))
    assert len(counts) == COLUMNS
    return counts
