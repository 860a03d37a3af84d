"""The private CA: names, what is renewed and when, and files that survive a full disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from cli.certificate_authority import names
from cli.certificate_authority.directory import CertificateDirectory, Leaf
from cli.certificate_authority.issuing import is_issued_by, make_authority, new_key
from cli.certificate_authority.operations import FileResult, Initialization, Renewal, Validity
from cli.certificate_authority.renewal import Rollover, due_leaves, next_rollover
from cli.errors import CliError, UsageError
from controlplane.xds.client_identity import read_certificate_names

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
DAY = timedelta(days=1)
MONTH = 30 * DAY
VALIDITY = Validity(365 * DAY, 3650 * DAY)
CA_END = NOW + VALIDITY.authority
FILES = {
    *("ca.pem", "ca.key", "control-plane.pem", "control-plane.key"),
    *("envoy-e1.pem", "envoy-e1.key", "envoy-zone%20a%2F1.pem", "envoy-zone%20a%2F1.key"),
}


def initialize(
    directory: Path, *envoys: str, hosts: tuple[str, ...] = ("cp-0.test", "10.0.0.5"), now: datetime = NOW
) -> list[FileResult]:
    files = CertificateDirectory(directory)
    with files.locked(create=True):
        return list(Initialization(files, now, VALIDITY).run(hosts, envoys))


def renew(
    directory: Path,
    now: datetime,
    *,
    within: timedelta = MONTH,
    renew_all: bool = False,
    use_new_ca: bool = False,
) -> tuple[Rollover, list[str]]:
    """Return what was done about the CA, and the files that were changed."""
    renewal = Renewal(CertificateDirectory(directory), now, VALIDITY)
    results = list(renewal.run(within, renew_all=renew_all, use_new_ca=use_new_ca))
    return renewal.rollover, [f"{result.action} {result.file}" for result in results]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def leaves(directory: Path) -> dict[str, Leaf]:
    files = CertificateDirectory(directory)
    return {leaf.stem: leaf for leaf in files.read_leaves(files.read_authorities())}


def usages(leaf: Leaf) -> set[x509.ObjectIdentifier]:
    return set(leaf.certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


# --- names ---


def ids_that_control_plane_reads(name: x509.GeneralName) -> tuple[str, ...]:
    value = str(name.value).encode()
    kind = "peer_dns" if isinstance(name, x509.DNSName) else "peer_uri"
    return read_certificate_names({"x509_subject_alternative_name": [value], kind: [value]})


@pytest.mark.parametrize(
    ("envoy", "name", "stem"),
    [
        ("e1", x509.DNSName("e1"), "envoy-e1"),
        ("Edge_1.zone-a", x509.DNSName("Edge_1.zone-a"), "envoy-Edge_1.zone-a"),
        (
            "zone a/1",
            x509.UniformResourceIdentifier("tidevoy://envoys/zone%20a%2F1"),
            "envoy-zone%20a%2F1",
        ),
        ("10.0.0.5", x509.UniformResourceIdentifier("tidevoy://envoys/10.0.0.5"), "envoy-10.0.0.5"),
        ("*.test", x509.UniformResourceIdentifier("tidevoy://envoys/%2A.test"), "envoy-%2A.test"),
        ("../x", x509.UniformResourceIdentifier("tidevoy://envoys/..%2Fx"), "envoy-..%2Fx"),
    ],
)
def test_name_and_file_of_an_envoy(envoy: str, name: x509.GeneralName, stem: str) -> None:
    assert (names.envoy_name(envoy), names.envoy_stem(envoy)) == (name, stem)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=15))
def test_control_plane_reads_every_id_from_its_certificate(envoy: str) -> None:
    if not envoy.isprintable():
        return
    stem = names.envoy_stem(envoy)
    assert ids_that_control_plane_reads(names.envoy_name(envoy)) == (envoy,)
    assert names.envoy_id(stem) == envoy
    assert "/" not in stem


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: names.envoy_stem(""), "is not an id"),
        (lambda: names.envoy_stem("a\nb"), "is not an id"),
        (lambda: names.envoy_stem("\udc80"), "is not an id"),
        (lambda: names.envoy_stem("ä" * 50), "too long"),
        *(
            (lambda host=host: names.control_plane_names([host]), "is neither a DNS name nor an IP address")
            for host in ("", "cp-0:18000", "[::1]", "*.test", "10.0.0.256", "a b", "cp.", "a..b", "x" * 64)
        ),
        (lambda: names.control_plane_names(["0.0.0.0"]), "no Envoy can connect"),
        (lambda: names.control_plane_names(["fe80::1%eth0"]), "no Envoy can connect"),
        (lambda: names.check_ids_are_no_control_planes(["CP-0"], ["cp-0"]), "another id"),
    ],
)
def test_rejects_unusable_names(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make()


# --- decisions ---


@pytest.mark.parametrize(
    ("days_before_end", "has_new_ca", "use_new_ca", "expected"),
    [
        (31, False, False, Rollover.NONE),
        (30, False, False, Rollover.MAKE_NEW_CA),
        (30, True, False, Rollover.WAIT),
        (30, True, True, Rollover.USE_NEW_CA),
        (31, True, False, Rollover.WAIT),
        (0, False, False, Rollover.USE_NEW_CA),
        (0, True, False, Rollover.USE_NEW_CA),
    ],
)
def test_next_step_of_the_ca(
    days_before_end: int, has_new_ca: bool, use_new_ca: bool, expected: Rollover
) -> None:
    now = CA_END - days_before_end * DAY
    assert next_rollover(CA_END, now, MONTH, has_new_ca=has_new_ca, use_new_ca=use_new_ca) is expected


def test_a_new_ca_must_exist_before_it_is_used() -> None:
    with pytest.raises(UsageError, match="there is no new CA"):
        next_rollover(CA_END, NOW, MONTH, has_new_ca=False, use_new_ca=True)


def test_due_are_certificates_that_expire_soon_and_would_get_a_later_expiry(tmp_path: Path) -> None:
    initialize(tmp_path, "e1")
    initialize(tmp_path, "e2", now=NOW + 10 * DAY)
    found = list(leaves(tmp_path).values())

    def due(now: datetime, new_expiry: datetime, *, renew_all: bool = False) -> list[str]:
        return [leaf.stem for leaf in due_leaves(found, now, MONTH, new_expiry, renew_all=renew_all)]

    end = NOW + 365 * DAY
    assert due(end - MONTH, end + MONTH) == []
    assert due(end - MONTH + DAY, end + MONTH) == ["control-plane", "envoy-e1"]
    assert due(end - MONTH + 11 * DAY, end + MONTH) == ["control-plane", "envoy-e1", "envoy-e2"]
    assert due(end - MONTH + 11 * DAY, end) == []
    assert due(NOW, end, renew_all=True) == ["control-plane", "envoy-e1", "envoy-e2"]


# --- init ---


def test_init_creates_a_ca_and_a_certificate_for_each_name(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "certificates"
    results = initialize(directory, "e1", "zone a/1", "e1")
    assert {result.file for result in results} == FILES == contents(directory).keys()
    assert {result.action for result in results} == {"created"}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {file.suffix: stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}
    assert modes == {".key": 0o600, ".pem": 0o644}

    (ca,) = CertificateDirectory(directory).read_authorities()
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    found = leaves(directory)
    assert not any(leaf.is_foreign or leaf.is_mismatched for leaf in found.values())
    assert names.format_names(names.names_of(found["control-plane"].certificate)) == ["cp-0.test", "10.0.0.5"]
    assert usages(found["control-plane"]) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert usages(found["envoy-e1"]) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert {leaf.certificate.not_valid_after_utc for leaf in found.values()} == {NOW + VALIDITY.leaf}


def test_init_adds_what_is_missing_and_keeps_the_rest(tmp_path: Path) -> None:
    initialize(tmp_path, "e1")
    before = contents(tmp_path)
    results = initialize(tmp_path, "e1", "e2", hosts=())
    assert [f"{result.action} {result.file}" for result in results] == [
        *("kept ca.key", "kept ca.pem", "kept control-plane.key", "kept control-plane.pem"),
        *("kept envoy-e1.key", "kept envoy-e1.pem", "created envoy-e2.key", "created envoy-e2.pem"),
    ]
    after = contents(tmp_path)
    assert {file: after[file] for file in before} == before
    assert after.keys() - before.keys() == {"envoy-e2.key", "envoy-e2.pem"}


def test_init_completes_a_key_without_certificate(tmp_path: Path) -> None:
    initialize(tmp_path, "e1")
    keys = {name: content for name, content in contents(tmp_path).items() if name.endswith(".key")}
    for file in tmp_path.glob("*.pem"):
        file.unlink()
    initialize(tmp_path, "e1")
    assert {name: content for name, content in contents(tmp_path).items() if name in keys} == keys
    assert not any(leaf.is_foreign or leaf.is_mismatched for leaf in leaves(tmp_path).values())


def remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


def overwrite(file: str, source: str | bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        content = source if isinstance(source, bytes) else (directory / source).read_bytes()
        (directory / file).write_bytes(content)

    return change


def make_another_ca(directory: Path) -> None:
    initialize(directory / "other")
    for file in ("ca.pem", "ca.key"):
        (directory / "other" / file).replace(directory / file)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (remove("ca.key"), "ca.key is missing; restore it"),
        (overwrite("ca.key", "control-plane.key"), "ca.key is not the key of a CA in ca.pem"),
        (overwrite("ca.key", b"x"), "ca.key is not a private key in PEM format"),
        (overwrite("ca.pem", b"x"), "ca.pem is not a certificate in PEM format"),
        (overwrite("envoy-e1.pem", b""), "envoy-e1.pem is not a certificate in PEM format"),
        (make_another_ca, "control-plane.pem was not issued by a CA in ca.pem"),
    ],
)
def test_damaged_files_are_named_and_nothing_is_changed(
    tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    initialize(tmp_path, "e1")
    damage(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.*")}
    with pytest.raises(CliError, match=problem):
        initialize(tmp_path, "e1", "e2")
    with pytest.raises(CliError, match=problem):
        renew(tmp_path, NOW, renew_all=True)
    assert {file: file.read_bytes() for file in tmp_path.glob("*.*")} == before


@pytest.mark.parametrize(
    ("hosts", "envoys", "problem"),
    [
        (("cp-1.test",), (), r"control-plane.pem exists and does not contain cp-1.test; to replace it"),
        ((), ("CP-0.test",), "give the Envoy another id"),
        ((), ("10.0.0.5",), "give the Envoy another id"),
    ],
)
def test_init_rejects_names_that_conflict_with_existing_files(
    tmp_path: Path, hosts: tuple[str, ...], envoys: tuple[str, ...], problem: str
) -> None:
    initialize(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=problem):
        initialize(tmp_path, *envoys, hosts=hosts)
    assert contents(tmp_path) == before


# --- renew ---


def test_renew_replaces_key_and_certificate_and_keeps_the_names(tmp_path: Path) -> None:
    initialize(tmp_path, "zone a/1")
    before = leaves(tmp_path)
    old_files = contents(tmp_path)
    (tmp_path / "control-plane.key").chmod(0o640)
    now = NOW + 340 * DAY
    assert renew(tmp_path, NOW + 330 * DAY) == (Rollover.NONE, [])
    assert contents(tmp_path) == old_files
    assert renew(tmp_path, now) == (
        Rollover.NONE,
        [
            *("renewed control-plane.key", "renewed control-plane.pem"),
            *("renewed envoy-zone%20a%2F1.key", "renewed envoy-zone%20a%2F1.pem"),
        ],
    )
    after, new_files = leaves(tmp_path), contents(tmp_path)
    for stem, leaf in after.items():
        assert not leaf.is_foreign
        assert not leaf.is_mismatched
        assert names.names_of(leaf.certificate) == names.names_of(before[stem].certificate)
        assert usages(leaf) == usages(before[stem])
        assert leaf.certificate.not_valid_after_utc == now + VALIDITY.leaf
        assert new_files[f"{stem}.key"] != old_files[f"{stem}.key"]
    assert new_files["ca.pem"] == old_files["ca.pem"]
    assert stat.S_IMODE((tmp_path / "control-plane.key").stat().st_mode) == 0o640
    assert renew(tmp_path, now) == (Rollover.NONE, [])


def test_renew_repairs_a_key_that_does_not_match(tmp_path: Path) -> None:
    initialize(tmp_path, "e1", "e2")
    overwrite("envoy-e1.key", "envoy-e2.key")(tmp_path)
    assert renew(tmp_path, NOW) == (Rollover.NONE, ["renewed envoy-e1.key", "renewed envoy-e1.pem"])
    assert not leaves(tmp_path)["envoy-e1"].is_mismatched


def test_change_to_a_new_ca(tmp_path: Path) -> None:
    initialize(tmp_path, "e1")
    files = CertificateDirectory(tmp_path)
    (old,) = files.read_authorities()
    now = CA_END - 20 * DAY
    rollover, changes = renew(tmp_path, now)
    assert rollover is Rollover.MAKE_NEW_CA
    assert changes[:3] == ["created ca-new.key", "added ca.pem", "renewed control-plane.key"]
    bundle = files.read_authorities()
    assert bundle[0] == old
    new = bundle[1]
    assert new.subject != old.subject
    # Until all machines have the new CA, certificates are issued by the old one, and do not outlive it.
    assert all(is_issued_by(leaf.certificate, old) for leaf in leaves(tmp_path).values())
    assert {leaf.certificate.not_valid_after_utc for leaf in leaves(tmp_path).values()} == {CA_END}
    assert renew(tmp_path, now) == (Rollover.WAIT, [])
    added = initialize(tmp_path, "e2", now=now)[-1].certificate
    assert added is not None
    assert is_issued_by(added, old)

    rollover, changes = renew(tmp_path, now, use_new_ca=True)
    assert rollover is Rollover.USE_NEW_CA
    assert len(changes) == 7
    assert changes[-1] == "replaced ca.key"
    assert files.read_authorities() == [old, new]
    assert all(is_issued_by(leaf.certificate, new) for leaf in leaves(tmp_path).values())
    assert not (tmp_path / "ca-new.key").exists()

    assert renew(tmp_path, now) == (Rollover.NONE, [])
    assert renew(tmp_path, CA_END) == (Rollover.NONE, ["removed ca.pem"])
    assert files.read_authorities() == [new]


def test_an_expired_ca_is_replaced_at_once(tmp_path: Path) -> None:
    initialize(tmp_path, "e1")
    (old,) = CertificateDirectory(tmp_path).read_authorities()
    with pytest.raises(CliError, match="has expired; `tidevoy certificates renew` makes a new one"):
        initialize(tmp_path, "e2", now=CA_END)
    rollover, changes = renew(tmp_path, CA_END)
    assert rollover is Rollover.USE_NEW_CA
    assert changes[-2:] == ["replaced ca.key", "removed ca.pem"]
    (new,) = CertificateDirectory(tmp_path).read_authorities()
    assert new != old
    assert not any(leaf.is_foreign for leaf in leaves(tmp_path).values())
    assert renew(tmp_path, CA_END) == (Rollover.NONE, [])


# --- files ---


@pytest.mark.parametrize("operation", ["init", "add", "renew", "make new CA", "use new CA"])
def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """The disk is full at the first write, at the second, and so on, until the operation succeeds."""
    fsync = os.fsync
    in_rollover = CA_END - 20 * DAY

    def run(directory: Path) -> None:
        if operation in ("init", "add"):
            initialize(directory, "e1", "zone a/1")
        else:
            now = NOW if operation == "renew" else in_rollover
            renew(directory, now, renew_all=operation == "renew", use_new_ca=operation == "use new CA")

    for fails_at in count(1):
        directory = tmp_path / str(fails_at)
        if operation != "init":
            initialize(directory, *([] if operation == "add" else ["e1", "zone a/1"]))
        if operation == "use new CA":
            renew(directory, in_rollover)
        calls = count(1)

        def full(descriptor: int, calls: count[int] = calls, fails_at: int = fails_at) -> None:
            # A full disk fails the write of a file, not that of its name in the directory.
            if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(calls) == fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        problem = ""
        try:
            run(directory)
        except CliError as error:
            problem = str(error)
        monkeypatch.setattr(os, "fsync", fsync)
        if not problem:
            assert fails_at > 4
            return
        assert "cannot be written: No space left on device" in problem
        assert not list(directory.glob(".*"))
        assert not any(leaf.is_foreign or leaf.is_mismatched for leaf in leaves(directory).values())
        run(directory)
        assert contents(directory).keys() >= FILES
        assert not any(leaf.is_foreign or leaf.is_mismatched for leaf in leaves(directory).values())


def test_only_one_command_changes_a_directory_at_a_time(tmp_path: Path) -> None:
    initialize(tmp_path)
    with CertificateDirectory(tmp_path).locked(), pytest.raises(CliError, match="another `tidevoy"):
        initialize(tmp_path, "e1")
    initialize(tmp_path, "e1")


def test_a_temporary_file_of_a_killed_command_is_no_obstacle(tmp_path: Path) -> None:
    temporary = tmp_path / ".ca.key.new"
    temporary.write_text("half")
    temporary.chmod(0o666)
    initialize(tmp_path)
    assert not temporary.exists()
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600


def test_each_ca_has_its_own_name() -> None:
    first, second = (make_authority(new_key(), NOW, DAY).certificate for _ in range(2))
    assert first.subject != second.subject
