"""Real servers as fixtures. Each is stopped with its test; a leftover process fails the run."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pymysql
import pytest
import pytest_asyncio
from hypothesis import settings

from sandbox.envoy import EnvoyProcess
from sandbox.etcd import Etcd
from sandbox.local_cluster import LocalCluster
from sandbox.mariadb import MariaDb
from sandbox.ports import Ports
from sandbox.session_certificate import SessionCertificate
from tests.support import slow_marker
from tests.support.migration.fault_cases import FailureCase, format_results
from tests.support.prebuild import PREBUILD_MARK, Prebuild, sort_prebuild_tests_last, start_prebuilds

# Hypothesis deadlines use the wall clock: under load any test may miss them.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

MIGRATION_FAILURE_PROPERTY = "injected migration failure"
StartEnvoy = Callable[[str], Awaitable[EnvoyProcess]]


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Free ports for one test: `ports.allocate()`."""
    with Ports() as allocator:
        yield allocator


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[Etcd]:
    """An empty etcd."""
    async with Etcd.start(tmp_path / "etcd") as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mariadb(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MariaDb]:
    """The one MariaDB of the whole run; a test that writes also uses `database`."""
    async with MariaDb.start(tmp_path_factory.mktemp("mariadb")) as server:
        yield server


@pytest.fixture
def database(mariadb: MariaDb) -> Iterator[str]:
    """The name of an empty database on `mariadb` for one test."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as connection:
        connection.query(f"create database {name}")
        yield name
        connection.query(f"drop database if exists {name}")


@pytest.fixture
async def envoy_process(tmp_path: Path) -> AsyncIterator[StartEnvoy]:
    """Starts any number of Envoys from bootstrap text: `envoy = await envoy_process(text)`."""
    async with AsyncExitStack() as exit_stack:
        count = 0

        async def start(bootstrap: str) -> EnvoyProcess:
            nonlocal count
            count += 1
            return await exit_stack.enter_async_context(
                EnvoyProcess(bootstrap, tmp_path / "envoy", name=f"envoy-{count}")
            )

        yield start


@pytest.fixture
async def stack(tmp_path: Path, mariadb: MariaDb) -> AsyncIterator[LocalCluster]:
    """A whole cluster of three nodes; a client's protocol violation at any of them fails the test."""
    async with LocalCluster.start(tmp_path / "stack", mariadb=mariadb) as cluster:
        yield cluster
        assert cluster.violations() == []


@pytest.fixture(scope="module")
def signing(tmp_path_factory: pytest.TempPathFactory) -> SessionCertificate:
    """The certificate for session tokens, which all nodes share."""
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


@pytest.fixture(scope="session", autouse=True)
def prebuilds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _check_no_child_left: None
) -> Iterator[Mapping[str, Prebuild]]:
    """Artifacts built during other tests, by building module: see tests/support/prebuild.py."""
    with start_prebuilds(request.session.items, tmp_path_factory.mktemp("prebuilds")) as started:
        yield started


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{PREBUILD_MARK}(name): needs what `python -m NAME` builds during other tests"
    )
    config.addinivalue_line(
        "markers", f"{slow_marker.SLOW_MARK}: mostly waits, and runs in parallel to others"
    )


@pytest.hookimpl(tryfirst=True)  # Before `-m` selects.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow_marker.mark_slow_tests(items)
    sort_prebuild_tests_last(items)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Attach the injected failure to each test of a failing migration."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    if isinstance(case, FailureCase):
        item.user_properties.append((MIGRATION_FAILURE_PROPERTY, (case.fault, case.step)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Summarize the tests of failing migrations."""
    passed: dict[tuple[str, str], bool] = {}
    has_final_failure = False
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name == MIGRATION_FAILURE_PROPERTY and report.when == "teardown":
                    has_final_failure = True  # The teardown of a module's last test checks the whole module.
                elif name == MIGRATION_FAILURE_PROPERTY:
                    passed[value] = passed.get(value, True) and outcome == "passed"
    if passed:
        terminalreporter.section("failures during a migration")
        for line in format_results(passed):
            terminalreporter.line(line)
    if has_final_failure:
        terminalreporter.line("FAILED: wrong counters, or leftovers; the errors name them")
