"""HAProxy (Debian package) as a TCP proxy in front of a MySQL server, configured as in TiDB's guide."""

from __future__ import annotations

from pathlib import Path

from bench.machine import raise_file_limit
from sandbox.child_process import find_program

_PACKAGE = "haproxy"
_GUIDE_MAXCONN = 4_096


def find_haproxy() -> str:
    return find_program("haproxy", _PACKAGE)


def max_connections() -> int:
    """Return how many connections the limit of open files allows, at two files each; at most 11,000."""
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

    It leaves out the service options (user, chroot, daemon, statistics page). `log`: a UDP port for syslog,
    where nothing needs to listen. `certificate`: a file `*.crt` next to its key `*.key`, for TLS to clients.
    `server_ca`: enables TLS to the server. TLS always starts at the first byte, since HAProxy does not know
    MySQL's handshake.
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
