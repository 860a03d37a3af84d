"""The files that real TiDB servers of the sandbox are started with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.x509 import load_pem_x509_certificate

from sandbox.session_certificate import SessionCertificate
from sandbox.tidb_servers import to_toml


def test_settings_are_written_as_toml() -> None:
    settings = {"path": '/home/\U0001f600/"x"', "n": 3, "on": True, "log": {"level": "warn", "a": {"b": ""}}}
    assert tomllib.loads(to_toml(settings)) == settings


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    made = SessionCertificate.load_or_create(tmp_path)
    before = made.cert.read_bytes(), made.key.read_bytes()
    assert SessionCertificate.load_or_create(tmp_path) == made
    assert (made.cert.read_bytes(), made.key.read_bytes()) == before
    assert made.key.stat().st_mode & 0o777 == 0o600


def test_a_certificate_is_made_again_when_only_its_key_was_written(tmp_path: Path) -> None:
    SessionCertificate.load_or_create(tmp_path).cert.unlink()
    made = SessionCertificate.load_or_create(tmp_path)
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    assert load_pem_x509_certificate(made.cert.read_bytes()).public_key() == key.public_key()
