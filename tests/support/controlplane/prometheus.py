"""A real Prometheus (Debian package prometheus) that scrapes nodes, and a fake one with fixed answers."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sandbox.child_process import find_program
from sandbox.server import Server, http_responds
from tests.support.fake_servers import http_response


class PrometheusServer(Server):
    """Scrapes status ports every second, with TiUP's labels: `job` is `tidb`, `instance` is host:port."""

    def __init__(self, directory: Path, targets: Sequence[str]) -> None:
        super().__init__("prometheus", directory)
        self._targets = targets
        self._port = self.ports.allocate()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._port}"

    def listen_ports(self) -> list[int]:
        """Return its port."""
        return [self._port]

    async def prepare(self) -> None:
        """Write its configuration; JSON is valid YAML."""
        self.directory.mkdir(parents=True, exist_ok=True)
        job = {"job_name": "tidb", "static_configs": [{"targets": list(self._targets)}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (self.directory / "prometheus.yml").write_text(json.dumps(config))

    def command(self) -> list[str]:
        """Return the command of a Prometheus whose data is next to its configuration."""
        return [
            find_program("prometheus", "prometheus"),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]

    async def is_serving(self) -> bool:
        """Return whether it answers queries."""
        return await http_responds(f"{self.url}/-/ready")


class FakePrometheus:
    """A handler for instant queries. `values` maps a word in the query to the value of each instance.

    `skew`: seconds that are added to the timestamps of the answers.
    """

    def __init__(self, values: Mapping[str, Mapping[str, float]], skew: float = 0.0) -> None:
        self.values = dict(values)
        self.forced_answer: bytes | None = None  # Replaces all answers.
        self.on_request: Callable[[], None] = lambda: None  # Called before each answer.
        self.request_heads: list[bytes] = []
        self._skew = skew

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.request_heads.append(head)
            self.on_request()
            writer.write(self.forced_answer or http_response(200, self._render_answer(self.query(head))))
            await writer.drain()

    @staticmethod
    def parameters(head: bytes) -> dict[str, str]:
        """Return the parameters of a request."""
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(head.split()[1].decode()).query))

    @classmethod
    def query(cls, head: bytes) -> str:
        """Return the PromQL of a request."""
        return cls.parameters(head)["query"]

    def _render_answer(self, query: str) -> bytes:
        values = next((values for word, values in self.values.items() if word in query), {})
        at = 1_767_225_600.0 + self._skew
        result = [
            {"metric": {"instance": name, "job": "tidb"}, "value": [at, str(value)]}
            for name, value in values.items()
        ]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
