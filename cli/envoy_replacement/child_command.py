"""A command that starts or ends an Envoy: one that returns (`systemctl start …`), or the Envoy itself."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cli.errors import EXIT_USAGE, CliError

_TAIL_LINES = 5  # lines of its output that are told
_TERMINATE_GRACE_SECONDS = 10.0  # seconds that it has to end


def split_command(option: str, text: str) -> tuple[str, ...]:
    """A command line as its words; no shell is between. Failure (usage)."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise CliError(f"{option} {text!r} is no command: {error}", EXIT_USAGE) from None
    if text and not arguments:
        raise CliError(f"{option} names no command", EXIT_USAGE)
    return arguments


class ChildCommand:
    """A running command, in a session of its own: neither Ctrl-C nor the end of the terminal reaches it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Failure when it cannot be run."""
        self.command_line = shlex.join(arguments)
        with tempfile.NamedTemporaryFile("wb", prefix="tidevoy-recycle-", suffix=".log", delete=False) as log:
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
        """Why it came to nothing; None: it runs, or has returned 0."""
        code = self._process.poll()
        if not code:
            return None
        how = f"returned {code}" if code > 0 else f"was ended by signal {-code}"
        return CliError(f"`{self.command_line}` {how}{self._output_tail()}")

    @property
    def is_running(self) -> bool:
        """Whether it has not returned yet: then it may be the Envoy itself."""
        return self._process.poll() is None

    def terminate(self) -> None:
        """End it, and what it has started in its session."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_TERMINATE_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def detach(self) -> Path | None:
        """Leave it alone. Where its output goes on; None: it has returned, and its output is deleted."""
        if self.is_running:
            # Nobody waits for it any more, which is no mistake of ours.
            self._process.returncode = 0
            return self.log_path
        self.log_path.unlink(missing_ok=True)
        return None

    def _output_tail(self) -> str:
        lines = [line for line in self.log_path.read_text(errors="replace").splitlines() if line.strip()]
        return f": {' | '.join(lines[-_TAIL_LINES:])}" if lines else ""

    def wait(self, seconds: float) -> None:
        """Returns when it has returned 0. Failure, also when it takes longer; then it is ended."""
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
    """Run a command that returns. Failure."""
    ChildCommand(arguments).wait(seconds)
