"""Run the load client (`bench/client`, Rust): thousands of MySQL connections at a low CPU cost.

Unlike sysbench it keeps a fixed rate, opens and closes connections, holds idle connections, speaks TLS inside
and outside of MySQL's handshake, and checks every byte of each response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bench import cargo_build
from sandbox.child_process import ProcessFailed, ProgramMissing, describe_exit

PROGRAM_NAME = "tidevoy-load"
_SOURCE_DIRECTORY = Path(__file__).parent / "client"
_PROTOCOL_CRATE = _SOURCE_DIRECTORY.parents[1] / "filters" / "wire"  # a dependency of the client
_EXTRA_TIMEOUT_SECONDS = 60.0
"""Time that a run may take in addition to its requested duration."""
_MAX_LINE_BYTES = 64 << 20
"""Limit of an output line: a slice prints one number per response."""

Tls = Literal["none", "mysql", "first"]
"""Where TLS starts: nowhere, within MySQL's handshake, with the first byte."""


async def build(directory: Path) -> Path:
    """Build the program if it is missing or older than its sources. The log is written to `directory`.

    Raises ProgramMissing without cargo or the sources, which only a checkout has; ProcessFailed if cargo
    fails; TimeoutError.
    """
    if not (_SOURCE_DIRECTORY / "Cargo.toml").exists() or not _PROTOCOL_CRATE.exists():
        raise ProgramMissing(PROGRAM_NAME, "a checkout of Tidevoy: its benchmarks run from there")
    target = _PROTOCOL_CRATE.parent / "target"  # shared with the module's dependencies
    await cargo_build.build(_SOURCE_DIRECTORY / "Cargo.toml", target, directory)
    return target / "release" / PROGRAM_NAME


@dataclass(frozen=True, slots=True)
class LoadClientResult:
    """The result of one run. `figures`: all values that it printed, times in seconds."""

    figures: Mapping[str, Any]

    @classmethod
    def parse(cls, output: str) -> Self:
        """Parse the last line of the output. Raises ValueError if it is not a result."""
        lines = output.strip().splitlines()
        figures = json.loads(lines[-1] if lines else "")
        if not isinstance(figures, dict) or "errors" not in figures:
            raise ValueError(f"{PROGRAM_NAME} printed no result: {output[-200:]!r}")
        return cls(figures)

    @property
    def errors(self) -> int:
        """The number of errors."""
        return int(self.figures["errors"])

    @property
    def error_text(self) -> str:
        """The errors by kind and the details of the first ones; empty without errors."""
        kinds = ", ".join(f"{kind}: {count}" for kind, count in self.figures["errors_by_kind"].items())
        return "\n".join([kinds, *self.figures["details"]]).strip()


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """How clients log in. The account uses mysql_native_password or has no password.

    `ca`: CA file that verifies the server's certificate; without it, any certificate is accepted.
    """

    tls: Tls = "none"
    ca: Path | None = None
    user: str = "root"
    password: str = ""

    def command_options(self, port: int) -> list[str]:
        """Return the command line options for a server on loopback."""
        return ["--address", f"127.0.0.1:{port}", "--tls", self.tls, *self.account_options()]

    def account_options(self) -> list[str]:
        """Return the command line options that do not depend on the server."""
        ca_options = [] if self.ca is None else ["--ca", str(self.ca)]
        return ["--user", self.user, "--password", self.password, *ca_options]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One of the servers on loopback that `LoadClient.slices` loads alternately."""

    port: int
    tls: Tls = "none"

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port},tls={self.tls}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The measurements of one slice.

    `seconds`: from the first request to the last response. `latencies`: of all statements on open
    connections, in milliseconds. `new_connections`: total time of each new connection, in milliseconds.
    """

    seconds: float
    latencies: list[float]
    new_connections: list[float]

    @classmethod
    def from_result(cls, result: LoadClientResult) -> Self:
        """Convert a result, whose times are in microseconds."""
        latencies, new_connections = (
            [microseconds / 1000 for microseconds in result.figures[name]]
            for name in ("latencies_us", "new_connections_us")
        )
        return cls(float(result.figures["seconds"]), latencies, new_connections)


