"""Runs the program `tidevoy-replay` in the foreground."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import typer

from cli.errors import CliError
from controlplane.verification.replay_program import find_replay_program


def run_replay_program(arguments: Sequence[str]) -> str:
    """Run the program to its end and return its standard output; its standard error is ours.

    Raises CliError if it cannot run, and Exit with its exit code if it fails, since it has said why.
    """
    program = find_replay_program()
    try:
        process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise CliError(f"{program} cannot be run: {error.strerror}") from None
    with process:
        output = _wait_for_output(process)
    if process.returncode:
        raise typer.Exit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    return output


def _wait_for_output(process: subprocess.Popen[str]) -> str:
    """Return what the program printed. Ctrl-C goes to the program too, which then ends by itself."""
    while True:
        try:
            return process.communicate()[0]
        except KeyboardInterrupt:
            continue
