"""Whether an Envoy may speak under the name that it gives, by the certificate that it shows.

A certificate of the right authority says that its owner is *an* Envoy. Which one must not be the Envoy's own
word: else whoever takes over one machine could speak for all, and tell that a node has no session left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote

import grpc
from cryptography import x509

from controlplane.clock import Clock
from controlplane.config.settings import XdsTls

_REPEAT_EVENT_SECONDS = (
    60.0  # seconds in which the same refusal is not told again: a refused Envoy tries for ever
)
_MIN_EVENT_INTERVAL_SECONDS = 1.0  # seconds between two events of this kind, whoever is refused
_MAX_NAME_CHARS = 100  # characters of a name that are shown
_MAX_NAMES_SHOWN = 3  # names of a certificate that are shown


class ClientIdentityChecker:
    """Asks each caller of the xDS port who it is. All methods belong to one event loop."""

    def __init__(self, tls: XdsTls | None, clock: Clock, on_event: Callable[[str, str, str], None]) -> None:
        """`on_event` gets kind, subject and message of an event."""
        self._clock = clock
        self._on_event = on_event
        self._reported_at: dict[tuple[tuple[str, ...], str], float] = {}
        self.configure(tls)

    def configure(self, tls: XdsTls | None) -> None:
        """Take over changed settings, for streams that begin from now on."""
        # Without a client CA nobody is asked for a certificate.
        self._requires_identity = tls is not None and tls.client_ca is not None and tls.identity == "node_id"

    async def authorize(self, context: grpc.aio.ServicerContext, envoy_id: str) -> None:
        """Returns when the caller may speak as `envoy`; else ends its stream with PERMISSION_DENIED."""
        if not self._requires_identity:
            return
        certificate_names = read_certificate_names(context.auth_context())
        if envoy_id in certificate_names:
            return
        problem = denial_message(envoy_id, certificate_names)
        self._report_denied(
            certificate_names, envoy_id, f"{peer_address(context.peer())} gets nothing: {problem}"
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
            self._on_event("envoy.refused", _printable(envoy_id), message)


def read_certificate_names(auth: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names that a caller's certificate holds, out of gRPC's `auth_context`; none: it showed none.

    These are DNS names and the last parts of URIs (`spiffe://cluster/envoys/envoy-1`) among its subject
    alternative names; the common name counts where there is no alternative of any kind (RFC 6125, 6.4.4).
    """
    if not any(True for _ in auth.get("x509_subject_alternative_name", ())):
        return _decoded_values(auth, "x509_common_name")
    return (
        *_decoded_values(auth, "peer_dns"),
        *(part for uri in _decoded_values(auth, "peer_uri") if (part := _last_path_segment(uri))),
    )


def certificate_expiry(auth: Mapping[str, Iterable[bytes]]) -> float | None:
    """When the certificate ends that the caller has shown, in Unix time; None: it has shown none."""
    for pem in auth.get("x509_pem_cert", ()):
        with suppress(ValueError, x509.InvalidVersion):  # TLS may take what this parser does not
            return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    return None


def denial_message(envoy_id: str, certificate_names: tuple[str, ...]) -> str:
    """Why a caller with these names may not speak as `envoy`, and what to do."""
    more = (
        f" and {len(certificate_names) - _MAX_NAMES_SHOWN} more"
        if len(certificate_names) > _MAX_NAMES_SHOWN
        else ""
    )
    whose = (
        f"is that of {', '.join(map(_printable, certificate_names[:_MAX_NAMES_SHOWN]))}{more}"
        if certificate_names
        else "holds no name"
    )
    return (
        f"the Envoy says that it is {_printable(envoy_id)} (node.id), but its certificate {whose}; give it a"
        " certificate that holds its id, or start it with the id that its certificate holds"
    )


def peer_address(text: str) -> str:
    """gRPC's `ipv4:10.0.0.1:4711`, or `ipv6:%5B::1%5D:4711`, as an address."""
    return unquote(text.partition(":")[2])


def _last_path_segment(uri: str) -> str:
    """The last part of the path of a URI; empty: it has none."""
    _, _, authority_and_path = uri.partition("://")
    return authority_and_path.rstrip("/").partition("/")[2].rpartition("/")[2]


def _decoded_values(auth: Mapping[str, Iterable[bytes]], key: str) -> tuple[str, ...]:
    return tuple(value.decode(errors="backslashreplace") for value in auth.get(key, ()) if value)


def _printable(name: str) -> str:
    """A name as one can print it, whatever a stranger has put into it."""
    cut = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    return cut if cut.isprintable() and cut else ascii(cut)
