"""HAProxy (Debian package) as a TCP proxy before MySQL servers: as TiDB's guide configures it, and tuned."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.process import Process, find_program
from sandbox.server import Server, greets

PACKAGE = "haproxy"
_GUIDE_MAXCONN = 4096
_PATIENCE = 5.0  # seconds for a greeting
_HEADROOM = 1000  # connections beside those that a workload leaves open


@dataclass(frozen=True, slots=True)
class Tuning:
    """What differs from the guide: lines for `global` and for `defaults`, without indentation."""

    to_global: tuple[str, ...] = ()
    to_defaults: tuple[str, ...] = ()


GUIDE = Tuning()
# Large results go from socket to socket inside the kernel, and what does not, goes in larger pieces.
TUNED = Tuning(("tune.bufsize 65536",), ("option splice-auto",))


def configuration(
    *,
    listen: int,
    servers: Sequence[int],
    log: int,
    workers: int,
    connections: int = 0,
    certificate: Path | None = None,
    tuning: Tuning = GUIDE,
) -> str:
    """What TiDB's guide "Best Practices for Using HAProxy in TiDB" writes, with ports on loopback.

    Left out is what makes a service of it (user, chroot, daemon, statistics page) and does nothing to a byte
    that passes. `connections`: how many are open at once; above the guide's maxconn that is raised. `log`: a
    UDP port of syslog; nobody need listen there. `certificate`: TLS of clients ends here, its key beside it
    with `.key` behind the name. HAProxy does not know MySQL's handshake, so they begin with TLS.
    """
    secure = "" if certificate is None else f" ssl crt {certificate}"
    most = _GUIDE_MAXCONN if connections + _HEADROOM <= _GUIDE_MAXCONN else connections + _HEADROOM
    sections = {
        "global": (
            f"log 127.0.0.1:{log} local2",
            f"maxconn {most}",
            f"nbthread {workers}",
            *tuning.to_global,
        ),
        "defaults": (
            "log global",
            "retries 2",
            "timeout connect 2s",
            "timeout client 30000s",
            "timeout server 30000s",
            *tuning.to_defaults,
        ),
        "listen tidb-cluster": (
            f"bind 127.0.0.1:{listen}{secure}",
            "mode tcp",
            "balance leastconn",
            *(
                f"server tidb-{number} 127.0.0.1:{port} check inter 2000 rise 2 fall 3"
                for number, port in enumerate(servers, start=1)
            ),
        ),
    }
    return "\n".join("\n    ".join((name, *lines)) for name, lines in sections.items()) + "\n"


class HaProxy(Server):
    """One HAProxy in the foreground: `async with HaProxy(...) as haproxy`."""

    def __init__(self, directory: Path, port: int, text: str, *, tls: bool = False) -> None:
        super().__init__("haproxy", directory)
        self.port = port
        self._text = text
        self._tls = tls

    @property
    def _file(self) -> Path:
        return self.directory / f"{self.name}.cfg"

    def command(self) -> list[str]:
        """One process (`-db`: it neither goes into the background nor forks)."""
        return [find_program("haproxy", PACKAGE), "-db", "-f", str(self._file)]

    def listens(self) -> list[int]:
        """Its port."""
        return [self.port]

    async def prepare(self) -> None:
        """Write its configuration."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._text)

    async def serves(self) -> bool:
        """Whether a server behind it greets."""
        return await (_greets_in_tls(self.port) if self._tls else greets(self.port))

    def complaint(self, process: Process) -> str:
        """The lines by which it refuses a configuration when there are some, else its last ones."""
        alerts = [line for line in process.output().splitlines() if line.startswith("[ALERT]")]
        return "\n".join(alerts[-5:]) or process.tail()


async def _greets_in_tls(port: int) -> bool:
    """Whether a MySQL server greets inside TLS on `port`, whoever's certificate that is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        async with asyncio.timeout(_PATIENCE):
            return (await reader.readexactly(5))[4] == 10  # HandshakeV10
    except (asyncio.IncompleteReadError, TimeoutError):
        return False
    finally:
        writer.transport.abort()
