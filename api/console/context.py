"""What the console's routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from api.console.console import Console
from api.schemas import nodes


async def _console(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


TheConsole = Annotated[Console, Depends(_console)]
TheAddress = Annotated[nodes.Address, Path(alias="address")]
