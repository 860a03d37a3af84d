"""FastAPI dependencies of the console's routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from api.console.console import ConsoleState
from api.schemas import nodes


async def _get_console(request: Request) -> ConsoleState:
    console: ConsoleState = request.app.state.console
    return console


ConsoleDep = Annotated[ConsoleState, Depends(_get_console)]
NodeAddressPath = Annotated[nodes.Address, Path(alias="address")]
