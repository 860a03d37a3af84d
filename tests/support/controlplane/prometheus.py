"""A real Prometheus that scrapes nodes (Debian package prometheus), and one whose every answer is made up."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandbox.child_process import find_program
from sandbox.server import Server, http_responds
from tests.support.fake_servers import http_response


class PrometheusServer(Server):
    """Scrapes status ports every second, as TiUP sets it up: `job` is `tidb`, `instance` host:port."""

    def __init__(self, directory: Path, targets: Sequence[str]) -> None:
        super().__init__("prometheus", directory)
        self._targets = targets
        self._port = self.ports.allocate()

    @classmethod
    def scraping(cls, directory: Path, targets: Sequence[str]) -> PrometheusServer:
        """One on a free port."""
        return cls(directory, targets)

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self._port}"

    def listen_ports(self) -> list[int]:
        """Its one port."""
        return [self._port]

    async def prepare(self) -> None:
        """Writes its configuration, JSON being YAML."""
        self.directory.mkdir(parents=True, exist_ok=True)
        scraped = {"job_name": "tidb", "static_configs": [{"targets": list(self._targets)}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
        (self.directory / "prometheus.yml").write_text(json.dumps(config))

    def command(self) -> list[str]:
        """Prometheus with its data beside its configuration."""
        return [
            find_program("prometheus", "prometheus"),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=warn",
        ]

    async def is_serving(self) -> bool:
        """Whether it answers queries."""
        return await http_responds(f"{self.url}/-/ready")


class FakePrometheus:
    """A handler that answers instant queries: by a word of the query, values by instance.

    It dates its answers by a clock of its own, as `skew` says.
    """

    def __init__(self, values: Mapping[str, Mapping[str, float]], skew: float = 0.0) -> None:
        self.values = dict(values)
        self.forced_answer: bytes | None = None  # in place of all answers
        self.request_heads: list[bytes] = []
        self._skew = skew

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.request_heads.append(head)
            writer.write(self.forced_answer or http_response(200, self._render_answer(self.query(head))))
            await writer.drain()

    @staticmethod
    def query(head: bytes) -> str:
        """The PromQL of a request."""
        path = head.split()[1].decode()
        return urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["query"][0]

    def _render_answer(self, query: str) -> bytes:
        values = next((values for word, values in self.values.items() if word in query), {})
        at = 1_767_225_600.0 + self._skew
        result = [
            {"metric": {"instance": name, "job": "tidb"}, "value": [at, str(value)]}
            for name, value in values.items()
        ]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
