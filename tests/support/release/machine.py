"""A machine on which Tidevoy is installed and run by the commands of a page."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from release.__main__ import ROOT
from sandbox.ports import Ports
from sandbox.tidb_sim.server import TidbSim
from tests.support.release.booted_debian import BootedDebian, booted_debian
from tests.support.release.install_page import DEFAULT_PORTS, replace_ports
from tests.support.release.serving import settings_for, wait_until_serving

_WITH_ENVOY = "tidevoy-with-envoy.service"


class Machine:
    """A clean Debian. It shares the network with the tests, so it has other ports than the pages."""

    def __init__(self, debian: BootedDebian, ports: Mapping[str, int]) -> None:
        self._debian, self._ports = debian, ports

    @classmethod
    @asynccontextmanager
    async def boot(cls, ports: Ports) -> AsyncIterator[Machine]:
        """Start the machine. Its packages are those of a minimal Debian."""
        async with booted_debian() as debian:
            machine = cls(debian, {name: ports.allocate() for name in DEFAULT_PORTS})
            machine.path("/etc/apt/apt.conf.d/answers").write_text('APT::Get::Assume-Yes "true";\n')
            machine._set_admin_port_of_unit()
            yield machine

    def add_file(self, source: Path) -> None:
        """Copy a file to /root, where the commands of a page run."""
        shutil.copy(source, self.path("/root"))

    def path(self, path: str) -> Path:
        """Return where a file of the machine is on this one."""
        return Path(f"{self._debian.directory}{path}")

    def port(self, name: str) -> int:
        """Return the port that this machine has instead of a default one, such as `sql`."""
        return self._ports[name]

    def settings(self, node: TidbSim) -> dict[str, Any]:
        """Return settings with the ports of this machine, and with one node."""
        return settings_for(node, *(self._ports[name] for name in ("sql", "api", "xds")))

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        self.path("/etc/tidevoy/tidevoy.yaml").write_text(yaml.safe_dump(dict(settings)))

    async def run_page(self, commands: Sequence[str]) -> str:
        """Run commands of a page in /root, and return their output. Raises CommandFailed."""
        outputs = []
        for command in commands:
            local = self.with_ports(command.replace("10.0.0.5", "127.0.0.1"))
            outputs.append(await self.run("bash", "-ec", local))
        return "".join(outputs)

    async def run(self, *command: str) -> str:
        """Run one command and return its output. Raises CommandFailed."""
        # How pip and apt reach the network here.
        network = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy")
        }
        values = {
            "DEBIAN_FRONTEND": "noninteractive",
            "TIDEVOY_URL": f"http://127.0.0.1:{self._ports['api']}",
        }
        return await self._debian.run(*command, environment={**network, **values})

    def with_ports(self, text: str) -> str:
        """Replace the ports that the pages use."""
        return replace_ports(text, self._ports)

    async def show_unit(self, unit: str, *properties: str) -> list[str]:
        """Return the values of properties of a unit."""
        output = await self.run("systemctl", "show", *(f"--property={name}" for name in properties), unit)
        values = dict(line.split("=", 1) for line in output.splitlines())
        return [values[name] for name in properties]

    async def wait_until_serving(self, *units: str) -> None:
        """Wait until a client can query the node. If that fails, print the logs of the units."""
        try:
            await wait_until_serving(self._ports["sql"])
        except BaseException:
            for unit in units:
                print(await self.run("journalctl", "--no-pager", "--lines=60", f"--unit={unit}"))
            raise

    def _set_admin_port_of_unit(self) -> None:
        """Add an option to the unit, as `systemctl edit` does."""
        unit = (ROOT / "deploy/systemd" / _WITH_ENVOY).read_text()
        (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
        directory = self.path(f"/etc/systemd/system/{_WITH_ENVOY}.d")
        directory.mkdir(parents=True)
        options = f"--envoy-admin 127.0.0.1:{self._ports['admin_a']}"
        (directory / "ports.conf").write_text(f"[Service]\nExecStart=\nExecStart={command} {options}\n")
