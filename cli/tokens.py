"""Token commands: token create."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.errors import UsageError
from cli.options import AsJson
from cli.output import print_note, print_result, show_json

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _token_group() -> None:
    """API tokens that authenticate callers to the control plane."""


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Name of the caller, as audit events show it.")],
    role: Annotated[
        Literal["viewer", "operator"], typer.Option(help="viewer: may read. operator: may also change.")
    ],
    file: Annotated[
        Path | None,
        typer.Option(help="Write the token to this new file, readable only by you; default: print it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a random token. It is shown only once: the configuration holds only its SHA-256."""
    from pydantic import ValidationError

    from api.auth.credentials import new_token, sha256
    from controlplane.config.api import ApiTokenSettings

    token = new_token()
    result = {"name": name, "role": role, "sha256": sha256(token.encode())}
    try:
        ApiTokenSettings.model_validate(result)
    except ValidationError as error:
        problem = error.errors()[0]["ctx"]["error"]
        raise UsageError(f"{name!r}: {problem}") from None
    if file is not None:
        _write_token_file(file, token)
    if as_json:
        show_json(result if file is not None else {**result, "token": token})
        return
    line = f"- {{name: {name!r}, role: {role}, sha256: {result['sha256']}}}"
    print_result(f"# For the configuration of the control plane:\napi:\n  tokens:\n  {line}")
    if file is not None:
        print_note(f"the token is in {file}; use it with TIDEVOY_TOKEN_FILE={file} tidevoy nodes")
    else:
        print_result(f"# The token; it is not shown again:\n{token}")


def _write_token_file(file: Path, token: str) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{file} already exists; name a new file") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{token}\n")
