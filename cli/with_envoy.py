"""`tidevoy serve --with-envoy`: a control plane and an Envoy as one service.

This process only starts the two and restarts the one that ends. So a control plane that crashes does not
take the Envoy with it, and the other way round. When the service is stopped, the Envoy drains first, with the
control plane still there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.errors import CliError
from cli.output import print_note
from controlplane import address as addresses
from controlplane.programs import find_program
from controlplane.rollouts.actions.guarded_process import GuardedProcess, describe_exit

SUPERVISOR = "tidevoy-envoy"

_POLL_SECONDS = 0.1
_MAX_RESTART_DELAY_SECONDS = 30.0
_STABLE_SECONDS = 60.0  # a process that fails after more than this time is restarted without delay
_START_TIMEOUT_SECONDS = 60.0  # for the control plane to open its xDS port
_STOP_TIMEOUT_SECONDS = 20.0  # for the control plane to stop


@dataclass(frozen=True, slots=True)
class EnvoyFiles:
    """The programs and the file that an Envoy is started with."""

    supervisor: Path
    envoy: Path
    bootstrap: Path

    @property
    def command(self) -> list[str]:
        """The command that runs the Envoy. Hot restart is off, since the service runs only one Envoy."""
        options = ("--config-path", str(self.bootstrap), "--disable-hot-restart")
        return [str(self.supervisor), str(self.envoy), *options]


def find_programs(envoy: str) -> tuple[Path, Path]:
    """Return the supervisor and the Envoy. Raises CliError if one is not installed."""
    supervisor = find_program(SUPERVISOR)
    if supervisor is None:
        raise CliError(
            f"{SUPERVISOR} is not installed: install Tidevoy's wheel for Linux, or build it with `cargo build"
            " --release` in filters/"
        )
    if (program := shutil.which(envoy)) is None:
        raise CliError(f"there is no program {envoy}: install Envoy, or name it with --envoy")
    return supervisor, Path(program)


def restart_delay(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row: 0, 1, 2, 4 ... 30."""
    return min(2.0 ** (failures - 2), _MAX_RESTART_DELAY_SECONDS) if failures > 1 else 0.0


async def run_with_envoy(
    control_plane: Sequence[str],
    xds_address: str,
    files: EnvoyFiles,
    write_bootstrap: Callable[[], None],
) -> int:
    """Run both until SIGTERM or SIGINT. Return the exit code of the service.

    `control_plane` is its command. `write_bootstrap` is called before each start of the Envoy; it may raise
    CliError only the first time. Raises CliError if the control plane does not start.
    """
    if await _accepts(xds_address):
        raise CliError(
            f"another process listens at {xds_address} (xds.listen); stop it if it is a control plane with a"
            " service of its own"
        )
    write_bootstrap()
    service = _Service(list(control_plane), xds_address, files, write_bootstrap)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.on_stop_signal)
    loop.add_signal_handler(signal.SIGHUP, service.on_reload_signal)
    return await service.run()


async def _accepts(address: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*addresses.split(address))
    except OSError:
        return False
    writer.close()
    return True


def _report_restart(problem: str, failures: int) -> float:
    """Report that a part is restarted, and return in how many seconds."""
    delay = restart_delay(failures)
    print_note(f"{problem}; it is restarted {f'in {delay:g} s' if delay else 'now'}")
    return delay


def _exit_code(code: int) -> int:
    """Return the exit code as a shell reports it, for the code of a child: -N if signal N has ended it."""
    return code if code >= 0 else 128 - code


