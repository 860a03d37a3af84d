"""Measure the memory that a proxy needs per idle session."""

from __future__ import annotations

from collections.abc import Sequence

from bench.load_client import PROGRAM_NAME, LoadClient
from bench.proxies.comparison import start_all
from bench.proxies.contenders import Contender, ProxySite
from bench.proxies.pinning import CpuPinning
from bench.proxies.workloads import Encryption
from cli.output import print_note
from sandbox.child_process import ProcessFailed

IDLE_SESSIONS = 1_000


async def measure(
    contenders: Sequence[Contender], site: ProxySite, client: LoadClient, pinning: CpuPinning | None
) -> dict[str, float]:
    """Return the resident memory per session in 1,000 bytes, by contender, for IDLE_SESSIONS sessions."""
    memory_by_contender = {}
    async with start_all(contenders, site, Encryption.NONE, pinning) as proxies:
        for name, proxy in proxies.items():
            print_note(f"memory of {name} for {IDLE_SESSIONS:,} idle sessions")
            memory_before = proxy.resident_kb()
            async with client.idle(proxy.target.port, connections=IDLE_SESSIONS) as client_results:
                memory_by_contender[name] = (proxy.resident_kb() - memory_before) / IDLE_SESSIONS
            if client_results[0].errors:
                raise ProcessFailed(
                    PROGRAM_NAME, f"met {client_results[0].errors} errors", client_results[0].error_text
                )
    return memory_by_contender
