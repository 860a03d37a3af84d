"""How a command fails: with one line on standard error and an exit code."""

from __future__ import annotations

DONE, FAILED, USAGE = 0, 1, 2


class Failure(Exception):
    """A command cannot do what it was asked; the message says what, where and the remedy."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        self.code = code
        super().__init__(message)
