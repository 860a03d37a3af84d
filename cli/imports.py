"""Import commands: import-tiproxy, import-haproxy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.errors import EXIT_FAILED, UsageError
from cli.options import AsJson
from cli.output import print_note, print_result, show_json, show_table

if TYPE_CHECKING:
    from cli.importers.report import ImportResult

app = typer.Typer()

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the YAML to this new file; default: print it."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]


@app.command("import-tiproxy")
def import_tiproxy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="TiProxy's configuration (TOML).", show_default=False)
    ],
    output: Output = None,
    force: Force = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The cluster of backend-clusters to import; default: the first."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration of TiProxy into tidevoy.yaml, and list how each key was converted.

    The list is written to standard error. The exit code is 1 if a key is unknown.
    """
    from cli.importers.tiproxy import conversion
    from controlplane.config.text_file import read_text

    _check_output(output, force=force)
    _show(
        conversion.import_tiproxy(read_text(file, "configuration file"), str(file), cluster),
        output,
        force=force,
        as_json=as_json,
    )


@app.command("import-haproxy")
def import_haproxy(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="HAProxy's configuration.", show_default=False)
    ],
    output: Output = None,
    force: Force = False,
    proxy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The `listen` or `frontend` that carries MySQL, if there are several."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a TCP proxy of HAProxy into tidevoy.yaml, and list how each keyword was converted.

    Variables in the file are read from the environment. The list is written to standard error. The exit code
    is 1 if a keyword is unknown.
    """
    from cli.importers.haproxy import conversion
    from controlplane.config.text_file import read_text

    _check_output(output, force=force)
    result = conversion.import_haproxy(read_text(file, "configuration file"), str(file), os.environ, proxy)
    _show(result, output, force=force, as_json=as_json)


def _check_output(output: Path | None, *, force: bool) -> None:
    if output is not None and output.exists() and not force:
        raise UsageError(f"{output} already exists; name a new file, or overwrite it with --force")


def _show(result: ImportResult, output: Path | None, *, force: bool, as_json: bool) -> None:
    from cli.importers.report import DIFFERENCE_HEADERS, TABLE_HEADERS, difference_rows, table_rows

    if output is not None:
        _write(output, result.yaml, force=force)
    if as_json:
        show_json(result.as_json())
    else:
        if output is None:
            print_result(result.yaml.rstrip())
        show_table(TABLE_HEADERS, table_rows(result.rows), to_stderr=True, wraps_all=True)
        if result.differences:
            print_note("defaults that differ:")
            rows = difference_rows(result.differences)
            show_table(DIFFERENCE_HEADERS, rows, to_stderr=True, wraps_all=True)
        print_note(result.summary())
        if output is not None:
            print_note(f"wrote {output}; check it with `tidevoy config check {output}`")
    if result.unknown_keys:
        raise typer.Exit(EXIT_FAILED)


def _write(file: Path, text: str, *, force: bool) -> None:
    """Write a file that only its owner can write; without `force`, only if it does not exist."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(file, flags, 0o644)
    except FileExistsError:
        raise UsageError(f"{file} already exists; name a new file, or overwrite it with --force") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
