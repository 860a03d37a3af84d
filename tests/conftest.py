"""Fixtures that run real servers and stop them. A leftover process fails the test run."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pymysql
import pytest
import pytest_asyncio
from hypothesis import settings

from bench.sysbench import DATABASE, make_table
from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.session_certificate import SessionCertificate
from tests.support.migration.fault_cases import FailureCase, format_results

# Hypothesis measures its deadlines by wall-clock time, so on a busy machine any test may exceed them.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# A background job of a shell ignores SIGINT. Its child processes would too, but tests interrupt them.
signal.signal(signal.SIGINT, signal.default_int_handler)

MIGRATION_FAILURE_PROPERTY = "injected migration failure"
StartEnvoy = Callable[[str], Awaitable[EnvoyProcess]]


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Yield an allocator of free ports for one test."""
    with Ports() as allocator:
        yield allocator


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Etcd]:
    """Run an empty etcd."""
    async with Etcd.start(tmp_path / "etcd") as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mariadb(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MariaDb]:
    """Run the MariaDB that all tests share. A test that writes also uses the fixture `database`."""
    async with MariaDb.start(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


@pytest.fixture
def database(mariadb: MariaDb) -> Iterator[str]:
    """Create a database on `mariadb` for one test. Yield its name."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    # Without TLS, pymysql does not load the system's CAs.
    with pymysql.connect(
        host="127.0.0.1", port=mariadb.port, user="root", autocommit=True, ssl_disabled=True
    ) as connection:
        connection.query(f"create database {name}")
        yield name
        connection.query(f"drop database if exists {name}")


@pytest.fixture
async def sysbench_rows(tmp_path: Path, mariadb: MariaDb) -> AsyncIterator[int]:
    """Create sysbench's table on `mariadb` for one test. Yield its number of rows."""
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        try:
            await make_table(mariadb.port, tmp_path / "sysbench-table", rows=1_000)
            yield 1_000
        finally:
            connection.query(f"drop database if exists {DATABASE}")


@pytest.fixture
async def envoy_process(tmp_path: Path) -> AsyncIterator[StartEnvoy]:
    """Yield a function that starts an Envoy: `envoy = await envoy_process(bootstrap_text)`."""
    async with AsyncExitStack() as exit_stack:
        count = 0

        async def start(bootstrap: str) -> EnvoyProcess:
            nonlocal count
            count += 1
            return await exit_stack.enter_async_context(
                EnvoyProcess(bootstrap, tmp_path / "envoy", name=f"envoy-{count}")
            )

        yield start


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> SessionCertificate:
    """Create the certificate with which all nodes sign session tokens."""
    return SessionCertificate.load_or_create(tmp_path_factory.mktemp("signing"))


@pytest.fixture(scope="session", autouse=True)
def _check_no_child_left() -> Iterator[None]:
    yield
    leftovers = [
        child for child in psutil.Process(os.getpid()).children(recursive=True) if child.is_running()
    ]
    descriptions = [f"{child.pid} {' '.join(child.cmdline())}" for child in leftovers]
    for child in leftovers:
        child.kill()
    assert not descriptions, f"the tests left processes running: {descriptions}"


def pytest_collection_finish() -> None:
    """Exclude all current objects from garbage collection, which would take a fifth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Attach fault and migration step to the report of each test that has a `FailureCase`."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    if isinstance(case, FailureCase):
        item.user_properties.append((MIGRATION_FAILURE_PROPERTY, (case.fault, case.step)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of the injected migration failures, with the results of their tests."""
    passed: dict[tuple[str, str], bool] = {}
    has_final_failure = False
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name == MIGRATION_FAILURE_PROPERTY and report.when == "teardown":
                    has_final_failure = True  # The teardown of a module's last test checks the whole module.
                elif name == MIGRATION_FAILURE_PROPERTY:
                    case = (value[0], value[1])  # pytest-xdist may send the tuple as a list.
                    passed[case] = passed.get(case, True) and outcome == "passed"
    if passed:
        terminalreporter.section("failures during a migration")
        for line in format_results(passed):
            terminalreporter.line(line)
    if has_final_failure:
        terminalreporter.line("FAILED: wrong counters, or leftovers; the errors name them")