class _ServiceProcess:
    """One of the two processes, while it runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self._started_at = time.monotonic()
        self.handles_reload = False
        # Both write to standard error, as without this process.
        self.process = GuardedProcess(command, "process", output=sys.stderr.fileno(), env=os.environ)

    @property
    def is_stable(self) -> bool:
        return time.monotonic() - self._started_at > _STABLE_SECONDS

    async def wait(self) -> int:
        await self.process.wait_ended()
        return self.process.reap()


class _Service:
    def __init__(
        self,
        control_plane: list[str],
        xds_address: str,
        files: EnvoyFiles,
        write_bootstrap: Callable[[], None],
    ) -> None:
        self._control_plane_command = control_plane
        self._xds_address, self._files, self._write_bootstrap = xds_address, files, write_bootstrap
        self._stopping = asyncio.Event()
        self._envoy: _ServiceProcess | None = None
        self._control_plane: _ServiceProcess | None = None

    def on_stop_signal(self) -> None:
        """Begin to stop. A second signal stops the Envoy at once."""
        if self._stopping.is_set() and self._envoy is not None:
            self._envoy.process.signal_group(signal.SIGTERM)
        self._stopping.set()

    def on_reload_signal(self) -> None:
        """Let the control plane reload its configuration. While it starts, it reads the file anyway."""
        if self._control_plane is not None and self._control_plane.handles_reload:
            self._control_plane.process.signal_group(signal.SIGHUP)

    async def run(self) -> int:
        self._control_plane = _ServiceProcess(self._control_plane_command)
        if (code := await self._wait_for_xds_port(self._control_plane)) is not None:
            return code
        control_plane_task = asyncio.create_task(self._keep_control_plane())
        try:
            code = await self._run_envoy_until_stopped()
            print_note("the Envoy has ended; stopping the control plane")
        finally:
            control_plane_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await control_plane_task
        return _exit_code(code)

    async def _wait_for_xds_port(self, control_plane: _ServiceProcess) -> int | None:
        """Wait until Envoys can connect. Return the exit code if the control plane or the service ends."""
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while not await _accepts(self._xds_address):
            if control_plane.process.has_ended:
                return _exit_code(control_plane.process.reap())
            if self._stopping.is_set():
                await self._stop_control_plane(control_plane)
                return 0
            if time.monotonic() > deadline:
                await self._stop_control_plane(control_plane)
                raise CliError(
                    f"the control plane did not open {self._xds_address} (xds.listen) within"
                    f" {_START_TIMEOUT_SECONDS:g} s"
                )
            await asyncio.sleep(_POLL_SECONDS)
        control_plane.handles_reload = True
        return None

    async def _run_envoy_until_stopped(self) -> int:
        """Run the Envoy, and restart it if it ends, until the service is stopped. Return its exit code."""
        code = failures = 0
        while not self._stopping.is_set():
            try:
                self._envoy = envoy = _ServiceProcess(self._files.command)
            except OSError as error:  # for example no memory
                failures += 1
                await self._pause_envoy(f"the Envoy cannot be started: {error}", failures)
                continue
            ended = asyncio.create_task(envoy.wait())
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if self._stopping.is_set():
                envoy.process.signal_group(signal.SIGTERM)
            code = await ended
            if not self._stopping.is_set():
                failures = 1 if envoy.is_stable else failures + 1
                await self._pause_envoy(f"the Envoy {describe_exit(code)}", failures)
                self._write_bootstrap()
        return code

    async def _pause_envoy(self, problem: str, failures: int) -> None:
        """Wait until the Envoy may be started again, or the service is stopped."""
        delay = _report_restart(problem, failures)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._stopping.wait()

    async def _keep_control_plane(self) -> None:
        """Restart the control plane if it ends. When cancelled, stop it."""
        assert self._control_plane is not None
        failures = 0
        try:
            while True:
                code = await self._control_plane.wait()
                failures = 1 if self._control_plane.is_stable else failures + 1
                # Also while the service is being stopped: the Envoy drains, perhaps for long.
                await asyncio.sleep(_report_restart(f"the control plane {describe_exit(code)}", failures))
                await self._restart_control_plane()
        finally:
            await self._stop_control_plane(self._control_plane)

    async def _restart_control_plane(self) -> None:
        while True:
            try:
                self._control_plane = _ServiceProcess(self._control_plane_command)
                break
            except OSError as error:  # for example no memory
                print_note(f"the control plane cannot be started: {error}")
                await asyncio.sleep(_MAX_RESTART_DELAY_SECONDS)
        while not self._control_plane.process.has_ended:
            if await _accepts(self._xds_address):
                self._control_plane.handles_reload = True
                break
            await asyncio.sleep(_POLL_SECONDS)

    async def _stop_control_plane(self, control_plane: _ServiceProcess) -> None:
        control_plane.process.signal_group(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await control_plane.wait()
        except TimeoutError:
            control_plane.process.signal_group(signal.SIGKILL)
            await control_plane.wait()
