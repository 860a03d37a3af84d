"""Tells systemd that the service is ready."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify_ready() -> None:
    """Send READY=1 if systemd waits for it (`Type=notify`), as sd_notify(3) specifies; otherwise do nothing.

    https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a socket in the abstract namespace
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notification, suppress(OSError):
        notification.sendto(b"READY=1", address)
