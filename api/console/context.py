"""What the console's routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from api import schemas
from api.console.console import Console


async def _console(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


TheConsole = Annotated[Console, Depends(_console)]
TheAddress = Annotated[schemas.Address, Path(alias="address")]
