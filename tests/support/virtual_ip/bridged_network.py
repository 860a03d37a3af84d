"""Machines with network namespaces of their own, connected by a bridge."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from sandbox.child_process import find_program
from tests.support.network_namespace import network_namespace

GATEWAY = "10.0.0.1"
"""The address of the namespace with the bridge, in which the test itself runs."""
_PREFIX_LENGTH = 24
_BRIDGE = "bridge"
_INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000


class Machine:
    """A network namespace with one interface, `eth0`, at the bridge.

    The namespace has no name. It ends with the descriptor and its processes, even if the test is killed.
    """

    def __init__(self, name: str, address: str, namespace: int) -> None:
        self.name, self.address, self.interface = name, address, _INTERFACE
        self._namespace = namespace  # A descriptor.
        self._path = f"/proc/{os.getpid()}/fd/{namespace}"
        self._bridge_port = f"to-{name}"

    def command(self, *command: str) -> list[str]:
        """Return a command that runs `command` on this machine."""
        return [find_program("nsenter", "util-linux"), f"--net={self._path}", *command]

    def create_socket(self) -> socket.socket:
        """Create a non-blocking TCP socket on this machine."""
        with _restored_namespace():
            _enter_namespace(self._namespace)
            created = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        created.setblocking(False)
        return created

    def attach(self) -> None:
        """Create its interface, and connect it to the bridge."""
        _ip("link", "add", self._bridge_port, "type", "veth", "peer", "name", _INTERFACE)
        _ip("link", "set", _INTERFACE, "netns", self._path)
        self._ip("address", "add", f"{self.address}/{_PREFIX_LENGTH}", "dev", _INTERFACE)
        for interface in ("lo", _INTERFACE):
            self._ip("link", "set", interface, "up")
        self.connect()
        _ip("link", "set", self._bridge_port, "up")

    def disconnect(self) -> None:
        """Cut the machine off from all others. It notices nothing: its interface stays up."""
        _ip("link", "set", self._bridge_port, "nomaster")

    def connect(self) -> None:
        """Connect the machine to the bridge."""
        _ip("link", "set", self._bridge_port, "master", _BRIDGE)

    def addresses(self) -> list[str]:
        """Return the IPv4 addresses of its interface."""
        interfaces: list[dict[str, Any]] = json.loads(
            self._ip("-json", "-4", "address", "show", "dev", _INTERFACE)
        )
        return [info["local"] for interface in interfaces for info in interface.get("addr_info", [])]

    def remove_address(self, address: str) -> None:
        """Remove an additional address from its interface, if it has it."""
        if address in self.addresses():
            self._ip("address", "delete", f"{address}/32", "dev", _INTERFACE)

    def _ip(self, *arguments: str) -> str:
        return _run(self.command(find_program("ip", "iproute2"), *arguments))


@contextmanager
def bridged_network(machines: Mapping[str, str]) -> Iterator[list[Machine]]:
    """Yield a machine for each name and address. Skip the test if namespaces are not permitted.

    The calling thread and its children run in the namespace with the bridge, whose address is GATEWAY.
    """
    with network_namespace(), ExitStack() as exit_stack:
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{GATEWAY}/{_PREFIX_LENGTH}", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        connected = []
        for name, address in machines.items():
            namespace = _create_namespace()
            exit_stack.callback(os.close, namespace)
            machine = Machine(name, address, namespace)
            machine.attach()
            connected.append(machine)
        yield connected


def _create_namespace() -> int:
    """Return the descriptor of a new network namespace."""
    with _restored_namespace():
        _check(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _enter_namespace(descriptor: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET))


@contextmanager
def _restored_namespace() -> Iterator[None]:
    """Return this thread to its current namespace at the end of the block."""
    original = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _enter_namespace(original)
        os.close(original)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> str:
    return _run([find_program("ip", "iproute2"), *arguments])


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
    return result.stdout
