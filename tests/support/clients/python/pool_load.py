"""Transactions through the pool of SQLAlchemy, as in tests/support/clients/pools.py.

It runs until the end of the standard input. No transaction is retried.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

# Only the environment of the client programs has it.
from sqlalchemy import Engine, create_engine, text  # type: ignore[import-not-found]
from sqlalchemy.exc import SQLAlchemyError  # type: ignore[import-not-found]

WORKERS = int(os.environ["POOL_WORKERS"])
PAUSE_SECONDS = int(os.environ["POOL_PAUSE_MS"]) / 1000
RECOMMENDED: Mapping[str, Any] = {"pool_pre_ping": True, "pool_recycle": 600}
UPDATE = text("update counters set count = count + 1 where worker = :worker")
SELECT = text("select count from counters where worker = :worker")


class PoolLoad:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopping = threading.Event()
        self._have_worked = threading.Barrier(WORKERS + 1)
        self._committed = [0] * WORKERS
        self._errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        self._have_worked.wait()
        print("ready", flush=True)
        sys.stdin.read()
        self._stopping.set()
        for thread in threads:
            thread.join()
        print(json.dumps({"committed": self._committed, "errors": self._errors}), flush=True)

    def _work(self, worker: int) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            try:
                with self._engine.begin() as connection:
                    connection.execute(UPDATE, {"worker": worker})
                    connection.execute(SELECT, {"worker": worker}).one()
            except SQLAlchemyError as error:
                with self._lock:
                    self._errors[str(error).splitlines()[0]] += 1
            else:
                self._committed[worker] += 1
                if self._committed[worker] == 1:
                    self._have_worked.wait()


def main() -> None:
    settings = RECOMMENDED if os.environ["POOL_SETTINGS"] == "recommended" else {}
    url = f"mysql+pymysql://root@{os.environ['POOL_ADDRESS']}/{os.environ['POOL_DATABASE']}"
    PoolLoad(create_engine(url, pool_size=WORKERS, max_overflow=0, **settings)).run()


if __name__ == "__main__":
    main()
