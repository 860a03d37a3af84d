"""Check the certificate files that the settings name, before anything starts with them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from controlplane.config import schema
from controlplane.config.api import ApiTls
from controlplane.config.settings import ClientTls, ServerTls, Settings
from controlplane.config.validation_errors import InvalidSetting

_PEM_REMEDY = "name a PEM file, which begins with -----BEGIN"


class _EncryptedKeyError(Exception):
    pass


def check_certificates(settings: Settings) -> list[InvalidSetting]:
    """Return the problems of all certificates, keys and CAs. Reads files."""
    problems: list[InvalidSetting] = []
    for path, tls in tls_sections(settings):
        problems.extend(check_section(path, tls))
    if (ca := settings.balance.prometheus.ca) is not None:
        problems.extend(_check_certificate(("balance", "prometheus", "ca"), ca, "a CA bundle"))
    if (ca := settings.rollouts.probe.ca) is not None:
        problems.extend(_check_certificate(("rollouts", "probe", "ca"), ca, "a CA bundle"))
    return problems


def check_section(path: schema.SettingPath, tls: ClientTls | ServerTls | ApiTls) -> list[InvalidSetting]:
    """Return the problems of the files in the section at `path`. Reads files."""
    problems: list[InvalidSetting] = []
    ca_name, ca = ca_setting(tls)
    if ca is not None:
        problems.extend(_check_certificate((*path, ca_name), ca, "a CA bundle"))
    if tls.cert is not None and tls.key is not None:
        unusable = [
            *_check_certificate((*path, "cert"), tls.cert, "a certificate"),
            *_check_readable((*path, "key"), tls.key),
        ]
        problems.extend(unusable or _check_key((*path, "key"), tls.cert, tls.key))
    return problems


def ca_setting(tls: ClientTls | ServerTls | ApiTls) -> tuple[str, Path | None]:
    """Return the name of the CA setting, and the CA that the peer's certificate must chain to."""
    return ("ca", tls.ca) if isinstance(tls, ClientTls) else ("client_ca", tls.client_ca)


def tls_sections(
    section: BaseModel, parent: schema.SettingPath = ()
) -> Iterator[tuple[schema.SettingPath, ClientTls | ServerTls | ApiTls]]:
    """Yield the TLS sections whose files are on this machine, with their paths."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ClientTls | ServerTls | ApiTls):
            yield (*parent, name), value
        elif isinstance(value, BaseModel):
            yield from tls_sections(value, (*parent, name))


def _check_readable(path: schema.SettingPath, file: Path) -> Iterator[InvalidSetting]:
    try:
        with file.open("rb") as stream:
            stream.read(1)
    except FileNotFoundError:
        yield InvalidSetting(path, f"there is no file {file}", "name an existing PEM file")
    except IsADirectoryError:
        yield InvalidSetting(path, f"{file} is a directory", "name a PEM file in it")
    except OSError as error:
        remedy = "make it readable for the user that Tidevoy runs as"
        yield InvalidSetting(path, f"{file} cannot be read: {error.strerror}", remedy)


def _check_certificate(path: schema.SettingPath, file: Path, description: str) -> Iterator[InvalidSetting]:
    unreadable = list(_check_readable(path, file))
    yield from unreadable
    if not unreadable:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
        except ssl.SSLError:
            yield InvalidSetting(path, f"{file} is not {description} in PEM format", _PEM_REMEDY)


def _check_key(path: schema.SettingPath, cert: Path, key: Path) -> Iterator[InvalidSetting]:
    def password() -> str:  # without this callback, OpenSSL would prompt on the terminal
        raise _EncryptedKeyError

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password)
    except _EncryptedKeyError:
        yield InvalidSetting(path, f"the key in {key} is encrypted", "name a key without a passphrase")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            yield InvalidSetting(
                path, f"the key in {key} does not match the certificate in {cert}", "name the matching key"
            )
        else:
            yield InvalidSetting(path, f"{key} is not a key in PEM format", _PEM_REMEDY)
