"""Whether the certificate files that the settings name can be used, before anything is started with them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from controlplane.config import schema
from controlplane.config.api import ApiTls
from controlplane.config.settings import ClientTls, ServerTls, Settings
from controlplane.config.validation_errors import Fault

_PEM = "name a PEM file, which begins with -----BEGIN"


class _Encrypted(Exception):
    pass


def faults(settings: Settings) -> list[Fault]:
    """The certificates, keys and CAs that cannot be used. Reads files."""
    found: list[Fault] = []
    for path, tls in sections(settings):
        found.extend(of_section(path, tls))
    if (ca := settings.balance.prometheus.ca) is not None:
        found.extend(_certificate(("balance", "prometheus", "ca"), ca, "a CA bundle"))
    if (ca := settings.rollouts.probe.ca) is not None:
        found.extend(_certificate(("rollouts", "probe", "ca"), ca, "a CA bundle"))
    return found


def of_section(path: schema.Path, tls: ClientTls | ServerTls | ApiTls) -> list[Fault]:
    """The files of one section, which stands at `path`, that cannot be used. Reads files."""
    found: list[Fault] = []
    ca_name, ca = authority(tls)
    if ca is not None:
        found.extend(_certificate((*path, ca_name), ca, "a CA bundle"))
    if tls.cert is not None and tls.key is not None:
        unusable = [
            *_certificate((*path, "cert"), tls.cert, "a certificate"),
            *_unreadable((*path, "key"), tls.key),
        ]
        found.extend(unusable or _key((*path, "key"), tls.cert, tls.key))
    return found


def authority(tls: ClientTls | ServerTls | ApiTls) -> tuple[str, Path | None]:
    """The CA that the other side must chain to, behind the name of its setting."""
    return ("ca", tls.ca) if isinstance(tls, ClientTls) else ("client_ca", tls.client_ca)


def sections(
    section: BaseModel, above: schema.Path = ()
) -> Iterator[tuple[schema.Path, ClientTls | ServerTls | ApiTls]]:
    """The settings of TLS whose files are on this machine, with their paths."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ClientTls | ServerTls | ApiTls):
            yield (*above, name), value
        elif isinstance(value, BaseModel):
            yield from sections(value, (*above, name))


def _unreadable(path: schema.Path, file: Path) -> Iterator[Fault]:
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except FileNotFoundError:
        yield Fault(path, f"there is no file {file}", "name an existing PEM file")
    except IsADirectoryError:
        yield Fault(path, f"{file} is a directory", "name a PEM file in it")
    except OSError as error:
        remedy = "make it readable for the user that Tidevoy runs as"
        yield Fault(path, f"{file} cannot be read: {error.strerror}", remedy)


def _certificate(path: schema.Path, file: Path, what: str) -> Iterator[Fault]:
    unreadable = list(_unreadable(path, file))
    yield from unreadable
    if not unreadable:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
        except ssl.SSLError:
            yield Fault(path, f"{file} is not {what} in PEM", _PEM)


def _key(path: schema.Path, cert: Path, key: Path) -> Iterator[Fault]:
    def password() -> str:  # without it OpenSSL would ask on the terminal
        raise _Encrypted

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password)
    except _Encrypted:
        yield Fault(path, f"the key in {key} is encrypted", "name a key without a passphrase")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            yield Fault(
                path, f"the key in {key} does not belong to the certificate in {cert}", "name its own key"
            )
        else:
            yield Fault(path, f"{key} is not a key in PEM", _PEM)
