"""Whether the certificate files that the settings name can be used, before anything is started with them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from controlplane.config import ClientTls, ServerTls, Settings
from controlplane.settings import tree
from controlplane.settings.faults import Fault

_PEM = "name a PEM file, which begins with -----BEGIN"


class _Encrypted(Exception):
    pass


def faults(settings: Settings) -> list[Fault]:
    """The certificates, keys and CAs that cannot be used. Reads files."""
    found: list[Fault] = []
    for path, tls in _tls_sections(settings, ()):
        ca_name = "client_ca" if isinstance(tls, ServerTls) else "ca"
        ca: Path | None = getattr(tls, ca_name)
        if ca is not None:
            found.extend(_certificate((*path, ca_name), ca, "a CA bundle"))
        if tls.cert is not None and tls.key is not None:
            unusable = [
                *_certificate((*path, "cert"), tls.cert, "a certificate"),
                *_unreadable((*path, "key"), tls.key),
            ]
            found.extend(unusable or _key((*path, "key"), tls.cert, tls.key))
    if (ca := settings.balance.prometheus.ca) is not None:
        found.extend(_certificate(("balance", "prometheus", "ca"), ca, "a CA bundle"))
    return found


def _tls_sections(section: BaseModel, above: tree.Path) -> Iterator[tuple[tree.Path, ClientTls | ServerTls]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, ClientTls | ServerTls):
            yield (*above, name), value
        elif isinstance(value, BaseModel):
            yield from _tls_sections(value, (*above, name))


def _unreadable(path: tree.Path, file: Path) -> Iterator[Fault]:
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


def _certificate(path: tree.Path, file: Path, what: str) -> Iterator[Fault]:
    unreadable = list(_unreadable(path, file))
    yield from unreadable
    if not unreadable:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=file)
        except ssl.SSLError:
            yield Fault(path, f"{file} is not {what} in PEM", _PEM)


def _key(path: tree.Path, cert: Path, key: Path) -> Iterator[Fault]:
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
