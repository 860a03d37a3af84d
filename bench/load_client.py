"""Our own clients of a MySQL server (`bench/client`, Rust): thousands of them cost little CPU beside a proxy.

Unlike sysbench they keep to a rate, come and go, hold idle connections, speak TLS inside and outside of
MySQL's handshake, and know what each byte of an answer must be.
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
_PROTOCOL_CRATE = _SOURCE_DIRECTORY.parents[1] / "filters" / "wire"  # what it is built with
_EXTRA_TIMEOUT_SECONDS = 60.0
"""Seconds beyond those that were asked for."""
_MAX_LINE_BYTES = 64 << 20
"""Bytes. A slice prints some for each answer."""

Tls = Literal["none", "mysql", "first"]
"""Where TLS begins: nowhere, within MySQL's handshake, with the first byte."""


async def build(directory: Path) -> Path:
    """The program, built when it is missing or older than its sources. The log is in `directory`.

    ProgramMissing without cargo or without the sources, which only a checkout has; ProcessFailed when cargo
    fails; TimeoutError.
    """
    if not (_SOURCE_DIRECTORY / "Cargo.toml").exists() or not _PROTOCOL_CRATE.exists():
        raise ProgramMissing(PROGRAM_NAME, "a checkout of Tidevoy: its benchmarks run from there")
    target = _PROTOCOL_CRATE.parent / "target"  # where much of what it needs has been built for the module
    await cargo_build.build(_SOURCE_DIRECTORY / "Cargo.toml", target, directory)
    return target / "release" / PROGRAM_NAME


@dataclass(frozen=True, slots=True)
class LoadClientResult:
    """What one run found. `figures`: all that it printed, times in seconds."""

    figures: Mapping[str, Any]

    @classmethod
    def parse(cls, output: str) -> Self:
        """From the last line of what it prints. ValueError when that is none of its objects."""
        lines = output.strip().splitlines()
        figures = json.loads(lines[-1] if lines else "")
        if not isinstance(figures, dict) or "errors" not in figures:
            raise ValueError(f"{PROGRAM_NAME} printed no result: {output[-200:]!r}")
        return cls(figures)

    @property
    def errors(self) -> int:
        """How often something went wrong."""
        return int(self.figures["errors"])

    @property
    def error_text(self) -> str:
        """The errors by kind, and what the first of them said; empty without any."""
        kinds = ", ".join(f"{kind}: {count}" for kind, count in self.figures["errors_by_kind"].items())
        return "\n".join([kinds, *self.figures["details"]]).strip()


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """How clients come in. The account is one of mysql_native_password, or has no password.

    `ca`: the authorities by which the server's certificate is checked; without it, any certificate will do.
    """

    tls: Tls = "none"
    ca: Path | None = None
    user: str = "root"
    password: str = ""

    def command_options(self, port: int) -> list[str]:
        """As the command line has it, for a server on loopback."""
        return ["--address", f"127.0.0.1:{port}", "--tls", self.tls, *self.account_options()]

    def account_options(self) -> list[str]:
        """The same for any server."""
        ca_options = [] if self.ca is None else ["--ca", str(self.ca)]
        return ["--user", self.user, "--password", self.password, *ca_options]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One of the servers on loopback that take turns in `LoadClient.slices`."""

    port: int
    tls: Tls = "none"

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port},tls={self.tls}"


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice has measured.

    `seconds`: from the first send to the last answer. `latencies`: of all statements on open connections, in
    milliseconds; `new_connections`: how long each of them took from beginning to end, in milliseconds.
    """

    seconds: float
    latencies: list[float]
    new_connections: list[float]

    @classmethod
    def from_result(cls, result: LoadClientResult) -> Self:
        """As the program printed it, in microseconds."""
        latencies, new_connections = (
            [each / 1000 for each in result.figures[name]] for name in ("latencies_us", "new_connections_us")
        )
        return cls(float(result.figures["seconds"]), latencies, new_connections)