class SliceRunner:
    """Open connections to several targets, of which one at a time is loaded; see `LoadClient.slices`."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._process = child

    @property
    def pid(self) -> int:
        """Process id of the load client. It uses no CPU between two slices."""
        return self._process.pid

    async def run(
        self, target: int, seconds: float, *, rate: float | None = None, new_connections: float | None = None
    ) -> SliceResult:
        """Load one target (an index) for `seconds`, then wait for the last responses.

        `rate`: statements per second over all connections; latencies then count from each statement's
        scheduled time. None: full speed; 0: no statements. `new_connections`: additional connections per
        second, each with a login and one statement.

        Raises ProcessFailed on any error, even one wrong response, and TimeoutError. If no measurement was
        printed, further slices also fail.
        """
        request = {"target": target, "seconds": seconds, "rate": rate, "new_connections": new_connections}
        try:
            async with asyncio.timeout(seconds + _EXTRA_TIMEOUT_SECONDS):
                result = await self._execute(json.dumps(request))
        except BaseException:
            # A late result would be read as the result of the next request.
            _kill(self._process)
            raise
        if result.errors:
            raise ProcessFailed(PROGRAM_NAME, f"met {result.errors} errors", result.error_text)
        return SliceResult.from_result(result)

    async def wait_ready(self) -> None:
        """Wait until all connections are logged in. Raises ProcessFailed."""
        await self._read_line()

    async def _execute(self, request: str) -> LoadClientResult:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # the process has exited; reading its output gives the reason
            self._process.stdin.write(request.encode() + b"\n")
            await self._process.stdin.drain()
        return LoadClientResult.parse(await self._read_line())

    async def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # the process has exited, maybe within a line
            line += await _read_output(self._process)
        return line.decode()


class LoadClient:
    """The built program; see `create`.

    All runs raise ProcessFailed if the program fails, and TimeoutError if it does not exit.
    """

    def __init__(self, program: Path, login: LoginOptions | None = None) -> None:
        self.program = program
        self._login = login or LoginOptions()

    @classmethod
    async def create(cls, directory: Path, login: LoginOptions | None = None) -> Self:
        """Build the program and return its client. Raises the errors of `build`."""
        return cls(await build(directory), login)

    @asynccontextmanager
    async def slices(
        self, targets: Sequence[LoadTarget], *, connections: int, statement: str = "", numbers: int = 1
    ) -> AsyncIterator[SliceRunner]:
        """Hold `connections` logged-in connections to each target, and load one target at a time.

        Each `{}` in the statement becomes a random number from 1 to `numbers`, the same one within a
        statement. The targets decide where TLS starts, not the login options.
        """
        options = [option for target in targets for option in ("--target", str(target))]
        options += [
            *self._login.account_options(),
            "--connections",
            str(connections),
            "--numbers",
            str(numbers),
        ]
        options += ["--statement", statement] if statement else []
        process = await self._start_subcommand("slices", options, stdin=asyncio.subprocess.PIPE)
        try:
            slices = SliceRunner(process)
            async with asyncio.timeout(_EXTRA_TIMEOUT_SECONDS):
                await slices.wait_ready()
            yield slices
        finally:
            await _kill_and_wait(process)

    async def nonce(
        self, port: int, *, sessions: int, parallel: int, kill: float | None = None, seconds: float = 600.0
    ) -> LoadClientResult:
        """Run sessions that check every byte of their responses. `kill`: the share that ends by a reset."""
        options = ["--sessions", str(sessions), "--parallel", str(parallel)]
        options += ["--kill", str(kill)] if kill is not None else []
        return await self._run_subcommand("nonce", port, options, seconds)

    async def gaps(
        self, port: int, *, statements: int, connections: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Send small packets in pieces, with pauses of microseconds between them."""
        options = ["--statements", str(statements), "--connections", str(connections)]
        return await self._run_subcommand("gaps", port, options, seconds)

    async def slow(
        self, port: int, *, connections: int, size: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Run clients that read a result of `size` bytes slowly."""
        options = ["--connections", str(connections), "--bytes", str(size)]
        return await self._run_subcommand("slow", port, options, seconds)

    @asynccontextmanager
    async def idle(
        self, port: int, *, connections: int, ramp: float | None = None, seconds: float = 60.0
    ) -> AsyncIterator[list[LoadClientResult]]:
        """Hold logged-in connections. After the block the list holds their result, unless the block raised.

        `ramp`: maximum of new connections per second; `seconds`: time until all are logged in.
        """
        options = ["--connections", str(connections)]
        options += ["--ramp", str(ramp)] if ramp is not None else []
        results: list[LoadClientResult] = []
        options += self._login.command_options(port)
        process = await self._start_subcommand("idle", options, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if not await process.stdout.readline():  # a line reports that all are logged in
                    await _read_result(process)
            yield results
            process.stdin.close()
            async with asyncio.timeout(_EXTRA_TIMEOUT_SECONDS):
                results.append(await _read_result(process))
        finally:
            await _kill_and_wait(process)

    async def _run_subcommand(
        self, subcommand: str, port: int, options: Sequence[str], seconds: float
    ) -> LoadClientResult:
        child = await self._start_subcommand(subcommand, [*self._login.command_options(port), *options])
        try:
            async with asyncio.timeout(seconds + _EXTRA_TIMEOUT_SECONDS):
                return await _read_result(child)
        finally:
            await _kill_and_wait(child)

    async def _start_subcommand(
        self, subcommand: str, options: Sequence[str], stdin: int = asyncio.subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        # Not a sandbox.child_process.ChildProcess: some need a standard input, and the others exit by
        # themselves.
        return await asyncio.create_subprocess_exec(
            *(str(self.program), subcommand, *options),
            limit=_MAX_LINE_BYTES,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


async def _read_result(child: asyncio.subprocess.Process) -> LoadClientResult:
    """Return the result in the rest of the output."""
    return LoadClientResult.parse((await _read_output(child)).decode())


async def _read_output(child: asyncio.subprocess.Process) -> bytes:
    """Return the rest of the output. Raises ProcessFailed if the exit code is not 0."""
    output, errors = await child.communicate()
    if child.returncode != 0:
        raise ProcessFailed(PROGRAM_NAME, describe_exit(child.returncode or 0), errors.decode().strip())
    return output


def _kill(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()


async def _kill_and_wait(child: asyncio.subprocess.Process) -> None:
    _kill(child)
    # `communicate` also closes the pipes.
    await child.communicate()
