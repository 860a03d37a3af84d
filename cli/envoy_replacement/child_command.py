"""A command that starts or stops an Envoy: one that returns (`systemctl start …`), or the Envoy itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cli.errors import CliError, UsageError

_TAIL_LINES = 5  # last lines of the output that an error message quotes
_TERMINATE_GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL


def split_command(option: str, text: str) -> tuple[str, ...]:
    """Split a command line into arguments, without a shell. Raises UsageError if that is impossible."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a command: {error}") from None
    if text and not arguments:
        raise UsageError(f"{option} names no command")
    return arguments


class ChildCommand:
    """A running command in its own session: Ctrl-C and the end of the terminal do not reach it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Start the command. Raises CliError if it cannot be run."""
        self.command_line = shlex.join(arguments)
        with tempfile.NamedTemporaryFile("wb", prefix="tidevoy-replace-", suffix=".log", delete=False) as log:
            self.log_path = Path(log.name)
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                self.log_path.unlink()
                raise CliError(f"`{self.command_line}` cannot be run: {error.strerror}") from None

    def exit_failure(self) -> CliError | None:
        """Return the error if the command failed; None if it runs or has returned 0."""
        code = self._process.poll()
        if not code:
            return None
        outcome = f"returned {code}" if code > 0 else f"was killed by signal {-code}"
        return CliError(f"`{self.command_line}` {outcome}{self._output_tail()}")

    @property
    def is_running(self) -> bool:
        """Whether the command still runs; then it may be the Envoy itself."""
        return self._process.poll() is None

    def terminate(self) -> None:
        """Stop the command and its process group: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.is_running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERMINATE_GRACE_SECONDS)

    def detach(self) -> str:
        """Stop managing the command. Returns where its output goes, as a clause; empty if it has returned."""
        if self.is_running:
            # Without a return code, Popen would warn that the process was not waited for.
            self._process.returncode = 0
            return f"; its output is in {self.log_path}"
        self.log_path.unlink(missing_ok=True)
        return ""

    def _output_tail(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return f": {' | '.join(lines[-_TAIL_LINES:])}" if lines else ""

    def wait(self, seconds: float) -> None:
        """Wait until the command returns; stop it after `seconds`. Raises CliError if it did not return 0."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.terminate()
            self.log_path.unlink(missing_ok=True)
            raise CliError(f"`{self.command_line}` did not return within {seconds:g} s") from None
        failure = self.exit_failure()
        self.log_path.unlink(missing_ok=True)
        if failure is not None:
            raise failure


def run_command(arguments: Sequence[str], seconds: float) -> None:
    """Run a command and wait until it returns. Raises CliError if it fails or takes longer than `seconds`."""
    ChildCommand(arguments).wait(seconds)
