"""A claimed port has one owner, is not in use, and becomes free when its owner exits."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.ports import Ports, PortTaken, is_port_free

# A program that claims the port in its argument. Tests run it in another process.
_CLAIM_SCRIPT = """
import sys
from sandbox.ports import Ports, PortTaken
try:
    Ports().claim(int(sys.argv[1]))
except PortTaken:
    print("taken")
else:
    print("mine")
"""


def _claim_in_other_process(port: int) -> str:
    result = subprocess.run(
        [sys.executable, "-c", _CLAIM_SCRIPT, str(port)], stdout=subprocess.PIPE, text=True, check=True
    )
    return result.stdout.strip()


def test_claimed_port_is_exclusive_until_released(ports: Ports) -> None:
    port = ports.allocate()
    assert is_port_free(port)
    assert _claim_in_other_process(port) == "taken"
    with Ports() as other_ports, pytest.raises(PortTaken):
        other_ports.claim(port)
    ports.release(port)
    assert _claim_in_other_process(port) == "mine"
    assert ports.claim(port) == port


def test_allocated_ports_are_distinct(ports: Ports) -> None:
    with Ports() as other_ports:
        taken = [ports.allocate() for _ in range(50)] + [other_ports.allocate() for _ in range(50)]
    assert len(set(taken)) == 100


def test_ports_lie_outside_ephemeral_range(ports: Ports) -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if low <= 20_000 and high >= 60_000:
        pytest.skip("the ephemeral range of this machine covers all ports")
    assert not any(low <= ports.allocate() <= high for _ in range(20))


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_port_in_use_cannot_be_claimed(ports: Ports, address: str) -> None:
    with socket.create_server((address, 0)) as unmanaged_socket:
        port = unmanaged_socket.getsockname()[1]
        assert not is_port_free(port)
        with pytest.raises(PortTaken, match=f"port {port} is taken"):
            ports.claim(port)
    assert ports.claim(port) == port


def test_port_with_closing_connections_is_free(ports: Ports) -> None:
    port = ports.allocate()
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        accepted, _ = server.accept()
        accepted.close()  # The side that closes first keeps the port in TIME_WAIT.
        assert client.recv(1) == b""
    assert is_port_free(port)
