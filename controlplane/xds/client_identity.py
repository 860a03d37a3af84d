"""Check the node.id that an Envoy claims against its client certificate.

A certificate from the client CA proves only that the client is some Envoy. Without this check, an attacker
with one Envoy's certificate could report as any other Envoy, for example that a node has no session left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote

import grpc
from cryptography import x509

from controlplane.clock import Clock
from controlplane.config.own_tls import XdsTls
from controlplane.texts import some_of

# A denied Envoy retries for ever. The same denial is reported at most once in this time.
_REPEAT_EVENT_SECONDS = 60.0
_MIN_EVENT_INTERVAL_SECONDS = 1.0  # between two denial events, even of different Envoys
_MAX_NAME_CHARS = 100  # longer names are cut in messages


class ClientIdentityChecker:
    """Authorizes the clients of the xDS port by node.id. All methods run on one event loop."""

    def __init__(self, tls: XdsTls | None, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        """`on_event` gets the kind, subject and message of an event."""
        self._clock = clock
        self._on_event = on_event
        self._reported_at: dict[tuple[tuple[str, ...], str], float] = {}
        self.configure(tls)

    def configure(self, tls: XdsTls | None) -> None:
        """Apply changed settings; they affect only streams that open later."""
        # Without a client CA, gRPC asks no client for a certificate.
        self._requires_identity = tls is not None and tls.client_ca is not None and tls.verify_node_id

    async def authorize(self, context: grpc.aio.ServicerContext, envoy_id: str) -> None:
        """Return if the client may use the id `envoy_id`; else end its stream with PERMISSION_DENIED."""
        if not self._requires_identity:
            return
        certificate_names = read_certificate_names(context.auth_context())
        if envoy_id in certificate_names:
            return
        problem = denial_message(envoy_id, certificate_names)
        self._report_denied(
            certificate_names, envoy_id, f"denied the stream from {peer_address(context.peer())}: {problem}"
        )
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)

    def _report_denied(self, certificate_names: tuple[str, ...], envoy_id: str, message: str) -> None:
        now = self._clock()
        self._reported_at = {
            pair: at for pair, at in self._reported_at.items() if at > now - _REPEAT_EVENT_SECONDS
        }
        is_rate_limited = any(at > now - _MIN_EVENT_INTERVAL_SECONDS for at in self._reported_at.values())
        if (certificate_names, envoy_id) not in self._reported_at and not is_rate_limited:
            self._reported_at[certificate_names, envoy_id] = now
            self._on_event("envoy.denied", _printable(envoy_id), message)


def read_certificate_names(auth: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in a client's certificate from gRPC's `auth_context`; empty without a certificate.

    Names are the DNS names, and the last path segments of URIs such as `spiffe://cluster/envoys/envoy-1`,
    percent-decoded (RFC 3986, 2.1). The common name counts only if the certificate has no subject alternative
    name (RFC 6125, 6.4.4).
    """
    if not any(True for _ in auth.get("x509_subject_alternative_name", ())):
        return _decoded_values(auth, "x509_common_name")
    return (
        *_decoded_values(auth, "peer_dns"),
        *(part for uri in _decoded_values(auth, "peer_uri") if (part := _last_path_segment(uri))),
    )


def certificate_expiry(auth: Mapping[str, Iterable[bytes]]) -> float | None:
    """Return when the client's certificate expires, in Unix time; None without a readable certificate."""
    for pem in auth.get("x509_pem_cert", ()):
        with suppress(ValueError, x509.InvalidVersion):  # TLS may accept what this parser rejects
            return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    return None


def denial_message(envoy_id: str, certificate_names: tuple[str, ...]) -> str:
    """Return the message that a certificate with these names does not allow `envoy_id`, and what to do."""
    shown = some_of([*map(_printable, certificate_names)])
    certificate_text = f"is for {shown}" if shown else "has no name"
    return (
        f"the Envoy's node.id is {_printable(envoy_id)}, but its certificate {certificate_text}; give it a"
        " certificate with its id, or start it with the id in its certificate"
    )


def peer_address(text: str) -> str:
    """Return the `host:port` in gRPC's `ipv4:10.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    return unquote(text.partition(":")[2])


def _last_path_segment(uri: str) -> str:
    _, _, authority_and_path = uri.partition("://")
    segment = authority_and_path.rstrip("/").partition("/")[2].rpartition("/")[2]
    return unquote(segment, errors="backslashreplace")


def _decoded_values(auth: Mapping[str, Iterable[bytes]], key: str) -> tuple[str, ...]:
    return tuple(value.decode(errors="backslashreplace") for value in auth.get(key, ()) if value)


def _printable(name: str) -> str:
    """Shorten a name from an untrusted certificate and escape it if it is not printable."""
    cut = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    return cut if cut.isprintable() and cut else ascii(cut)
