"""Compaction of etcd. The control plane itself never requests a compaction."""

from __future__ import annotations

import asyncio
import os

from sandbox.etcd import Etcd


async def compact(etcd: Etcd, revision: int) -> None:
    """Make etcd discard all changes up to a revision, as PD's etcd does once an hour."""
    child = await asyncio.create_subprocess_exec(
        "etcdctl",
        f"--endpoints={etcd.url}",
        "compaction",
        str(revision),
        env={**os.environ, "ETCDCTL_API": "3"},
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await child.wait() == 0
