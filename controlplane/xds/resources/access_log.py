"""Build the access log of sessions: Envoy writes one line of JSON when a session ends. No I/O.

Unknown values are `null`, for example the node if a session never reached a node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envoy.config.accesslog.v3 import accesslog_pb2
from envoy.extensions.access_loggers.file.v3 import file_pb2

from controlplane.xds.protobuf_encoding import pack

# envoyproxy/envoy docs/root/configuration/observability/access_log/usage.rst; numbers stay numbers in JSON.
_FIELDS = {
    "start_time": "%START_TIME%",
    "duration_ms": "%DURATION%",
    "connection_id": "%CONNECTION_ID%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
    "response_flags": "%RESPONSE_FLAGS%",
    "first_node": "%UPSTREAM_HOST%",
}
_BYTE_FIELDS = {"bytes_from_client": "%BYTES_RECEIVED%", "bytes_to_client": "%BYTES_SENT%"}
# Tidevoy's module reports on which node a session ended and how often it migrated. It also counts the bytes,
# since tcp_proxy does not get most of them (docs/internals/decisions/0005-direct-forwarding.md).
_MODULE_FIELDS = ("node", "moves", *_BYTE_FIELDS)


def build_access_log(path: Path, module_namespace: str = "") -> Any:
    """Build the `envoy.config.accesslog.v3.AccessLog` for tcp_proxy.

    `module_namespace` names the dynamic metadata that the module writes; it is empty without the module.
    """
    extra_fields = (
        {key: f"%DYNAMIC_METADATA({module_namespace}:{key})%" for key in _MODULE_FIELDS}
        if module_namespace
        else _BYTE_FIELDS
    )
    log = file_pb2.FileAccessLog(path=str(path))
    log.log_format.json_format.update(_FIELDS | extra_fields)
    return accesslog_pb2.AccessLog(name="envoy.access_loggers.file", typed_config=pack(log))
