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
from controlplane.rollouts.actions.guarded_process import GuardedProcess, describe_exit

SUPERVISOR = "tidevoy-envoy"

_POLL_SECONDS = 0.1
_MAX_RESTART_DELAY_SECONDS = 30.0
_STABLE_SECONDS = 60.0  # a process that has run for so long is restarted without delay
_START_TIMEOUT_SECONDS = 60.0  # for the control plane to open its xDS port
_STOP_TIMEOUT_SECONDS = 20.0  # for the control plane to stop

_IN_CHECKOUT = Path(__file__).parents[1] / "filters" / "target" / "release" / SUPERVISOR


@dataclass(frozen=True, slots=True)
class EnvoyFiles:
    """The programs and the file that an Envoy is started with."""

    supervisor: Path
    envoy: Path
    bootstrap: Path

    @property
    def command(self) -> list[str]:
        """The command that runs the Envoy. Hot restart is off: it needs a second Envoy."""
        options = ("--config-path", str(self.bootstrap), "--disable-hot-restart")
        return [str(self.supervisor), str(self.envoy), *options]


def find_programs(envoy: str) -> tuple[Path, Path]:
    """Return the supervisor and the Envoy. Raises CliError if one is not installed."""
    beside_python = Path(sys.executable).with_name(SUPERVISOR)
    found = shutil.which(SUPERVISOR)
    candidates = (beside_python, *([Path(found)] if found else []), _IN_CHECKOUT)
    supervisor = next((file for file in candidates if file.is_file()), None)
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

    `control_plane` is its command. `write_bootstrap` is called before each start of the Envoy. Raises
    CliError if the control plane does not start.
    """
    service = _Service(list(control_plane), xds_address, files, write_bootstrap)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.on_stop_signal)
    loop.add_signal_handler(signal.SIGHUP, service.on_reload_signal)
    return await service.run()


class _Part:
    """One of the two processes, while it runs."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._started_at = name, time.monotonic()
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
        self._envoy: _Part | None = None
        self._control_plane: _Part | None = None

    def on_stop_signal(self) -> None:
        """Begin to stop. A second signal stops the Envoy at once."""
        if self._stopping.is_set() and self._envoy is not None:
            self._envoy.process.signal_group(signal.SIGTERM)
        self._stopping.set()

    def on_reload_signal(self) -> None:
        """Let the control plane reload its configuration."""
        if self._control_plane is not None:
            self._control_plane.process.signal_group(signal.SIGHUP)

    async def run(self) -> int:
        self._control_plane = _Part("the control plane", self._control_plane_command)
        if (code := await self._wait_for_xds_port(self._control_plane)) is not None:
            return code
        async with asyncio.TaskGroup() as group:
            control_plane = group.create_task(self._keep_control_plane())
            await self._keep_envoy()
            print_note("the Envoy has ended; stopping the control plane")
            control_plane.cancel()
        return 0

    async def _wait_for_xds_port(self, control_plane: _Part) -> int | None:
        """Wait until Envoys can connect. Return the exit code if the control plane or the service ends."""
        host, port = addresses.split(self._xds_address)
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while not self._stopping.is_set():
            if control_plane.process.has_ended:
                return control_plane.process.reap()
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                if time.monotonic() > deadline:
                    await self._stop_control_plane(control_plane)
                    raise CliError(
                        f"the control plane did not open {self._xds_address} (xds.listen) within"
                        f" {_START_TIMEOUT_SECONDS:g} s"
                    ) from None
                await asyncio.sleep(_POLL_SECONDS)
            else:
                writer.close()
                return None
        await self._stop_control_plane(control_plane)
        return 0

    async def _keep_envoy(self) -> None:
        """Run the Envoy, and restart it if it ends, until the service is stopped."""
        failures = 0
        while not self._stopping.is_set():
            self._write_bootstrap()
            self._envoy = envoy = _Part("the Envoy", self._files.command)
            ended = asyncio.create_task(envoy.wait())
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if self._stopping.is_set():
                envoy.process.signal_group(signal.SIGTERM)
            code = await ended
            if not self._stopping.is_set():
                failures = 1 if envoy.is_stable else failures + 1
                await self._pause(envoy, code, restart_delay(failures))

    async def _keep_control_plane(self) -> None:
        """Restart the control plane if it ends. When cancelled, stop it."""
        assert self._control_plane is not None
        failures = 0
        try:
            while True:
                code = await self._control_plane.wait()
                failures = 1 if self._control_plane.is_stable else failures + 1
                await self._pause(self._control_plane, code, restart_delay(failures))
                self._control_plane = _Part("the control plane", self._control_plane_command)
        finally:
            await self._stop_control_plane(self._control_plane)

    async def _pause(self, part: _Part, code: int, delay: float) -> None:
        when = f"in {delay:g} s" if delay else "now"
        print_note(f"{part.name} {describe_exit(code)}; it is restarted {when}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._stopping.wait()

    async def _stop_control_plane(self, control_plane: _Part) -> None:
        control_plane.process.signal_group(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await control_plane.wait()
        except TimeoutError:
            control_plane.process.signal_group(signal.SIGKILL)
            await control_plane.wait()
