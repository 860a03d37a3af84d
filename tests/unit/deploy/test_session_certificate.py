"""deploy/session-certificate.sh creates a certificate and key for all TiDB servers, or keeps a valid pair."""

from __future__ import annotations

import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from sandbox.tidb_sim.session_token import issue_token, load_signer, verify_token

SCRIPT = Path(__file__).resolve().parents[3] / "deploy/session-certificate.sh"
NOW = 1_800_000_000 * 10**9  # nanoseconds


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def create_pair(directory: Path) -> tuple[bytes, bytes]:
    """Run the script, which must succeed; return certificate and key."""
    result = run(str(directory))
    assert (result.returncode, result.stderr) == (0, "")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["session.crt", "session.key"]
    return (directory / "session.crt").read_bytes(), (directory / "session.key").read_bytes()


def openssl(*arguments: str | int | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=True)


def create_other_pair(directory: Path, days: int = 1000) -> bytes:
    """Create a valid certificate and key without the script, which is slower; return the certificate."""
    pair = ("-keyout", directory / "session.key", "-out", directory / "session.crt")
    openssl("req", "-x509", "-newkey", "ed25519", "-nodes", "-days", days, "-subj", "/CN=tidb-session", *pair)
    return (directory / "session.crt").read_bytes()


def test_pair_signs_valid_token(tmp_path: Path) -> None:
    create_pair(tmp_path)
    signer = load_signer(tmp_path / "session.crt", tmp_path / "session.key")
    token = issue_token(signer, "root", NOW)
    verify_token(signer, str(token).replace("'", '"').encode(), "root", NOW)


def test_key_is_readable_only_by_owner(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    create_pair(tmp_path)
    for path, mode in ((tmp_path, 0o700), (tmp_path / "session.key", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_certificate_is_valid_for_years_and_kept(tmp_path: Path) -> None:
    first = create_pair(tmp_path)
    expires_at = x509.load_pem_x509_certificate(first[0]).not_valid_after_utc
    assert expires_at > datetime.now(UTC) + timedelta(days=3600)
    assert create_pair(tmp_path) == first


@pytest.mark.parametrize("days", [80, 100])
def test_replaces_certificate_that_expires_soon(tmp_path: Path, days: int) -> None:
    before = create_other_pair(tmp_path, days)
    assert (create_pair(tmp_path)[0] == before) == (days == 100)


@pytest.mark.parametrize("missing", ["session.crt", "session.key"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=["missing", "empty", "nonsense"])
def test_replaces_incomplete_pair(tmp_path: Path, missing: str, content: bytes | None) -> None:
    before = create_other_pair(tmp_path)
    (tmp_path / missing).unlink()
    if content is not None:
        (tmp_path / missing).write_bytes(content)
    assert create_pair(tmp_path)[0] != before
    load_signer(tmp_path / "session.crt", tmp_path / "session.key")


def test_replaces_key_of_another_certificate(tmp_path: Path) -> None:
    create_other_pair(tmp_path)
    openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "session.key")
    create_pair(tmp_path)
    load_signer(tmp_path / "session.crt", tmp_path / "session.key")


def test_reports_errors(tmp_path: Path) -> None:
    assert "missing argument" in run().stderr
    assert "nowhere" in run(str(tmp_path / "nowhere")).stderr
    (tmp_path / "new.key").mkdir()
    failed = run(str(tmp_path))
    assert failed.returncode != 0
    assert failed.stderr
