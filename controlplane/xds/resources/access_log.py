"""The log of sessions: a line of JSON for each, which Envoy writes when it has ended. Pure.

What Envoy does not know of a session, such as the node of one that never got to any, is `null`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.extensions.access_loggers.file.v3 import file_pb2

from controlplane.xds.any_encoding import pack

# envoyproxy/envoy docs/root/configuration/observability/access_log/usage.rst; what is a number stays one.
_FIELDS = {
    "start_time": "%START_TIME%",
    "duration_ms": "%DURATION%",
    "connection_id": "%CONNECTION_ID%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "response_flags": "%RESPONSE_FLAGS%",
    "first_node": "%UPSTREAM_HOST%",
}
_BYTE_FIELDS = {"bytes_from_client": "%BYTES_RECEIVED%", "bytes_to_client": "%BYTES_SENT%"}
# Tidevoy's module says where a session has ended, after how many moves. It knows the bytes, too: most of them
# never come to tcp_proxy (docs/internals/decisions/0005-direct-forwarding.md).
_MODULE_FIELDS = ("node", "moves", *_BYTE_FIELDS)


def build_access_log(path: Path, module_namespace: str = "") -> Any:
    """`envoy.config.accesslog.v3.AccessLog` for tcp_proxy.

    `told`: namespace of the connection's metadata in which the module tells of its session; empty: no module.
    """
    own = (
        {key: f"%DYNAMIC_METADATA({module_namespace}:{key})%" for key in _MODULE_FIELDS}
        if module_namespace
        else _BYTE_FIELDS
    )
    log = file_pb2.FileAccessLog(path=str(path))
    log.log_format.json_format.update(_FIELDS | own)
    return accesslog_pb2.AccessLog(name="envoy.access_loggers.file", typed_config=pack(log))