class SliceRunner:
    """Connections to several targets, one of which at a time is put under load; see `LoadClient.slices`."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._process = child

    @property
    def pid(self) -> int:
        """Process id of the load client, which uses no CPU between two slices."""
        return self._process.pid

    async def run(
        self, target: int, seconds: float, *, rate: float | None = None, new_connections: float | None = None
    ) -> SliceResult:
        """Put one target, given by its index, under load for so long, then wait for its last answers.

        `rate`: statements per second of all its connections together, whose latencies count from when each
        was due; without it all ask at full speed, and with 0 none asks. `new_connections`: so many per second
        beside that, each with a login and one statement.

        ProcessFailed when anything goes wrong, be it one answer; TimeoutError. Where no measurement was
        printed, further slices fail too.
        """
        order = {"target": target, "seconds": seconds, "rate": rate, "new_connections": new_connections}
        try:
            async with asyncio.timeout(seconds + _EXTRA_TIMEOUT_SECONDS):
                found = await self._execute(json.dumps(order))
        except BaseException:
            # What it still prints would be taken for the answer to the next order.
            _kill(self._process)
            raise
        if found.errors:
            raise ProcessFailed(PROGRAM_NAME, f"met {found.errors} errors", found.error_text)
        return SliceResult.from_result(found)

    async def wait_ready(self) -> None:
        """Wait until all connections are logged in. ProcessFailed."""
        await self._read_line()

    async def _execute(self, order: str) -> LoadClientResult:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has ended, and reading tells why
            self._process.stdin.write(order.encode() + b"\n")
            await self._process.stdin.drain()
        return LoadClientResult.parse(await self._read_line())

    async def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):  # it has ended, maybe within a line
            line += await _read_output(self._process)
        return line.decode()


class LoadClient:
    """The program, ready to be run. Made by `ready`.

    All runs raise ProcessFailed when the program fails, and TimeoutError when it does not end.
    """

    def __init__(self, program: Path, login: LoginOptions | None = None) -> None:
        self.program = program
        self._login = login or LoginOptions()

    @classmethod
    async def create(cls, directory: Path, login: LoginOptions | None = None) -> Self:
        """With the program built; errors as those of `build`."""
        return cls(await build(directory), login)

    @asynccontextmanager
    async def slices(
        self, targets: Sequence[LoadTarget], *, connections: int, statement: str = "", numbers: int = 1
    ) -> AsyncIterator[SliceRunner]:
        """Holds so many logged-in connections to each target, and puts one target at a time under load.

        Each `{}` in the statement becomes a random number from 1 to `numbers`, all of one statement the same.
        Where TLS begins is said by the targets, and not by how clients come in.
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
        """Sessions that know each byte of their answers. `kill`: the share that ends by a reset."""
        options = ["--sessions", str(sessions), "--parallel", str(parallel)]
        options += ["--kill", str(kill)] if kill is not None else []
        return await self._run_subcommand("nonce", port, options, seconds)

    async def gaps(
        self, port: int, *, statements: int, connections: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Small packets in pieces, with pauses of microseconds between them."""
        options = ["--statements", str(statements), "--connections", str(connections)]
        return await self._run_subcommand("gaps", port, options, seconds)

    async def slow(
        self, port: int, *, connections: int, size: int, seconds: float = 600.0
    ) -> LoadClientResult:
        """Clients that read a result of `size` bytes slowly."""
        options = ["--connections", str(connections), "--bytes", str(size)]
        return await self._run_subcommand("slow", port, options, seconds)

    @asynccontextmanager
    async def idle(
        self, port: int, *, connections: int, ramp: float | None = None, seconds: float = 60.0
    ) -> AsyncIterator[list[LoadClientResult]]:
        """Holds logged-in connections. The list holds their result after the block, unless it raised.

        `ramp`: new ones per second at most; `seconds`: until all are there.
        """
        options = ["--connections", str(connections)]
        options += ["--ramp", str(ramp)] if ramp is not None else []
        found: list[LoadClientResult] = []
        options += self._login.command_options(port)
        process = await self._start_subcommand("idle", options, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if not await process.stdout.readline():  # it says that they are there
                    await _read_result(process)
            yield found
            process.stdin.close()
            async with asyncio.timeout(_EXTRA_TIMEOUT_SECONDS):
                found.append(await _read_result(process))
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
        # Not a sandbox.child_process.Process: some need a standard input, and all others end by themselves.
        return await asyncio.create_subprocess_exec(
            *(str(self.program), subcommand, *options),
            limit=_MAX_LINE_BYTES,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


async def _read_result(child: asyncio.subprocess.Process) -> LoadClientResult:
    """What it prints last."""
    return LoadClientResult.parse((await _read_output(child)).decode())


async def _read_output(child: asyncio.subprocess.Process) -> bytes:
    """All that it still prints. ProcessFailed when it does not end well."""
    output, errors = await child.communicate()
    if child.returncode != 0:
        raise ProcessFailed(PROGRAM_NAME, describe_exit(child.returncode or 0), errors.decode().strip())
    return output


def _kill(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()


async def _kill_and_wait(child: asyncio.subprocess.Process) -> None:
    _kill(child)
    # Also closes its pipes.
    await child.communicate()
