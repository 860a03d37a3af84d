"""The authorization policy: a pure function from a request and its credentials to a caller or a denial."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from api.auth.caller import ANONYMOUS, Caller, CallerRole
from api.auth.credentials import CredentialStore, PresentedCredentials
from api.problems import ProblemKind
from controlplane import address as addresses
from controlplane.config.api import ApiSettings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOGIN_PATH, LOGOUT_PATH = "/login", "/logout"
_PUBLIC_PATHS = frozenset({"/healthz", "/readyz", LOGIN_PATH, LOGOUT_PATH})
_PUBLIC_PREFIX = "/static/"
_HOST_PATTERN = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # a name or IP address, and an optional port
_MAX_HOST_LENGTH = 255  # characters
_MAX_RETURN_PATH_LENGTH = 512  # characters of the path to return to after the login


@dataclass(frozen=True, slots=True)
class AuthRequest:
    """The parts of a request that the policy evaluates."""

    method: str
    path: str  # decoded, as in route matching
    client_ip: str
    credentials: PresentedCredentials
    origin_header: str | None = None  # the header `Origin`: the origin of the page that sends the request
    host: str = ""  # the header `Host`
    is_tls: bool = False
    wants_html: bool = False
    is_htmx: bool = False


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request is denied. `reason` is a metric label."""

    kind: ProblemKind
    reason: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    caller: Caller | None = None
    redirect_to: str | None = None  # if set, the response redirects the browser to this page


def is_public(path: str, api: ApiSettings) -> bool:
    """Whether the path needs no authentication."""
    return (
        path in _PUBLIC_PATHS or path.startswith(_PUBLIC_PREFIX) or (api.open_metrics and path == "/metrics")
    )


def authorize(request: AuthRequest, api: ApiSettings, credentials: CredentialStore) -> Caller | Denial:
    """Return the caller of an admitted request, or the denial."""
    if not api.requires_auth:
        caller = Caller(ANONYMOUS, CallerRole.OPERATOR, request.client_ip)
        if not is_allowed_host(request.host, api):
            return _deny_host(request, caller)
        return _check_origin(request, caller)
    owner = credentials.find(request.credentials)
    if owner is None and is_public(request.path, api):
        return _check_origin(request, Caller(ANONYMOUS, CallerRole.VIEWER, request.client_ip))
    if owner is None:
        return _deny_unauthenticated(request, api)
    caller = replace(owner, client_ip=request.client_ip)
    if (
        request.method not in SAFE_METHODS
        and not caller.may_write
        and request.path not in (LOGIN_PATH, LOGOUT_PATH)
    ):
        detail = f"{caller.name} is a viewer and may only read; use a token with the role operator"
        return Denial(ProblemKind.FORBIDDEN, "forbidden", detail, caller=caller)
    return _check_origin(request, caller)


def _check_origin(request: AuthRequest, caller: Caller) -> Caller | Denial:
    """Deny writes that a page of another origin sends through a user's browser (CSRF).

    Browsers send the page's origin with every request that is not a plain read. Other clients send neither an
    origin nor a cookie.
    """
    if request.method in SAFE_METHODS:
        return caller
    if request.origin_header is None:
        if not caller.by_cookie:
            return caller
        page, remedy = "pages without an Origin header", "send the token as `Authorization: Bearer`"
    # The origin may be https without TLS on this server: a proxy in front of it may terminate TLS.
    elif request.origin_header == f"https://{request.host}" or (
        request.origin_header == f"http://{request.host}" and not request.is_tls
    ):
        return caller
    else:
        page, remedy = f"pages of {request.origin_header}", "use the control plane's own console"
    detail = f"{page} may only read; {remedy}"
    return Denial(ProblemKind.FOREIGN_ORIGIN, "foreign_origin", detail, caller=caller)


def is_allowed_host(host: str, api: ApiSettings) -> bool:
    """Whether the header `Host` is acceptable; prevents DNS rebinding.

    The owner of a domain can point it at this server, and browsers then treat the owner's page as
    same-origin. IP addresses and names without a dot are safe: they cannot be registered as domains.
    Programs may omit the header.
    """
    if len(host) > _MAX_HOST_LENGTH or (parts := _HOST_PATTERN.fullmatch(host.lower())) is None:
        return False
    name = parts[1].strip("[]")
    return (
        "." not in name
        or addresses.literal_ip(name) is not None
        or name.endswith(".localhost")
        or name in (api.listen.rpartition(":")[0].lower(), *api.host_names)
    )


def _deny_host(request: AuthRequest, caller: Caller) -> Denial:
    name = request.host[:_MAX_HOST_LENGTH]
    detail = f"host name {name} is not allowed; use an IP address, or add the name to api.host_names"
    return Denial(ProblemKind.MISDIRECTED, "misdirected", detail, caller=caller)


def _deny_unauthenticated(request: AuthRequest, api: ApiSettings) -> Denial:
    if request.credentials.bearer is not None:
        reason, detail = "wrong_token", "the token is unknown; `tidevoy token create` makes one"
    elif request.credentials.cookie is not None:
        reason, detail = "wrong_token", "the login is no longer valid; log in again"
    elif request.credentials.certificate_names:
        reason = "unknown_certificate"
        detail = "no name in the client certificate is known; add one to api.clients"
    else:
        reason = "no_token"
        remedies = [*(["send `Authorization: Bearer TOKEN`"] if api.tokens else [])]
        remedies += ["use a client certificate"] if api.clients else []
        detail = f"the request has no credentials; {' or '.join(remedies)}"
    headers = {"WWW-Authenticate": 'Bearer realm="tidevoy"'}
    if request.is_htmx:
        headers["HX-Redirect"] = LOGIN_PATH
    redirect_to = None
    if request.wants_html and request.method == "GET" and not request.is_htmx:
        return_path = quote(request.path[:_MAX_RETURN_PATH_LENGTH], safe="/")
        redirect_to = LOGIN_PATH if return_path == "/" else f"{LOGIN_PATH}?next={return_path}"
    return Denial(ProblemKind.UNAUTHENTICATED, reason, detail, headers, redirect_to=redirect_to)
