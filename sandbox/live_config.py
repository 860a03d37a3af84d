"""What a control plane tells Tidevoy's module while its Envoy runs, read as the module reads it."""

from __future__ import annotations

import json
from typing import Any

from envoy.config.core.v3 import extension_pb2

_START = b'{"version"'  # of the JSON text, which is the last of what the configuration holds


def read(resource: bytes) -> dict[str, Any]:
    """What is published in a serialised `TypedExtensionConfig`: limits, and `nodes` in a list."""
    packed: bytes = extension_pb2.TypedExtensionConfig.FromString(resource).typed_config.value
    published: dict[str, Any] = json.loads(packed[packed.index(_START) :])["published"]
    return published
