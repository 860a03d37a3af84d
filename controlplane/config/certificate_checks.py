"""Check the certificate files that the settings name, before the control plane uses them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from controlplane.config import schema
from controlplane.config.api import ApiTls
from controlplane.config.own_tls import ClientTls, ServerTls
from controlplane.config.schema import InvalidSetting
from controlplane.config.settings import Settings


def check_certificates(settings: Settings) -> list[InvalidSetting]:
    """Return the problems of all certificates, keys and CAs. Reads files."""
    problems = [problem for path, tls in tls_sections(settings) for problem in check_section(path, tls)]
    for path, ca in (
        (("balance", "prometheus", "ca"), settings.balance.prometheus.ca),
        (("health", "statement", "ca"), settings.health.statement.ca),
        (("rollouts", "probe", "ca"), settings.rollouts.probe.ca),
        (("rollouts", "verification", "ca"), settings.rollouts.verification.ca),
    ):
        problems.extend(_check_file(path, ca))
    return problems


def check_section(path: schema.SettingPath, tls: ClientTls | ServerTls | ApiTls) -> list[InvalidSetting]:
    """Return the problems of the files in the section at `path`. Reads files."""
    ca_name, ca = ca_setting(tls)
    cert_problems = list(_check_file((*path, "cert"), tls.cert))
    key_problems = _check_file((*path, "key"), tls.key, None if cert_problems else tls.cert)
    return [*_check_file((*path, ca_name), ca), *cert_problems, *key_problems]


def ca_setting(tls: ClientTls | ServerTls | ApiTls) -> tuple[str, Path | None]:
    """Return name and value of the setting for the CA that the peer's certificate must chain to."""
    return ("ca", tls.ca) if isinstance(tls, ClientTls) else ("client_ca", tls.client_ca)


def tls_sections(
    section: BaseModel, parent: schema.SettingPath = ()
) -> Iterator[tuple[schema.SettingPath, ClientTls | ServerTls | ApiTls]]:
    """Yield the TLS sections whose files are on this machine, with their paths."""
    for name, value in section:
        if isinstance(value, ClientTls | ServerTls | ApiTls):
            yield (*parent, name), value
        elif isinstance(value, BaseModel):
            yield from tls_sections(value, (*parent, name))


def _check_file(
    path: schema.SettingPath, file: Path | None, cert: Path | None = None
) -> Iterator[InvalidSetting]:
    """Yield the problem of a file, if any. A key must match `cert`; without `cert`, it is only opened."""

    def password() -> str:  # without this callback, OpenSSL would prompt on the terminal
        raise ValueError(f"the key in {file} is encrypted")

    if file is None:
        return
    try:
        file.open("rb").close()
        if path[-1] != "key":
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
        elif cert is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, file, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"the key in {file} does not match the certificate in {cert}"
            yield InvalidSetting(path, problem, "name the matching key")
        else:
            problem = f"{file} is not a {'key' if path[-1] == 'key' else 'certificate'} in PEM format"
            yield InvalidSetting(path, problem, "name a PEM file, which begins with -----BEGIN")
    except OSError as error:
        problem = f"{file} cannot be read: {error.strerror}"
        yield InvalidSetting(path, problem, "name a PEM file that Tidevoy can read")
    except ValueError as error:
        yield InvalidSetting(path, str(error), "name a key without a passphrase")
