"""Networks of a test's own, and packets that are dropped there."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_MIGRATE = Path("/proc/sys/net/ipv4/tcp_migrate_req")


@contextmanager
def own_network(*, migrates: bool = True) -> Iterator[None]:
    """This thread, and what it starts, in a network of its own, whose kernel hands on who waits, or not.

    The setting is of the network, so it is not the machine's that changes. Skips who may not have one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_NEW_NETWORK):
            pytest.skip(f"no network of its own: {os.strerror(ctypes.get_errno())}; run it as root")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            _MIGRATE.write_text(str(int(migrates)))
            yield
        finally:
            assert libc.setns(before, _NEW_NETWORK) == 0
    finally:
        os.close(before)


def drop_packets(*ports: int) -> None:
    """From now on no packet goes to or comes from these TCP ports of this network, and nothing says so."""
    for port in ports:
        for direction in ("--dport", "--sport"):
            _filter("-A", "INPUT", "-p", "tcp", direction, str(port), "-j", "DROP")


def drop_new_connections(*ports: int) -> None:
    """The same for the packets that open connections only."""
    for port in ports:
        _filter("-A", "INPUT", "-p", "tcp", "--syn", "--dport", str(port), "-j", "DROP")


def pass_packets() -> None:
    """From now on all packets arrive again."""
    _filter("-F", "INPUT")


def _filter(*rule: str) -> None:
    """Within `own_network` only: the rules are those of the network of this thread."""
    subprocess.run(["iptables", "--wait", *rule], check=True)
