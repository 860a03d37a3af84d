"""Parses the live configuration that a control plane publishes to Tidevoy's module, as the module does."""

from __future__ import annotations

import json
from typing import Any

from envoy.config.core.v3 import extension_pb2

_JSON_PREFIX = b'{"version"'  # The packed message ends with a JSON text that starts like this.


def parse_live_config(resource: bytes) -> dict[str, Any]:
    """Return the values in a serialised `TypedExtensionConfig`: timeouts, and the list `nodes`."""
    packed: bytes = extension_pb2.TypedExtensionConfig.FromString(resource).typed_config.value
    published: dict[str, Any] = json.loads(packed[packed.index(_JSON_PREFIX) :])["published"]
    return published
