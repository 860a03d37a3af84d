"""The names in certificates of control planes and Envoys, and the files that are named after them. No I/O."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote

from cryptography import x509

from cli.errors import UsageError
from controlplane import address as addresses

CONTROL_PLANE_STEM = "control-plane"
_ENVOY_STEM_PREFIX = "envoy-"
_MAX_STEM_CHARS = 200  # with the suffix and the temporary name, within the 255 bytes of a file name

_DNS_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}\Z){_DNS_LABEL}(?:\.{_DNS_LABEL})*")


def control_plane_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Return the names for a control plane's certificate. Raises UsageError if one is unusable."""
    return [_control_plane_name(host) for host in dict.fromkeys(hosts)]


def _control_plane_name(host: str) -> x509.GeneralName:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # A wrong IPv4 address would also be a DNS name, but no top-level domain is a number (RFC 3696).
        if not _DNS_NAME.fullmatch(host) or host.rpartition(".")[2].isdigit():
            raise UsageError(
                f"--control-plane {_printable(host)} is neither a DNS name nor an IP address; write the host"
                " to which Envoys connect, without port, brackets or wildcard"
            ) from None
        return x509.DNSName(host)
    if ip.is_unspecified or "%" in host:
        raise UsageError(f"no Envoy can connect to {host}; name an address that all machines can use")
    return x509.IPAddress(ip)


def envoy_name(envoy_id: str) -> x509.GeneralName:
    """Return the name from which the control plane reads this id (see `xds/client_identity.py`).

    An IP address becomes a URI, because a DNS name with its digits could pass for a control plane's host.
    """
    if _DNS_NAME.fullmatch(envoy_id) and addresses.literal_ip(envoy_id) is None:
        return x509.DNSName(envoy_id)
    return x509.UniformResourceIdentifier(f"tidevoy://envoys/{quote(envoy_id, safe='')}")


def envoy_stem(envoy_id: str) -> str:
    """Return the name of an Envoy's files, without suffix. Raises UsageError if the id is unusable.

    Percent-encoding keeps the files of `a/b` and `../x` in the directory, and different ids apart.
    """
    if not envoy_id or not envoy_id.isprintable():
        raise UsageError(
            f"--envoy {_printable(envoy_id)!r} is not an id; write the Envoy's id, in printable characters"
        )
    stem = f"{_ENVOY_STEM_PREFIX}{quote(envoy_id, safe='')}"
    if len(stem) > _MAX_STEM_CHARS:
        raise UsageError(f"--envoy {envoy_id[:40]}... is too long for the name of a file; use a shorter id")
    return stem


def envoy_id(stem: str) -> str | None:
    """Return the id of the Envoy whose files have this name, or None if they are not an Envoy's."""
    if not stem.startswith(_ENVOY_STEM_PREFIX):
        return None
    return unquote(stem.removeprefix(_ENVOY_STEM_PREFIX))


def check_ids_are_no_control_planes(envoy_ids: Iterable[str], hosts: Iterable[str]) -> None:
    """Raises UsageError if an Envoy's id is a control plane's host.

    Its certificate would let the Envoy read what control planes exchange.
    """
    control_planes = {host.casefold() for host in hosts}
    for each in envoy_ids:
        if each.casefold() in control_planes:
            raise UsageError(f"{each} is a control plane and the id of an Envoy; give the Envoy another id")


def names_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the subject alternative names of a certificate."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return list(extension.value)


def format_names(names: Sequence[x509.GeneralName]) -> list[str]:
    """Return names as texts: DNS names, IP addresses and URIs."""
    return [str(name.value) for name in names]


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of a certificate's subject, or an empty text."""
    attributes = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(attributes[0].value) if attributes else ""


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]
