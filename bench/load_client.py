"""Run the load client (`bench/client`, Rust): thousands of MySQL connections at a low CPU cost.

Unlike sysbench, it keeps a fixed rate, opens and closes connections, keeps idle connections open, supports
TLS from the first byte as well as in MySQL's handshake, and checks every byte of each response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bench.programs import build_with_cargo
from sandbox.child_process import ProcessFailed, ProgramMissing, describe_exit

PROGRAM_NAME = "tidevoy-load"
_SOURCE_DIRECTORY = Path(__file__).parent / "client"
_PROTOCOL_CRATE = _SOURCE_DIRECTORY.parents[1] / "filters" / "mysql-proto"  # a dependency of the client
_EXTRA_TIMEOUT_SECONDS = 60.0
"""Time that a run may take in addition to its requested duration."""
_MAX_LINE_BYTES = 64 << 20
"""Limit of an output line: a slice prints one number per response."""

Tls = Literal["none", "mysql", "first"]
"""Where TLS starts: nowhere, in MySQL's handshake, or with the first byte."""


async def build(directory: Path) -> Path:
    """Build the program if it is missing or older than its sources. The log is written to `directory`.

    Raises ProgramMissing without cargo, or without the sources, which only a checkout has; ProcessFailed if
    cargo fails; TimeoutError.
    """
    if not (_SOURCE_DIRECTORY / "Cargo.toml").exists() or not _PROTOCOL_CRATE.exists():
        raise ProgramMissing(PROGRAM_NAME, "a checkout of Tidevoy: its benchmarks run from there")
    target = _PROTOCOL_CRATE.parent / "target"  # shared, so that common dependencies are built once
    await build_with_cargo(_SOURCE_DIRECTORY / "Cargo.toml", target, directory)
    return target / "release" / PROGRAM_NAME


@dataclass(frozen=True, slots=True)
class LoadClientResult:
    """The result of one run. `figures`: all values that the program printed; times are in seconds or, if a
    name ends in `_us`, in microseconds."""

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
        return int(self.figures["errors"])

    def raise_for_errors(self) -> None:
        if self.errors:
            raise ProcessFailed(PROGRAM_NAME, f"met {self.errors} errors", self.error_text)

    @property
    def error_text(self) -> str:
        """The error counts by kind and the details of the first errors; empty without errors."""
        kinds = ", ".join(f"{kind}: {count}" for kind, count in self.figures["errors_by_kind"].items())
        return "\n".join([kinds, *self.figures["details"]]).strip()


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """How clients log in. The account uses mysql_native_password or has no password.

    `ca`: CA file that verifies the server's certificate; with None, the client accepts any certificate.
    """

    tls: Tls = "none"
    ca: Path | None = None
    user: str = "root"
    password: str = ""

    def command_options(self, port: int) -> list[str]:
        """Return the command line options for a server on loopback."""
        return ["--address", f"127.0.0.1:{port}", "--tls", self.tls, *self.account_options()]

    def account_options(self) -> list[str]:
        ca_options = [] if self.ca is None else ["--ca", str(self.ca)]
        return ["--user", self.user, "--password", self.password, *ca_options]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One of several servers on loopback. `LoadClient.slices` loads one server at a time."""

    port: int
    tls: Tls = "none"

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port},tls={self.tls}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The measurements of one slice.

    `seconds`: from the first request to the last response. `latencies`: of all statements on permanent
    connections, in milliseconds. `new_connections`: total time of each new connection, in milliseconds.
    """

    seconds: float
    latencies: list[float]
    new_connections: list[float]

    @classmethod
    def from_result(cls, result: LoadClientResult) -> Self:
        """Convert the program's result, which has these times in microseconds."""
        latencies, new_connections = (
            [microseconds / 1000 for microseconds in result.figures[name]]
            for name in ("latencies_us", "new_connections_us")
        )
        return cls(float(result.figures["seconds"]), latencies, new_connections)


