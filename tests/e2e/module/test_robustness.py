"""The module under attack: garbage, a storm of logins that come to nothing, certificates that never stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pymysql
import pytest

from sandbox.mariadb import MariaDb
from tests.support.load.always_ok_node import run_fast_login_node
from tests.support.load.certificate_rotation import CertificateRotation
from tests.support.load.hostile import run_hostile_clients
from tests.support.load.login_storm import LoginStage, login_storm
from tests.support.load.malformed import UNPRIVILEGED_USER, ConversationGenerator
from tests.support.load.resource_usage import MIB, EnvoyUsage, measure_usage, wait_for_usage
from tests.support.load.well_behaved import run_well_behaved_clients
from tests.support.module.bootstrap import ModuleConfig
from tests.support.module.envoy import ModuleEnvoy, run_envoy

pytestmark = pytest.mark.timeout(300)

WORKERS = 2
# Two Envoys, with and without TLS; each gets so many conversations, after others to warm up.
WARM_UP = 1000
CONVERSATIONS = 5000
LOGIN_TIMEOUT = 5  # seconds
# Envoy's allocator is the module's too, so `allocated` sees every byte that either of them forgot. Two looks
# at a quiet Envoy differ by less than 300 KiB: caches of threads, stats that were used for the first time,
# buffers of the sessions that go on. A leak of 200 bytes a conversation would be 1 MiB. What is resident also
# has what the allocator keeps for later, which depends on how much was in flight at once: it shows the gross.
ALLOCATED_TOLERANCE = 1 * MIB
RESIDENT_TOLERANCE = 24 * MIB

LOGINS = 30_000
LOGIN_RATE = 1000.0

ROTATIONS = 100


Say = Callable[[str], None]


def growth(before: EnvoyUsage, after: EnvoyUsage, count: int) -> str:
    """By how much the memory grew, also for each of `count` conversations."""
    allocated, resident = (
        after.allocated_bytes - before.allocated_bytes,
        after.resident_bytes - before.resident_bytes,
    )
    return (
        f"memory: allocated {allocated / 1024:+.0f} KiB ({allocated / count:+.1f} B a conversation), resident"
        f" {resident / MIB:+.1f} MiB (tolerated: {ALLOCATED_TOLERANCE / 1024:.0f} KiB,"
        f" {RESIDENT_TOLERANCE / MIB:.0f} MiB)"
    )


def assert_flat(before: EnvoyUsage, after: EnvoyUsage) -> None:
    """The memory is back to where it was."""
    assert after.allocated_bytes - before.allocated_bytes <= ALLOCATED_TOLERANCE, (before, after)
    assert after.resident_bytes - before.resident_bytes <= RESIDENT_TOLERANCE, (before, after)


def serving(
    directory: Path, nodes: list[str], parts: ModuleConfig
) -> AbstractAsyncContextManager[ModuleEnvoy]:
    """An Envoy of some workers. That it still runs at the end, and no hook has panicked, is checked there."""
    return run_envoy(directory / "envoy", nodes, parts, workers=WORKERS)


async def counted(envoy: ModuleEnvoy) -> tuple[int, int]:
    """Logins that succeeded and that did not, as the module counted them."""
    stats = await envoy.stats(r"^tidevoy\.login")
    logins = sum(value for name, value in stats.items() if name.startswith("tidevoy.logins."))
    return logins, sum(stats.values()) - logins


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Print a line although all goes well."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", flush=True)

    return line


@pytest.fixture
def harmless_user(mariadb: MariaDb, database: str) -> Iterator[None]:
    """The account that misbehaves: mutated commands must not end the server or sessions of others."""
    name = UNPRIVILEGED_USER
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", autocommit=True) as root:
        root.query(f"create user {name}@'%'")
        root.query(f"grant all on {database}.* to {name}@'%'")
        yield
        root.query(f"drop user {name}@'%'")


@pytest.mark.parametrize("tls", ["disabled", "optional"])
@pytest.mark.usefixtures("harmless_user")
async def test_garbage_touches_nobody_else(tmp_path: Path, mariadb: MariaDb, tls: str, say: Say) -> None:
    certificates = CertificateRotation(tmp_path / "tls")
    offered = tls == "optional"
    ways = [None, certificates.client_context()] if offered else [None]
    settings = {"tls": tls, **(certificates.files if offered else {})}
    async with AsyncExitStack() as stack:
        parts = ModuleConfig(client=settings, live={"login_timeout": LOGIN_TIMEOUT})
        proxy = await stack.enter_async_context(serving(tmp_path, [f"127.0.0.1:{mariadb.port}"], parts))
        idle = await measure_usage(proxy)
        # Of the module's, for good, once a session of a worker has asked some statements.
        idle = replace(idle, descriptors=idle.descriptors + WORKERS)
        residents = await stack.enter_async_context(run_well_behaved_clients(proxy.port, 16, tls=ways))
        garbage = iter(ConversationGenerator(2026, tls=offered, login_timeout_seconds=LOGIN_TIMEOUT))
        # A conversation that hangs outlives the login timeout by far.
        patience = LOGIN_TIMEOUT + 60
        async with run_well_behaved_clients(proxy.port, 2, tls=ways, one_query=True):
            await run_hostile_clients(proxy.port, garbage, WARM_UP, patience)
        before, quiet = await wait_for_usage(
            proxy, lambda now: now.client_connections == now.node_connections == now.session_count == 16
        )
        assert quiet, before

        began = time.monotonic()
        async with run_well_behaved_clients(proxy.port, 2, tls=ways, one_query=True) as visitors:
            spoils = await run_hostile_clients(proxy.port, garbage, CONVERSATIONS, patience)
        seconds = time.monotonic() - began
        after, same = await wait_for_usage(proxy, lambda now: now.is_within(before))
        say(
            f"TLS {tls}: {spoils.count} conversations in {seconds:.0f} s beside"
            f" {residents.answers} checked answers and {visitors.answers} logins"
            f"\n    kinds: {dict(spoils.count_by_kind)}\n    ends: {dict(spoils.count_by_end)}"
            f"\n    before: {before}\n    after:  {after}\n    {growth(before, after, spoils.count)}"
        )
        assert spoils.hung == []
        assert residents.failures == visitors.failures == []
        assert same, f"before {before}, after {after}"
        assert_flat(before, after)
        residents.is_stopping = True
        gone, empty = await wait_for_usage(proxy, lambda now: now.is_within(idle))
        assert empty, f"at first {idle}, at last {gone}"


async def test_no_session_fails_while_certificates_are_rotated(
    tmp_path: Path, mariadb: MariaDb, say: Say
) -> None:
    certificates = CertificateRotation(tmp_path / "tls")
    trusting = certificates.client_context()
    async with AsyncExitStack() as stack:
        parts = ModuleConfig(client={"tls": "required", **certificates.files})
        proxy = await stack.enter_async_context(serving(tmp_path, [f"127.0.0.1:{mariadb.port}"], parts))
        old = await stack.enter_async_context(run_well_behaved_clients(proxy.port, 8, tls=[trusting]))
        short = await stack.enter_async_context(
            run_well_behaved_clients(proxy.port, 4, tls=[trusting], one_query=True)
        )
        began = time.monotonic()
        waits = []
        for _ in range(ROTATIONS):
            certificates.rotate()
            rotated = time.monotonic()
            await certificates.wait_until_served(proxy.port, trusting, 30.0)
            waits.append(time.monotonic() - rotated)
        seconds = time.monotonic() - began
        answered = old.answers
        old.is_stopping = short.is_stopping = True
    waits.sort()
    say(
        f"{ROTATIONS} rotations in {seconds:.0f} s, shown after {waits[len(waits) // 2]:.2f} s (median),"
        f" at most {waits[-1]:.2f} s; {answered} checked answers on 8 old sessions,"
        f" {short.answers} new sessions"
    )
    assert old.failures == short.failures == []
    assert short.answers >= ROTATIONS


async def test_a_storm_of_logins_leaves_nothing_behind(tmp_path: Path, say: Say) -> None:
    certificates = CertificateRotation(tmp_path / "tls")
    async with AsyncExitStack() as stack:
        # One whose greeting comes in two halves, so that clients leave between them.
        nodes = [
            await stack.enter_async_context(run_fast_login_node(halved)) for halved in (None, None, 0.01)
        ]
        parts = ModuleConfig(client={"tls": "optional", **certificates.files})
        proxy = await stack.enter_async_context(serving(tmp_path, [node.endpoint for node in nodes], parts))
        await login_storm(proxy.port, rate=LOGIN_RATE, count=WARM_UP, seed=0)
        idle, quiet = await wait_for_usage(
            proxy, lambda now: now.client_connections == now.node_connections == now.session_count == 0
        )
        assert quiet, idle
        storms, looks = [], [idle]
        for seed in (1, 2):
            storms.append(await login_storm(proxy.port, rate=LOGIN_RATE, count=LOGINS // 2, seed=seed))
            now, same = await wait_for_usage(proxy, lambda now: now.is_within(idle))
            looks.append(now)
            assert same, f"before {idle}, after {now}"
        logins, failures = await counted(proxy)
        rates = " and ".join(f"{storm.rate:.0f}/s for {storm.seconds:.0f} s" for storm in storms)
        say(
            f"{LOGINS} logins, {rates}, closed at {len(LoginStage)} stages by FIN and RST;"
            f" counted: {logins} that came in, {failures} that did not\n    "
            + "\n    ".join(
                f"{when}: {seen}" for when, seen in zip(("before", "half", "end"), looks, strict=True)
            )
            + f"\n    second half: {growth(looks[1], looks[2], LOGINS // 2)}"
        )
        for storm in storms:
            assert storm.failures == {}
            assert len(storm.completed) == 2 * len(LoginStage)
        assert [node.open_connections for node in nodes] == [0, 0, 0]
        assert logins + failures == WARM_UP + LOGINS
        assert 0 < logins <= sum(node.login_count for node in nodes)
        assert_flat(looks[1], looks[2])
