"""Runs the program `tidevoy-replay` in the foreground."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from cli.errors import CliError
from controlplane.verification.replay_program import find_replay_program


def run_replay_program(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the program to its end; return its exit code and its standard output.

    Its standard error is ours, so it has said why if the code is not 0. Raises CliError if it cannot run.
    """
    program = find_replay_program()
    try:
        process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise CliError(f"{program} cannot be run: {error.strerror}") from None
    with process:
        output = _wait_for_output(process)
    code = process.returncode
    return (code if code >= 0 else 128 - code), output


def _wait_for_output(process: subprocess.Popen[str]) -> str:
    """Return what the program printed. Ctrl-C goes to the program too, which then ends by itself."""
    while True:
        try:
            return process.communicate()[0]
        except KeyboardInterrupt:
            continue
