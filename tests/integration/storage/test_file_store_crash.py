"""Processes that die while they write: what is on disk is whole, and not older than what was acknowledged."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from controlplane.storage.file_store import FileStore
from controlplane.storage.store import LoadedState

# Writes intents in which all weights are the same number, and says each number when it is on disk.
WRITER = """
import asyncio, sys
from pathlib import Path
from controlplane.model.intents import Intents
from controlplane.storage.file_store import StateDirectory

async def write(path, number):
    directory = StateDirectory(path)
    async with directory.held():
        version = (await directory.load()).intents.version
        while True:
            number += 1
            intents = Intents(weights={f"tidb-{i}:4000": number for i in range(500)})
            version = await directory.save_intents(intents, version)
            print(number, flush=True)

asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
"""
ROUNDS = 8


async def load(path: Path) -> LoadedState:
    directory = FileStore(path)
    async with directory.lock():
        return await directory.load()


def start(path: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE, text=True
    )


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    acknowledged = 0
    for _ in range(ROUNDS):
        with start(tmp_path, acknowledged) as writer:
            assert writer.stdout is not None
            said = [writer.stdout.readline()]  # it has begun
            time.sleep(random.uniform(0, 0.05))  # the moment of death is what is drawn here
            writer.send_signal(signal.SIGKILL)
            said += writer.stdout.readlines()
        acknowledged = int([line for line in said if line.endswith("\n")][-1])
        stored = asyncio.run(load(tmp_path))
        assert stored.load_errors == ()
        assert len(stored.intents.value.weights) == 500
        (number,) = set(stored.intents.value.weights.values())
        assert number in (acknowledged, acknowledged + 1)
        acknowledged = number


def test_a_second_control_plane_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    with start(tmp_path, 0) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path), "0"], capture_output=True, text=True, timeout=60
        )
        first.kill()
    says = f"the control plane with process id {first.pid} uses it (lock file {tmp_path}/lock); stop that one"
    assert says in second.stderr.splitlines()[-1]
    with start(tmp_path, 0) as third:  # the kernel released the lock with the dead process
        assert third.stdout is not None
        assert third.stdout.readline() == "1\n"
        third.kill()
