"""Which callers of the xDS port are replicas of ours, and may hear of all Envoys. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane import address as addresses


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What a caller's connection tells of it: its address, and the names that its certificate holds."""

    address: str
    names: frozenset[str] = frozenset()


def read_credentials(peer: str, auth: Mapping[str, Iterable[bytes]]) -> PeerCredentials:
    """Of gRPC's `auth_context`. Without TLS, and without a client's certificate, it holds no names."""
    certificate_names = (*auth.get("peer_dns", ()), *auth.get("peer_ip", ()))
    return PeerCredentials(
        peer, frozenset(each.decode(errors="replace").casefold() for each in certificate_names)
    )


def denial_message(
    caller: PeerCredentials,
    peer_addresses: Collection[str],
    *,
    requires_certificate: bool,
    allows_unauthenticated: bool,
) -> str:
    """Why the caller may not follow us, as a sentence; empty: it may.

    `replicas` are the advertised addresses of the others. `is_checked`: callers show certificates of our
    authority; else those from this machine may follow, and everybody where `is_open`.
    """
    if not requires_certificate:
        if allows_unauthenticated or _is_loopback(caller.address):
            return ""
        return (
            f"{caller.address} shows no certificate; set xds.tls with client_ca on all control planes, or"
            " allow_unauthenticated: true when the network keeps others out"
        )
    if any(_is_certificate_for(caller.names, addresses.split(each)[0]) for each in peer_addresses):
        return ""
    return (
        f"the certificate of {caller.address} holds the host of no control plane that is registered; it must"
        " hold that of its replicas.advertise"
    )


def _is_certificate_for(names: frozenset[str], host: str) -> bool:
    """Whether a certificate with these names is for that very host.

    A wildcard does not do: it may well be in the certificates of Envoys too.
    """
    literal = addresses.literal_ip(host)
    if literal is not None:
        return any(addresses.literal_ip(name) == literal for name in names)
    return host.casefold().rstrip(".") in names


def _is_loopback(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(addresses.split(address)[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
