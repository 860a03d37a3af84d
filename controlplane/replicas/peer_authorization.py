"""Decides which callers of the xDS port may follow this replica, that is, get its reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import grpc

from controlplane import address as addresses
from controlplane.config.settings import Settings
from controlplane.xds.client_identity import peer_address


async def abort_unless_replica(
    context: grpc.aio.ServicerContext, peer_addresses: Collection[str], settings: Settings
) -> None:
    """Abort a call unless its caller may follow this replica. For the parameters see `denial_message`."""
    denial = denial_message(peer_address(context.peer()), context.auth_context(), peer_addresses, settings)
    if denial:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, denial)


def denial_message(
    caller: str, auth: Mapping[str, Iterable[bytes]], peer_addresses: Collection[str], settings: Settings
) -> str:
    """Return why the caller may not follow this replica, as a sentence; empty if the caller may.

    `auth` is gRPC's `auth_context`; `peer_addresses` are the advertised addresses of the other replicas. With
    `xds.tls.client_ca`, the caller's certificate must contain the host of one of these addresses. Without
    that CA, only callers from this machine may follow, or all callers with `allow_unauthenticated`.
    """
    if settings.xds.tls is None or settings.xds.tls.client_ca is None:
        if settings.allow_unauthenticated or addresses.is_loopback(caller):
            return ""
        return (
            f"{caller} presents no certificate; set xds.tls with client_ca on all control planes, or"
            " set allow_unauthenticated: true if the network is isolated"
        )
    certificate_names = (*auth.get("peer_dns", ()), *auth.get("peer_ip", ()))
    names = {name.decode(errors="replace").casefold() for name in certificate_names}
    if any(_is_certificate_for(names, addresses.split(peer)[0]) for peer in peer_addresses):
        return ""
    return (
        f"the certificate of {caller} names no registered control plane; it must contain the host in"
        " the calling control plane's replicas.advertise"
    )


def _is_certificate_for(names: Collection[str], host: str) -> bool:
    """Return whether a certificate with these names is for exactly this host.

    A wildcard never matches, because certificates of Envoys may contain the same wildcard.
    """
    literal = addresses.literal_ip(host)
    if literal is not None:
        return any(addresses.literal_ip(name) == literal for name in names)
    return host.casefold().rstrip(".") in names
