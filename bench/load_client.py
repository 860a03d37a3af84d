"""Our own clients of a MySQL server (`bench/client`, Rust): thousands of them cost little CPU beside a proxy.

Unlike sysbench they keep to a rate, come and go, hold idle connections, speak TLS inside and outside of
MySQL's handshake, and know what each byte of an answer must be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bench import cargo
from bench.sysbench import Outcome
from sandbox.process import ProcessFailed, ProgramMissing, describe_exit

NAME = "tidevoy-load"
_ROOT = Path(__file__).parent / "client"
_PROTOCOL = _ROOT.parents[1] / "filters" / "wire"  # what it is built with
_PATIENCE = 60.0
"""Seconds beyond those that were asked for."""

Tls = Literal["none", "mysql", "first"]
"""Where TLS begins: nowhere, within MySQL's handshake, with the first byte."""


async def build(directory: Path) -> Path:
    """The program, built when it is missing or older than its sources. The log is in `directory`.

    ProgramMissing without cargo or without the sources, which only a checkout has; ProcessFailed when cargo
    fails; TimeoutError.
    """
    if not (_ROOT / "Cargo.toml").exists() or not _PROTOCOL.exists():
        raise ProgramMissing(NAME, "a checkout of Tidevoy: its benchmarks run from there")
    target = _PROTOCOL.parent / "target"  # where much of what it needs has been built for the module
    await cargo.build(_ROOT / "Cargo.toml", target, directory)
    return target / "release" / NAME


@dataclass(frozen=True, slots=True)
class Found:
    """What one run found. `figures`: all that it printed, latencies in milliseconds, times in seconds."""

    figures: Mapping[str, Any]

    @classmethod
    def read(cls, output: str) -> Self:
        """From the last line of what it prints. ValueError when that is none of its objects."""
        lines = output.strip().splitlines()
        figures = json.loads(lines[-1] if lines else "")
        if not isinstance(figures, dict) or "errors" not in figures:
            raise ValueError(f"{NAME} printed no result: {output[-200:]!r}")
        return cls(figures)

    @property
    def errors(self) -> int:
        """How often something went wrong."""
        return int(self.figures["errors"])

    @property
    def told(self) -> str:
        """The errors by kind, and what the first of them said; empty without any."""
        kinds = ", ".join(f"{kind}: {count}" for kind, count in self.figures["errors_by_kind"].items())
        return "\n".join([kinds, *self.figures["details"]]).strip()

    def outcome(self) -> Outcome:
        """The run in sysbench's terms; of `select` only."""
        figures = self.figures
        return Outcome(int(figures["queries"]), float(figures["per_second"]), float(figures["p95_ms"]))


@dataclass(frozen=True, slots=True)
class Access:
    """How clients come in. The account is one of mysql_native_password, or has no password.

    `ca`: the authorities by which the server's certificate is checked; without it, any certificate will do.
    """

    tls: Tls = "none"
    ca: Path | None = None
    user: str = "root"
    password: str = ""

    def options(self, port: int) -> list[str]:
        """As the command line has it, for a server on loopback."""
        checked = [] if self.ca is None else ["--ca", str(self.ca)]
        account = ["--user", self.user, "--password", self.password]
        return ["--address", f"127.0.0.1:{port}", *account, "--tls", self.tls, *checked]


