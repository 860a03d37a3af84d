"""Fixtures of more than one of the tests here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.peers import GREETING, listening, packet, sends


@pytest.fixture
async def node() -> AsyncIterator[str]:
    """The address of something that greets as TiDB does."""
    async with listening(sends(packet(GREETING))) as peer:
        yield peer.endpoint
