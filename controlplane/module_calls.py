"""Reads the calls of Tidevoy's module to gRPC services on the xDS port.

Each message names the Envoy process that sends it. The metrics of this process tell which Envoy it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from controlplane.errors import TidevoyError
from controlplane.grpc_auth import AuthorizeEnvoy

INSTANCE_PATTERN = re.compile(r"[0-9a-f]{16}")
"""The id of an Envoy process."""


class InvalidModuleMessage(TidevoyError):
    """A message that no module of this version sends. It must not be sent again."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the message of the module is invalid: {problem}")


def decode(message_type: Any, data: bytes) -> Any:
    """Return a message with a valid `instance`. Raises InvalidModuleMessage."""
    try:
        message = message_type.FromString(data)
    except DecodeError:
        raise InvalidModuleMessage(f"it is no {message_type.DESCRIPTOR.name}") from None
    if not INSTANCE_PATTERN.fullmatch(message.instance):
        raise InvalidModuleMessage("instance is not 16 hexadecimal digits")
    return message


async def read_call(
    message_type: Any,
    data: bytes,
    context: grpc.aio.ServicerContext,
    authorize: AuthorizeEnvoy,
    envoy_of: Callable[[str], str | None],
) -> tuple[Any, str]:
    """Return the message and the id of its Envoy. Aborts the call if it is invalid or not allowed.

    `envoy_of` returns the id of the Envoy with this process id; None: no Envoy has reported it.
    """
    try:
        message = decode(message_type, data)
    except InvalidModuleMessage as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if (envoy := envoy_of(message.instance)) is None:
        await context.abort(
            grpc.StatusCode.UNAVAILABLE,
            "no metrics of this Envoy have arrived yet, so its id is unknown; call again",
        )
    assert envoy is not None  # `abort` raises
    await authorize(context, envoy)
    return message, envoy