class SliceRunner:
    """Permanent connections to several targets. `run` loads one target; see `LoadClient.slices`."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._process = child

    @property
    def pid(self) -> int:
        """Process id of the load client, which uses no CPU between two slices."""
        return self._process.pid

    async def run(
        self, target: int, seconds: float, *, rate: float | None = None, new_connections: float | None = None
    ) -> SliceResult:
        """Load one target (an index) for `seconds`, then wait for the last responses.

        `rate`: statements per second over all connections; None: full speed; 0: no statements. With a rate, a
        latency starts at the statement's scheduled time. `new_connections`: additional connections per
        second, each with a login and one statement.

        Raises ProcessFailed on any error, even one wrong response, and TimeoutError. After a TimeoutError, or
        if the program printed no result, all further slices fail, too.
        """
        request = {"target": target, "seconds": seconds, "rate": rate, "new_connections": new_connections}
        try:
            async with asyncio.timeout(seconds + _EXTRA_TIMEOUT_SECONDS):
                assert self._process.stdin is not None
                with suppress(ConnectionError):  # the program has exited; reading its output gives the reason
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    await self._process.stdin.drain()
                result = LoadClientResult.parse(await self._read_line())
        except BaseException:
            # Otherwise, a late result would be read as the result of the next slice.
            await _kill(self._process)
            raise
        result.raise_for_errors()
        return SliceResult.from_result(result)

    async def wait_ready(self) -> None:
        """Wait until all connections are logged in. Raises ProcessFailed."""
        await self._read_line()

    async def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # the process has exited, maybe within a line
            line += await _read_output(self._process)
        return line.decode()


class LoadClient:
    """Runs the built program; `create` builds it.

    Every run raises ProcessFailed if the program fails, and TimeoutError if it does not exit.
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
        self, targets: Sequence[LoadTarget], *, connections: int, statement: str = "", max_number: int = 1
    ) -> AsyncIterator[SliceRunner]:
        """Keep `connections` logged-in connections to each target open, and load one target at a time.

        All `{}` in a statement become the same random number from 1 to `max_number`. `targets` determine the
        TLS mode, not the login options.
        """
        options = [option for target in targets for option in ("--target", str(target))]
        options += [*self._login.account_options(), *_options(connections=connections, max_number=max_number)]
        options += ["--statement", statement] if statement else []
        process = await self._start_subcommand("slices", options, stdin=asyncio.subprocess.PIPE)
        try:
            slices = SliceRunner(process)
            async with asyncio.timeout(_EXTRA_TIMEOUT_SECONDS):
                await slices.wait_ready()
            yield slices
        finally:
            await _kill(process)

    async def check_nonces(
        self, port: int, *, sessions: int, parallel: int, kill: float | None = None, seconds: float = 600.0
    ) -> LoadClientResult:
        """Run sessions that check every byte of their responses. `kill`: fraction to end by TCP reset."""
        options = _options(sessions=sessions, parallel=parallel, kill=kill)
        return await self._run_subcommand("nonce", port, options, seconds)

    async def send_in_pieces(
        self, port: int, *, statements: int, connections: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Send small packets in pieces, with pauses of microseconds between the pieces."""
        options = _options(statements=statements, connections=connections)
        return await self._run_subcommand("gaps", port, options, seconds)

    async def read_slowly(
        self, port: int, *, connections: int, size: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Run clients that read a result of `size` bytes slowly."""
        options = _options(connections=connections, bytes=size)
        return await self._run_subcommand("slow", port, options, seconds)

    @asynccontextmanager
    async def keep_idle(
        self, port: int, *, connections: int, ramp: float | None = None, seconds: float = 60.0
    ) -> AsyncIterator[list[LoadClientResult]]:
        """Keep logged-in connections open. If the block ends without an exception, the list gets the result.

        `ramp`: maximum number of new connections per second; `seconds`: timeout until all are logged in.
        """
        options = [*_options(connections=connections, ramp=ramp), *self._login.command_options(port)]
        results: list[LoadClientResult] = []
        process = await self._start_subcommand("idle", options, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if not await process.stdout.readline():  # it prints a line when all are logged in
                    await _read_result(process)
            yield results
            process.stdin.close()
            async with asyncio.timeout(_EXTRA_TIMEOUT_SECONDS):
                results.append(await _read_result(process))
        finally:
            await _kill(process)

    async def _run_subcommand(
        self, subcommand: str, port: int, options: Sequence[str], seconds: float
    ) -> LoadClientResult:
        child = await self._start_subcommand(subcommand, [*self._login.command_options(port), *options])
        try:
            async with asyncio.timeout(seconds + _EXTRA_TIMEOUT_SECONDS):
                return await _read_result(child)
        finally:
            await _kill(child)

    async def _start_subcommand(
        self, subcommand: str, options: Sequence[str], stdin: int = asyncio.subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        # Not a sandbox.child_process.ChildProcess, since some subcommands need a standard input.
        return await asyncio.create_subprocess_exec(
            *(str(self.program), subcommand, *options),
            limit=_MAX_LINE_BYTES,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


def _options(**values: float | None) -> list[str]:
    """Return command line options for all values except None."""
    options = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
    return [text for name, value in options for text in (name, str(value))]


async def _read_result(child: asyncio.subprocess.Process) -> LoadClientResult:
    return LoadClientResult.parse((await _read_output(child)).decode())


async def _read_output(child: asyncio.subprocess.Process) -> bytes:
    """Return the rest of the output. Raises ProcessFailed if the exit code is not 0."""
    output, errors = await child.communicate()
    if child.returncode != 0:
        raise ProcessFailed(PROGRAM_NAME, describe_exit(child.returncode or 0), errors.decode().strip())
    return output


async def _kill(child: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await child.communicate()  # also closes the pipes
