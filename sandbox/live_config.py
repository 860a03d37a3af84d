"""The live configuration that a control plane publishes to Tidevoy's module, read as the module reads it."""

from __future__ import annotations

import json
from typing import Any

from envoy.config.core.v3 import extension_pb2

_JSON_PREFIX = b'{"version"'  # of the JSON text, which ends the packed message


def read(resource: bytes) -> dict[str, Any]:
    """The published values in a serialised `TypedExtensionConfig`: limits, and the list `nodes`."""
    packed: bytes = extension_pb2.TypedExtensionConfig.FromString(resource).typed_config.value
    published: dict[str, Any] = json.loads(packed[packed.index(_JSON_PREFIX) :])["published"]
    return published
