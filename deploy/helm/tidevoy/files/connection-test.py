"""`helm test`: the SQL port greets, and the REST port is ready. The variables SQL (HOST:PORT) and
READYZ (a URL) say where; either may be empty.
"""

import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from os import environ

TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 5.0


def check_sql(address: str) -> str:
    """Read a server's greeting. Nothing is sent: this needs no account."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_SECONDS) as connection:
        packet = connection.recv(512)
    if len(packet) < 6:
        raise OSError("the connection was closed without a greeting")
    if packet[4] == 0xFF:  # an error packet: code, and for newer clients a state, before the text
        raise OSError(packet[7:].decode(errors="replace"))
    return packet[5 : packet.index(0, 5)].decode(errors="replace")


def check_readyz(url: str) -> str:
    context = ssl.create_default_context(cafile=environ["CA_FILE"]) if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context) as answer:  # noqa: S310
            return str(answer.status)
    except urllib.error.HTTPError as error:
        raise OSError(f"{error.code} {error.read().decode(errors='replace')}") from None


def attempt(check: Callable[[str], str], target: str) -> bool:
    attempts = int(environ.get("ATTEMPTS", "6"))
    for number in range(attempts):
        try:
            print(f"{target}: {check(target)}")
        except (OSError, ValueError) as error:
            print(f"{target}: {error}", file=sys.stderr)
            if number < attempts - 1:
                time.sleep(PAUSE_SECONDS)
        else:
            return True
    return False


def main() -> int:
    checks = ((check_sql, environ.get("SQL", "")), (check_readyz, environ.get("READYZ", "")))
    results = [attempt(check, target) for check, target in checks if target]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
