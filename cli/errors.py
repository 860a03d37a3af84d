"""The error that ends a command, and the exit codes."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class CliError(Exception):
    """A command failed; the message says what is wrong, where, and what to do."""

    exit_code = EXIT_FAILED


class UsageError(CliError):
    """A command is wrong, or names something that cannot be used."""

    exit_code = EXIT_USAGE
