"""Two MariaDB servers with the same data, which stand behind every proxy that is measured."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.peers import Certificate
from bench.sysbench import Sysbench
from bench.workloads import ROWS
from sandbox.mariadb import MariaDb
from sandbox.process import find_program

_SERVERS = 2
_MAX_CONNECTIONS = 12_000


class _Secure(MariaDb):
    """A MariaDB that speaks TLS with clients who want to."""

    certificate: Certificate

    def command(self) -> list[str]:
        """With the certificate."""
        return [
            *super().command(),
            f"--ssl-cert={self.certificate.cert}",
            f"--ssl-key={self.certificate.key}",
            f"--max-connections={_MAX_CONNECTIONS}",
        ]


@asynccontextmanager
async def serving(directory: Path, certificate: Certificate) -> AsyncIterator[list[int]]:
    """The ports of two servers, each with sysbench's table. ProcessFailed, ProgramMissing, TimeoutError."""
    async with AsyncExitStack() as stack:
        ports = []
        for number in range(_SERVERS):
            server = _Secure.start(directory / f"server-{number + 1}")
            server.certificate = certificate
            await stack.enter_async_context(server)
            ports.append(server.port)
        async with asyncio.TaskGroup() as group:
            for port in ports:
                sysbench = Sysbench(directory / f"prepare-{port}", rows=ROWS, clients=1)
                group.create_task(sysbench.prepare(port))
        yield ports


def make_certificate(directory: Path) -> Certificate:
    """A certificate for 127.0.0.1 that signs itself, good for a month. ProgramMissing without openssl."""
    # HAProxy looks for the key under this name.
    certificate = Certificate(directory / "cert.pem", directory / "cert.pem.key")
    command = [
        *(find_program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "30"),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(certificate.key), "-out", str(certificate.cert)),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return certificate
