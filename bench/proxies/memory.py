"""How much memory a proxy needs for each idle session."""

from __future__ import annotations

from collections.abc import Sequence

from bench.load_client import NAME, LoadClient
from bench.proxies.comparison import running
from bench.proxies.contenders import Contender, Site
from bench.proxies.pinning import Pinning
from bench.proxies.workloads import Encryption
from cli.output import remark
from sandbox.child_process import ProcessFailed

SESSIONS = 1_000


async def measure(
    contenders: Sequence[Contender], site: Site, client: LoadClient, pinning: Pinning | None
) -> dict[str, float]:
    """By contender, 1,000 bytes of resident memory for each of the first `SESSIONS` sessions."""
    found = {}
    async with running(contenders, site, Encryption.NONE, pinning) as proxies:
        for name, proxy in proxies.items():
            remark(f"memory of {name} for {SESSIONS:,} idle sessions")
            before = proxy.resident_kb()
            async with client.idle(proxy.target.port, connections=SESSIONS) as ended:
                found[name] = (proxy.resident_kb() - before) / SESSIONS
            if ended[0].errors:
                raise ProcessFailed(NAME, f"met {ended[0].errors} errors", ended[0].error_text)
    return found
