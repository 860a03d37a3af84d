"""deploy/session-certificate.sh makes a pair that all TiDB servers can use, and leaves a good one alone."""

from __future__ import annotations

import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from sandbox.tidb_sim.session_token import issue_token, verify_token
from sandbox.tidb_sim.signing_key import load_signer

SCRIPT = Path(__file__).resolve().parents[3] / "deploy/session-certificate.sh"
NOW = 1_800_000_000 * 10**9  # nanoseconds


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def made(directory: Path) -> tuple[bytes, bytes]:
    """Certificate and key, of a run that must succeed."""
    done = run(str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["session.crt", "session.key"]
    return (directory / "session.crt").read_bytes(), (directory / "session.key").read_bytes()


def openssl(*arguments: str | int | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], capture_output=True, check=True)


def usable(directory: Path, days: int = 1000) -> bytes:
    """A pair of somebody else's, which is quicker to make; the certificate."""
    pair = ("-keyout", directory / "session.key", "-out", directory / "session.crt")
    openssl("req", "-x509", "-newkey", "ed25519", "-nodes", "-days", days, "-subj", "/CN=tidb-session", *pair)
    return (directory / "session.crt").read_bytes()


def test_a_token_that_it_signs_is_taken(tmp_path: Path) -> None:
    made(tmp_path)
    signer = load_signer(tmp_path / "session.crt", tmp_path / "session.key")
    token = issue_token(signer, "root", NOW)
    verify_token(signer, str(token).replace("'", '"').encode(), "root", NOW)


def test_only_its_owner_reads_the_key(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made(tmp_path)
    for path, mode in ((tmp_path, 0o700), (tmp_path / "session.key", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_it_lasts_for_years_and_is_kept(tmp_path: Path) -> None:
    first = made(tmp_path)
    ends = x509.load_pem_x509_certificate(first[0]).not_valid_after_utc
    assert ends > datetime.now(UTC) + timedelta(days=3600)
    assert made(tmp_path) == first


@pytest.mark.parametrize("days", [80, 100])
def test_one_that_ends_soon_is_made_anew(tmp_path: Path, days: int) -> None:
    before = usable(tmp_path, days)
    assert (made(tmp_path)[0] == before) == (days == 100)


@pytest.mark.parametrize("missing", ["session.crt", "session.key"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=["gone", "empty", "nonsense"])
def test_half_a_pair_is_made_anew(tmp_path: Path, missing: str, content: bytes | None) -> None:
    before = usable(tmp_path)
    (tmp_path / missing).unlink()
    if content is not None:
        (tmp_path / missing).write_bytes(content)
    assert made(tmp_path)[0] != before
    load_signer(tmp_path / "session.crt", tmp_path / "session.key")


def test_a_key_of_another_certificate_is_made_anew(tmp_path: Path) -> None:
    usable(tmp_path)
    openssl("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "session.key")
    made(tmp_path)
    load_signer(tmp_path / "session.crt", tmp_path / "session.key")


def test_it_says_what_is_wrong(tmp_path: Path) -> None:
    assert "name the directory" in run().stderr
    assert "nowhere" in run(str(tmp_path / "nowhere")).stderr
    (tmp_path / "new.key").mkdir()
    failed = run(str(tmp_path))
    assert failed.returncode != 0
    assert failed.stderr
