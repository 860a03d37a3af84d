"""Files that the sandbox writes for real TiDB servers."""

from __future__ import annotations

import tomllib
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.x509 import load_pem_x509_certificate

from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_servers import to_toml


def test_to_toml_round_trips_settings() -> None:
    settings = {"path": '/home/\U0001f600/"x"', "n": 3, "on": True, "log": {"level": "warn", "a": {"b": ""}}}
    assert tomllib.loads(to_toml(settings)) == settings


def test_certificate_is_created_once_with_private_key_file(tmp_path: Path) -> None:
    certificate = SessionCertificate.load_or_create(tmp_path)
    before = certificate.cert.read_bytes(), certificate.key.read_bytes()
    assert SessionCertificate.load_or_create(tmp_path) == certificate
    assert (certificate.cert.read_bytes(), certificate.key.read_bytes()) == before
    assert certificate.key.stat().st_mode & 0o777 == 0o600


def test_certificate_is_recreated_if_only_its_key_exists(tmp_path: Path) -> None:
    SessionCertificate.load_or_create(tmp_path).cert.unlink()
    certificate = SessionCertificate.load_or_create(tmp_path)
    key = serialization.load_pem_private_key(certificate.key.read_bytes(), None)
    assert load_pem_x509_certificate(certificate.cert.read_bytes()).public_key() == key.public_key()
