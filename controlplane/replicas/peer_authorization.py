"""Decides which callers of the xDS port are replicas that may follow this one. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from controlplane import address as addresses


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """A caller's address and the names in its certificate."""

    address: str
    names: frozenset[str] = frozenset()


def read_credentials(peer: str, auth: Mapping[str, Iterable[bytes]]) -> PeerCredentials:
    """Read the credentials from gRPC's `auth_context`; no names without a client certificate."""
    certificate_names = (*auth.get("peer_dns", ()), *auth.get("peer_ip", ()))
    return PeerCredentials(
        peer, frozenset(name.decode(errors="replace").casefold() for name in certificate_names)
    )


def denial_message(
    caller: PeerCredentials,
    peer_addresses: Collection[str],
    *,
    requires_certificate: bool,
    allows_unauthenticated: bool,
) -> str:
    """Return why the caller may not follow this replica, as a sentence; empty if it may.

    `peer_addresses` are the advertised addresses of the other replicas. `requires_certificate`: callers
    present certificates of our authority. Otherwise callers from this machine may follow, and all callers
    if `allows_unauthenticated`.
    """
    if not requires_certificate:
        if allows_unauthenticated or _is_loopback(caller.address):
            return ""
        return (
            f"{caller.address} presents no certificate; set xds.tls with client_ca on all control planes, or"
            " set allow_unauthenticated: true if the network is isolated"
        )
    if any(_is_certificate_for(caller.names, addresses.split(peer)[0]) for peer in peer_addresses):
        return ""
    return (
        f"the certificate of {caller.address} names no registered control plane; it must contain the host of"
        " that control plane's replicas.advertise"
    )


def _is_certificate_for(names: frozenset[str], host: str) -> bool:
    """Return whether a certificate with these names is for exactly this host.

    A wildcard does not match: certificates of Envoys may contain it too.
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
