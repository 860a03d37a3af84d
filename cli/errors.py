"""How a command fails: with one line on standard error and an exit code."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class CliError(Exception):
    """A command cannot do what it was asked; the message says what, where and the remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)
