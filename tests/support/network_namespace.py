"""Runs tests in a separate network namespace, and drops packets there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_TCP_MIGRATE_REQ = Path("/proc/sys/net/ipv4/tcp_migrate_req")


@contextmanager
def network_namespace(*, tcp_migrate_req: bool = True) -> Iterator[None]:
    """Switch this thread and its children to a new network namespace. Skip the test if this is not permitted.

    `tcp_migrate_req`: the value of net.ipv4.tcp_migrate_req in the namespace. If true, the kernel passes
    pending connections of a closed listener to another listener at the same port.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    original_namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"no network namespace: {os.strerror(ctypes.get_errno())}; run it as root")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            _TCP_MIGRATE_REQ.write_text(str(int(tcp_migrate_req)))
            yield
        finally:
            assert libc.setns(original_namespace, _CLONE_NEWNET) == 0
    finally:
        os.close(original_namespace)


def drop_packets(*ports: int) -> None:
    """Silently drop all packets to and from these TCP ports of this namespace."""
    for port in ports:
        for direction in ("--dport", "--sport"):
            _iptables("-A", "INPUT", "-p", "tcp", direction, str(port), "-j", "DROP")


def drop_new_connections(*ports: int) -> None:
    """Silently drop the packets that open connections to these ports."""
    for port in ports:
        _iptables("-A", "INPUT", "-p", "tcp", "--syn", "--dport", str(port), "-j", "DROP")


def stop_dropping_packets() -> None:
    _iptables("-F", "INPUT")


def _iptables(*rule: str) -> None:
    """Run iptables for this thread's namespace. Call this only within `network_namespace`."""
    subprocess.run(["iptables", "--wait", *rule], check=True)
