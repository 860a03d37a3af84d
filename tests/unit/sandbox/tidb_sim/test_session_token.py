"""Session tokens: the signed bytes, and the tokens that are rejected."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import ConfigError
from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_sim.migration_rules import MigrationRules
from sandbox.tidb_sim.session_token import (
    Signer,
    TokenRejected,
    format_go_time,
    issue_token,
    load_signer,
    parse_rfc3339,
    signed_bytes,
    verify_token,
)

SECOND = 10**9
NOW = 1_767_225_600 * SECOND + 123_456_000


@pytest.fixture(scope="module", params=[False, True], ids=["ed25519", "rsa"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SessionCertificate:
    return SessionCertificate.load_or_create(tmp_path_factory.mktemp("token"), rsa=request.param)


@pytest.fixture(scope="module")
def signer(files: SessionCertificate) -> Signer:
    return load_signer(files.cert, files.key)


def encoded(token: dict[str, str]) -> bytes:
    return json.dumps(token).encode()


def test_token_has_tidb_keys_and_times(signer: Signer) -> None:
    token = issue_token(signer, "anna", NOW)
    assert list(token) == ["username", "sign-time", "expire-time", "signature"]
    assert token["username"] == "anna"
    assert token["sign-time"] == "2026-01-01T00:00:00.123456Z"
    assert token["expire-time"] == "2026-01-01T00:01:00.123456Z"
    content = (
        b'{"username":"anna","sign-time":"2026-01-01T00:00:00.123456Z",'
        b'"expire-time":"2026-01-01T00:01:00.123456Z"}'
    )
    assert signed_bytes(token) == content
    assert signer.verify(content, base64.b64decode(token["signature"]))


def test_rsa_signs_with_hash_of_certificate_signature(tmp_path: Path) -> None:
    files = SessionCertificate.load_or_create(tmp_path, rsa=True)
    signature = load_signer(files.cert, files.key).sign(b"content")
    public = x509.load_pem_x509_certificate(files.cert.read_bytes()).public_key()
    assert isinstance(public, RSAPublicKey)
    public.verify(signature, b"content", padding.PKCS1v15(), hashes.SHA384())


def test_escapes_html_characters_like_go() -> None:
    token = {"username": "<a>&\u2028ü\"'", "sign-time": "s", "expire-time": "e"}
    expected = '{"username":"\\u003ca\\u003e\\u0026\\u2028ü\\"\'","sign-time":"s","expire-time":"e"}'
    assert signed_bytes(token) == expected.encode()


@pytest.mark.parametrize("age_seconds", [0, 59, 60])
def test_token_is_valid_for_a_minute(signer: Signer, age_seconds: int) -> None:
    verify_token(signer, encoded(issue_token(signer, "anna", NOW)), "anna", NOW + age_seconds * SECOND)


def test_accepts_token_from_future_and_other_case_of_name(signer: Signer) -> None:
    verify_token(signer, encoded(issue_token(signer, "Anna", NOW + 3600 * SECOND)), "aNNa", NOW)


def test_accepts_reformatted_token(signer: Signer) -> None:
    """TiDB's type JSON sorts the keys and inserts blanks."""
    token = issue_token(signer, "anna", NOW)
    verify_token(signer, json.dumps(token, sort_keys=True, indent=1).encode(), "anna", NOW)


def with_field(key: str, value: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda token: token | {key: value}


@pytest.mark.parametrize(
    "tamper",
    [
        with_field("username", "root"),
        with_field("expire-time", "2036-01-01T00:00:00Z"),
        with_field("sign-time", "2025-12-31T23:59:59Z"),
        with_field("signature", base64.b64encode(bytes(64)).decode()),
        with_field("signature", ""),
    ],
)
def test_rejects_modified_token(signer: Signer, tamper: Callable[[dict[str, str]], dict[str, str]]) -> None:
    with pytest.raises(TokenRejected, match="signature"):
        verify_token(signer, encoded(tamper(issue_token(signer, "anna", NOW))), "root", NOW)


def test_rejects_token_of_another_key(signer: Signer, tmp_path: Path) -> None:
    other = SessionCertificate.load_or_create(tmp_path)
    token = issue_token(load_signer(other.cert, other.key), "anna", NOW)
    with pytest.raises(TokenRejected, match="signature"):
        verify_token(signer, encoded(token), "anna", NOW)


def test_rejects_expired_token_and_token_of_another_user(signer: Signer) -> None:
    token = encoded(issue_token(signer, "anna", NOW))
    with pytest.raises(TokenRejected, match="expired"):
        verify_token(signer, token, "anna", NOW + 60 * SECOND + 1)
    with pytest.raises(TokenRejected, match="belongs to 'anna', not to 'berta'"):
        verify_token(signer, token, "berta", NOW)


def test_ignores_longer_expire_time(signer: Signer) -> None:
    token = {
        "username": "anna",
        "sign-time": format_go_time(NOW),
        "expire-time": format_go_time(NOW + 3600 * SECOND),
    }
    token["signature"] = base64.b64encode(signer.sign(signed_bytes(token))).decode()
    verify_token(signer, encoded(token), "anna", NOW + 60 * SECOND)
    with pytest.raises(TokenRejected, match="more than a minute ago"):
        verify_token(signer, encoded(token), "anna", NOW + 61 * SECOND)


@pytest.mark.parametrize(
    "token",
    [
        *(b"", b"x", b"[]", b"null", b"{}", b'{"username":"a"}', b"\xff", b'{"username":1,"signature":2}'),
        b"[" * 100_000,
        json.dumps(dict.fromkeys(("username", "signature"), "\ud800")).encode(),
        json.dumps(
            {
                "username": "\ud800",
                "sign-time": format_go_time(NOW),
                "expire-time": format_go_time(NOW),
                "signature": "",
            }
        ).encode(),
    ],
)
def test_rejects_invalid_token(signer: Signer, token: bytes) -> None:
    with pytest.raises(TokenRejected, match="not a session token"):
        verify_token(signer, token, "anna", NOW)


@given(st.integers(min_value=0, max_value=4_000_000_000 * SECOND))
def test_times_round_trip(now: int) -> None:
    text = format_go_time(now)
    assert parse_rfc3339(text) == now
    assert not text.endswith(("0Z", ".Z")) or "." not in text


def test_parses_times_of_other_zones() -> None:
    assert parse_rfc3339("2026-01-01T08:00:00.5+08:00") == 1_767_225_600 * SECOND + SECOND // 2
    with pytest.raises(ValueError, match="RFC 3339"):
        parse_rfc3339("2026-01-01 00:00:00")


def test_clock_skew_shifts_clock() -> None:
    ahead, right = MigrationRules(clock_skew_seconds=50).now_nanoseconds(), MigrationRules().now_nanoseconds()
    assert 49 * SECOND < ahead - right < 51 * SECOND


def test_rejects_unusable_key_files(tmp_path: Path) -> None:
    one, two = (
        SessionCertificate.load_or_create(tmp_path / "1"),
        SessionCertificate.load_or_create(tmp_path / "2"),
    )
    with pytest.raises(ConfigError, match="it is not the key of"):
        load_signer(one.cert, two.key)
    with pytest.raises(ConfigError, match="not a certificate"):
        load_signer(tmp_path / "nowhere", one.key)
    with pytest.raises(ConfigError, match="not a private key"):
        load_signer(one.cert, one.cert)
    elliptic = tmp_path / "ec.key"
    elliptic.write_bytes(
        generate_private_key(SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(ConfigError, match="type of key is not supported"):
        load_signer(one.cert, elliptic)