class LoadClient:
    """The program, ready to be run. Made by `ready`.

    All runs raise ProcessFailed when the program fails, and TimeoutError when it does not end.
    """

    def __init__(self, program: Path, access: Access | None = None) -> None:
        self.program = program
        self._access = access or Access()

    @classmethod
    async def ready(cls, directory: Path, access: Access | None = None) -> Self:
        """With the program built; errors as those of `build`."""
        return cls(await build(directory), access)

    async def select(
        self, port: int, seconds: float, *, connections: int, statement: str = "", rate: float | None = None
    ) -> Found:
        """Connections that ask the same again and again; `rate`: statements per second of all together."""
        options = ["--connections", str(connections), "--seconds", str(seconds)]
        options += ["--statement", statement] if statement else []
        options += ["--rate", str(rate)] if rate is not None else []
        return await self._run("select", port, options, seconds)

    async def churn(self, port: int, seconds: float, *, rate: float, statement: str = "") -> Found:
        """So many new connections per second: login, one statement, end."""
        options = ["--rate", str(rate), "--seconds", str(seconds)]
        options += ["--statement", statement] if statement else []
        return await self._run("churn", port, options, seconds)

    async def nonce(
        self, port: int, *, sessions: int, parallel: int, kill: float | None = None, seconds: float = 600.0
    ) -> Found:
        """Sessions that know each byte of their answers. `kill`: the share that ends by a reset."""
        options = ["--sessions", str(sessions), "--parallel", str(parallel)]
        options += ["--kill", str(kill)] if kill is not None else []
        return await self._run("nonce", port, options, seconds)

    async def gaps(self, port: int, *, statements: int, connections: int, seconds: float = 600.0) -> Found:
        """Small packets in pieces, with pauses of microseconds between them."""
        options = ["--statements", str(statements), "--connections", str(connections)]
        return await self._run("gaps", port, options, seconds)

    async def slow(self, port: int, *, connections: int, size: int, seconds: float = 600.0) -> Found:
        """Clients that read a result of `size` bytes slowly."""
        options = ["--connections", str(connections), "--bytes", str(size)]
        return await self._run("slow", port, options, seconds)

    @asynccontextmanager
    async def idle(
        self, port: int, *, connections: int, ramp: float | None = None, seconds: float = 60.0
    ) -> AsyncIterator[list[Found]]:
        """Holds logged-in connections. What became of them is in the list behind the block, unless it raised.

        `ramp`: new ones per second at most; `seconds`: until all are there.
        """
        options = ["--connections", str(connections)]
        options += ["--ramp", str(ramp)] if ramp is not None else []
        found: list[Found] = []
        child = await self._start("idle", port, options, stdin=asyncio.subprocess.PIPE)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if not await child.stdout.readline():  # it says that they are there
                    await _result(child)
            yield found
            child.stdin.close()
            async with asyncio.timeout(_PATIENCE):
                found.append(await _result(child))
        finally:
            await _end(child)

    async def _run(self, verb: str, port: int, options: Sequence[str], seconds: float) -> Found:
        child = await self._start(verb, port, options)
        try:
            async with asyncio.timeout(seconds + _PATIENCE):
                return await _result(child)
        finally:
            await _end(child)

    async def _start(
        self, verb: str, port: int, options: Sequence[str], stdin: int = asyncio.subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        # Not a sandbox.process.Process: idle needs a standard input, and all others end by themselves.
        return await asyncio.create_subprocess_exec(
            *(str(self.program), verb, *self._access.options(port), *options),
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


class Select:
    """Clients that ask one statement again and again; `run` is the same as of sysbench."""

    def __init__(
        self, client: LoadClient, *, connections: int, statement: str = "", rate: float | None = None
    ) -> None:
        self._client = client
        self._connections, self._statement, self._rate = connections, statement, rate

    async def run(self, port: int, seconds: float) -> Outcome:
        """Let them work. ProcessFailed when anything goes wrong, be it one answer; TimeoutError."""
        found = await self._client.select(
            port, seconds, connections=self._connections, statement=self._statement, rate=self._rate
        )
        if found.errors:
            raise ProcessFailed(NAME, f"met {found.errors} errors", found.told)
        return found.outcome()


async def _result(child: asyncio.subprocess.Process) -> Found:
    """What it prints last."""
    output, complaint = await child.communicate()
    if child.returncode != 0:
        raise ProcessFailed(NAME, describe_exit(child.returncode or 0), complaint.decode().strip())
    return Found.read(output.decode())


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    # Also closes its pipes.
    await child.communicate()
