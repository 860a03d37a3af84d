"""Order of measurements, core pinning and contender settings; starts no proxy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.load_client import SliceResult
from bench.machine import CpuUsage
from bench.proxies import haproxy
from bench.proxies.backends import DatabaseBackend
from bench.proxies.comparison import compare_measurement
from bench.proxies.contenders import (
    InvalidPeer,
    ProxySite,
    contender_from_command,
    control_plane_settings,
    fill_placeholders,
)
from bench.proxies.interleaving import Block, Measurement, measuring_order
from bench.proxies.latency_and_memory import client_counts
from bench.proxies.setup import CpuPinning
from bench.proxies.steady_load import compare_seconds
from bench.proxies.workloads import WORKLOADS, Encryption, select_workloads
from bench.revisions import RevisionNotBuildable, build_revision
from controlplane.config.settings import Settings
from sandbox.ports import Ports
from sandbox.session_certificate import SessionCertificate

QUIET = CpuUsage(total=100.0, busy=90.0, own=85.0)


def site(directory: Path, encryption: Encryption = Encryption.NONE, pd: str = "") -> ProxySite:
    backend = DatabaseBackend("mariadb", "MariaDB 10", 3306, directory / "ca.pem", pd)
    certificate = SessionCertificate(directory / "server.crt", directory / "server.key")
    return ProxySite(directory, Ports(), backend, certificate, encryption)


def test_measuring_order_is_balanced() -> None:
    names = ["A", "B", "C"]
    assert list(measuring_order(names, 0))[:6] == ["A", "B", "C", "C", "B", "A"]
    assert list(measuring_order(names, 1))[:6] == ["B", "C", "A", "A", "C", "B"]
    for block in range(4):
        turns = list(measuring_order(names, block))
        assert set(Counter(turns).values()) == {6}
        rounds = [turns[at : at + 3] for at in range(0, len(turns), 3)]
        assert sum(order.index("A") < order.index("B") for order in rounds) == 3


def test_short_form_is_a_subset_of_the_whole_form() -> None:
    short, whole = select_workloads([], whole=False), select_workloads([], whole=True)
    assert len(short) == 8
    assert set(short) < set(whole) == set(WORKLOADS)
    assert [workload.name for workload in select_workloads(["1,000 ROWS"], whole=False)] == [
        "1,000 rows, 300/s",
        "TLS to clients, 1,000 rows, 300/s",
    ]


def test_compares_figures_block_by_block() -> None:
    def blocks(factor: float) -> list[Block]:
        latencies = [0.1 * factor * (1 + number / 100) for number in range(100)]
        return [
            Block(0.002 * factor * noise, [latency * noise for latency in latencies])
            for noise in (1.0, 2.0, 0.5, 1.5)
        ]

    measured = Measurement({"HAProxy": blocks(1.0), "Tidevoy": blocks(0.9)}, QUIET)
    comparisons = {
        comparison.figure: comparison for comparison in compare_measurement(WORKLOADS[0], measured, "HAProxy")
    }
    assert set(comparisons) == {"cpu", "mean", "p95"}
    for comparison in comparisons.values():
        assert comparison.ratio.value == pytest.approx(0.9)
        assert comparison.describe_verdict() == "better"
    assert comparisons["cpu"].reference_value == pytest.approx(25.0)  # µs: 2 ms * 1.25 (median noise) / 100
    assert comparisons["p95"].value == pytest.approx(0.9 * 0.1 * 1.25 * 1.9495, rel=0.01)


def test_seconds_are_compared_with_the_mean_of_the_reference() -> None:
    def slices(*lengths: float) -> list[SliceResult]:
        return [SliceResult(seconds, [1.0] * 99 + [5.0 * seconds], []) for seconds in lengths]

    results = {"no capture": slices(1.0, 100 / 98, 100 / 102), "capture": slices(1.0, 100 / 97, 100 / 97)}
    reference, capture = compare_seconds(WORKLOADS[0], results, cpu=0.7)
    assert (capture.p99, capture.slowest) == pytest.approx((5.0, 5 * 100 / 97), abs=0.2)
    assert (reference.change, reference.worst_change) == pytest.approx((0.0, -0.02))
    assert (capture.change, capture.worst_change) == pytest.approx((-0.02, -0.03))


def test_busy_machine_makes_verdicts_unclear() -> None:
    block = [Block(0.001, [1.0, 2.0])] * 4
    measured = Measurement({"A": block, "B": block}, CpuUsage(total=100.0, busy=90.0, own=70.0))
    for comparison in compare_measurement(WORKLOADS[0], measured, "A"):
        assert comparison.verdict == "unclear"
        assert comparison.describe_verdict() == "unclear: other programs used 20% of the machine"


def test_new_connection_figure_needs_new_connections() -> None:
    block = [Block(0.001, [1.0, 2.0], [3.0])] * 4
    assert Measurement({"A": block, "B": block}, QUIET).figure_names() == [
        "cpu",
        "mean",
        "p95",
        "new_connection",
    ]


@pytest.mark.parametrize(
    ("files", "counts"),
    [(200_000, [1, 16, 64, 1_000, 10_000]), (20_000, [1, 16, 64, 1_000, 9_000]), (3_024, [1, 16, 64, 512])],
)
def test_client_counts_fit_the_file_limit(files: int, counts: list[int]) -> None:
    assert client_counts(files) == counts


def test_pinning_needs_four_cores() -> None:
    all_cores = frozenset({0, 1})
    assert CpuPinning.of(all_cores) == CpuPinning(all_cores, all_cores, all_cores)
    assert CpuPinning.of({4, 5, 6, 7, 9}) == CpuPinning(frozenset({9}), frozenset({7}), frozenset({4, 5, 6}))


def test_replaces_placeholders_in_a_command(tmp_path: Path) -> None:
    arguments = ["--at={listen}", "{server}", "{pd}", "{directory}", "{other}"]
    assert fill_placeholders(arguments, 7, site(tmp_path, pd="127.0.0.1:2379")) == [
        "--at=127.0.0.1:7",
        "127.0.0.1:3306",
        "127.0.0.1:2379",
        str(tmp_path),
        "{other}",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/bin/true {listen} {server}", "write NAME=COMMAND"),
        ("x=/bin/true {listen}", "write NAME=COMMAND"),
        ("x=/bin/true '{listen} {server}", "cannot read the command of peer x"),
        ("x=no-such-proxy {listen} {server}", "no program no-such-proxy for peer x"),
    ],
)
def test_rejects_invalid_peers(text: str, complaint: str) -> None:
    with pytest.raises(InvalidPeer, match=complaint):
        contender_from_command(text)


@pytest.mark.parametrize("encryption", list(Encryption))
def test_settings_enable_tls_of_the_workload(tmp_path: Path, encryption: Encryption) -> None:
    place = site(tmp_path, encryption)
    with place.ports:
        parsed = Settings.model_validate(control_plane_settings(place, 6000))
    assert (parsed.tls.client.mode == "required") == (encryption is not Encryption.NONE)
    assert (parsed.tls.backend.mode == "required") == (encryption is Encryption.BOTH)


def test_haproxy_configuration_follows_the_guide() -> None:
    plain = haproxy.render_configuration(listen=1, server=2, log=3)
    assert "bind 127.0.0.1:1\n" in plain
    assert "server tidb-1 127.0.0.1:2 check inter 2000 rise 2 fall 3\n" in plain
    tls = haproxy.render_configuration(
        listen=1, server=2, log=3, certificate=Path("/c"), server_ca=Path("/ca")
    )
    assert "bind 127.0.0.1:1 ssl crt /c\n" in tls
    assert "fall 3 ssl verify required ca-file /ca\n" in tls


@pytest.mark.parametrize("name", ["no-such-revision", "--output=x", "a b"])
async def test_rejects_an_unknown_revision(name: str, tmp_path: Path) -> None:
    with pytest.raises(RevisionNotBuildable, match=f"cannot build the module of revision {name}: "):
        await build_revision(name, tmp_path)
