"""HAProxy (Debian package) as a TCP proxy in front of a MySQL server, configured as in TiDB's guide."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from bench.machine import version_of
from bench.resource_usage import raise_file_limit
from sandbox.child_process import ChildProcess, find_program
from sandbox.server import Server, sends_mysql_greeting

PACKAGE = "haproxy"
_GUIDE_MAXCONN = 4_096
_GREETING_TIMEOUT_SECONDS = 5.0


def installed_version() -> str:
    """Return the installed version. Raises ProgramMissing."""
    return version_of(find_program("haproxy", PACKAGE), "-v")


def max_connections() -> int:
    """Return the connection limit that open files allow, at most 11,000; each connection needs two files."""
    return min(11_000, max(1, (raise_file_limit() - 500) // 2))


def render_configuration(
    *,
    listen: int,
    server: int,
    log: int,
    maxconn: int = _GUIDE_MAXCONN,
    certificate: Path | None = None,
    server_ca: Path | None = None,
) -> str:
    """Return the configuration of TiDB's guide "Best Practices for Using HAProxy in TiDB", on loopback.

    Omits the service options (user, chroot, daemon, statistics page). `log`: a UDP port for syslog, where
    nothing needs to listen. `certificate`: a file `*.crt` next to its key `*.key`; terminates client TLS,
    which starts with the first byte, since HAProxy does not know MySQL's handshake. `server_ca`: TLS to the
    server, which starts with the first byte, too.
    """
    bind = "" if certificate is None else f" ssl crt {certificate}"
    to_server = "" if server_ca is None else f" ssl verify required ca-file {server_ca}"
    sections = {
        "global": (
            f"log 127.0.0.1:{log} local2",
            f"maxconn {maxconn}",
            "nbthread 1",
            "ssl-load-extra-del-ext",  # finds the key of a .crt file
        ),
        "defaults": (
            "log global",
            "retries 2",
            "timeout connect 2s",
            "timeout client 30000s",
            "timeout server 30000s",
        ),
        "listen tidb-cluster": (
            f"bind 127.0.0.1:{listen}{bind}",
            "mode tcp",
            "balance leastconn",
            f"server tidb-1 127.0.0.1:{server} check inter 2000 rise 2 fall 3{to_server}",
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
        """Return the command for one foreground process (`-db`: no daemon, no fork)."""
        return [find_program("haproxy", PACKAGE), "-db", "-f", str(self._file)]

    def listen_ports(self) -> list[int]:
        """Return its port."""
        return [self.port]

    async def prepare(self) -> None:
        """Write the configuration file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._text)

    async def is_serving(self) -> bool:
        """Return whether the server behind it sends a greeting."""
        return await (_greets_over_tls(self.port) if self._tls else sends_mysql_greeting(self.port))

    def failure_summary(self, process: ChildProcess) -> str:
        """Return the lines that reject the configuration if there are any, else the last output lines."""
        alerts = [line for line in process.output().splitlines() if line.startswith("[ALERT]")]
        return "\n".join(alerts[-5:]) or process.tail()


async def _greets_over_tls(port: int) -> bool:
    """Return whether a MySQL server sends a greeting inside TLS on `port`, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        async with asyncio.timeout(_GREETING_TIMEOUT_SECONDS):
            return (await reader.readexactly(5))[4] == 10  # HandshakeV10
    except (asyncio.IncompleteReadError, TimeoutError):
        return False
    finally:
        writer.transport.abort()
