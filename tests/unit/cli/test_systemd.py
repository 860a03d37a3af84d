"""The notification of systemd that the service is ready."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cli.systemd import notify_ready


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notifies_the_socket_that_systemd_names(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}" if is_abstract else name)
        listener.settimeout(5.0)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if is_abstract else name)
        notify_ready()
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "/nonexistent/notify"])
def test_service_starts_without_systemd(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify_ready()
