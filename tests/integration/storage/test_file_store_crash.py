"""If a process is killed during a write, its file stays intact and contains every acknowledged write."""

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

# This program writes intents in which all weights are the same number. It prints the number after each write.
WRITER = """
import asyncio, sys
from pathlib import Path
from controlplane.model.intents import Intents
from controlplane.storage.file_store import FileStore

async def write(path, number):
    store = FileStore(path)
    async with store.lock():
        version = (await store.load()).intents.version
        while True:
            number += 1
            intents = Intents(weights={f"tidb-{i}:4000": number for i in range(500)})
            version = await store.save_intents(intents, version)
            print(number, flush=True)

asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
"""
ROUNDS = 8


async def load(path: Path) -> LoadedState:
    store = FileStore(path)
    async with store.lock():
        return await store.load()


def start(path: Path, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE, text=True
    )


def test_killed_writer_leaves_intact_file(tmp_path: Path) -> None:
    acknowledged = 0
    for _ in range(ROUNDS):
        with start(tmp_path, acknowledged) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline()]  # wait for the first write
            time.sleep(random.uniform(0, 0.05))  # kill it at a random moment
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        acknowledged = int([line for line in lines if line.endswith("\n")][-1])
        stored = asyncio.run(load(tmp_path))
        assert stored.load_errors == ()
        assert len(stored.intents.value.weights) == 500
        (number,) = set(stored.intents.value.weights.values())
        assert number in (acknowledged, acknowledged + 1)
        acknowledged = number


def test_second_control_plane_gets_process_id_of_first(tmp_path: Path) -> None:
    with start(tmp_path, 0) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = subprocess.run(
            [sys.executable, "-c", WRITER, str(tmp_path), "0"], capture_output=True, text=True, timeout=60
        )
        first.kill()
    problem = (
        f"the control plane with process id {first.pid} uses it (lock file {tmp_path}/lock); stop that one"
    )
    assert problem in second.stderr.splitlines()[-1]
    with start(tmp_path, 0) as third:  # the kernel released the lock with the dead process
        assert third.stdout is not None
        assert third.stdout.readline() == "1\n"
        third.kill()
