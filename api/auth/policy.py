"""What a request may do, from what it shows: a pure decision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from api.auth.caller import ANONYMOUS, Caller, Role
from api.auth.credentials import Holder, KeyRing, Shown
from api.problems import Kind
from controlplane import address as addresses
from controlplane.config.api import Api

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOGIN, LOGOUT = "/login", "/logout"
_OPEN = frozenset({"/healthz", "/readyz", LOGIN, LOGOUT})
_OPEN_BELOW = "/static/"
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")  # a name or IP address, and a port
_LONGEST_HOST = 255  # characters of one that are told
_LONGEST_WAY_BACK = 512  # characters of a path to come back to after the login


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as the doors look at it."""

    method: str
    path: str  # decoded, as routes are matched
    origin: str  # the peer's IP address
    shown: Shown
    page: str | None = None  # the header `Origin`: the page of a browser that sends it
    host: str = ""  # the header `Host`
    is_tls: bool = False
    wants_html: bool = False
    by_htmx: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in. `reason` is a label of a metric; `counts`: against its address."""

    kind: Kind
    reason: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    caller: Caller | None = None
    counts: bool = True
    go_to: str | None = None  # where a person's browser is sent instead


def is_open(path: str, api: Api) -> bool:
    """Whether anybody may ask for this."""
    return path in _OPEN or path.startswith(_OPEN_BELOW) or (api.open_metrics and path == "/metrics")


def decide(asked: Asked, api: Api, keys: KeyRing) -> Caller | Refusal:
    """Who calls; or why the request goes no further."""
    if not api.asks:
        caller = Caller(ANONYMOUS, Role.OPERATOR, asked.origin)
        if not is_ours(asked.host, api):
            return _misdirected(asked, caller)
        return _within_origin(asked, caller, None)
    holder = keys.holder(asked.shown)
    if holder is None and is_open(asked.path, api):
        return _within_origin(asked, Caller(ANONYMOUS, Role.VIEWER, asked.origin), None)
    if holder is None:
        return _unauthenticated(asked, api)
    caller = Caller(holder.name, holder.role, asked.origin)
    if asked.method not in SAFE_METHODS and not caller.may_write and asked.path not in (LOGIN, LOGOUT):
        detail = f"{caller.name} is a viewer, and may only read; ask for a token with the role operator"
        return Refusal(Kind.FORBIDDEN, "forbidden", detail, caller=caller, counts=False)
    return _within_origin(asked, caller, holder)


def _within_origin(asked: Asked, caller: Caller, holder: Holder | None) -> Caller | Refusal:
    """No web page but our own may change anything through the browser of somebody who may.

    Browsers name the page's origin in every request that is not a plain read; other clients name none, and
    send no cookie either.
    """
    if asked.method in SAFE_METHODS:
        return caller
    by_cookie = holder is not None and holder.by_cookie
    if asked.page is None:
        if not by_cookie:
            return caller
        page, remedy = "a page that the browser does not name", "send the token as `Authorization: Bearer`"
    # Without TLS here there may be some before us, and a browser names what it sees.
    elif asked.page == f"https://{asked.host}" or (asked.page == f"http://{asked.host}" and not asked.is_tls):
        return caller
    else:
        page, remedy = f"pages of {asked.page}", "open the control plane's own page"
    detail = f"{page} may only read; {remedy}"
    return Refusal(Kind.FOREIGN_ORIGIN, "foreign_origin", detail, caller=caller, counts=False)


def is_ours(host: str, api: Api) -> bool:
    """Whether the header `Host` is none that somebody else's name would give.

    Who owns a name can let it lead here, and to a browser his page is then one of ours (DNS rebinding). An IP
    address is no name, nobody on the internet owns one without a dot, and programs may leave the header out.
    """
    if len(host) > _LONGEST_HOST or (parts := _HOST.fullmatch(host.lower())) is None:
        return False
    name = parts[1].strip("[]")
    return (
        "." not in name
        or addresses.literal_ip(name) is not None
        or name.endswith(".localhost")
        or name in (api.listen.rpartition(":")[0].lower(), *api.host_names)
    )


def _misdirected(asked: Asked, caller: Caller) -> Refusal:
    name = asked.host[:_LONGEST_HOST]
    detail = f"{name} is not known to lead here; use an IP address, or add the name to api.host_names"
    return Refusal(Kind.MISDIRECTED, "misdirected", detail, caller=caller, counts=False)


def _unauthenticated(asked: Asked, api: Api) -> Refusal:
    if asked.shown.bearer is not None:
        reason, detail = "wrong_token", "the token is not known here; `tidevoy token create` makes one"
    elif asked.shown.cookie is not None:
        reason, detail = "wrong_token", "the login is no longer good; log in again"
    elif asked.shown.names:
        reason = "unknown_certificate"
        detail = "no name in the client certificate is known here; name it in api.clients"
    else:
        reason = "no_token"
        ways = [*(["send `Authorization: Bearer TOKEN`"] if api.tokens else [])]
        ways += ["show a client certificate"] if api.clients else []
        detail = f"it is not known who is calling; {' or '.join(ways)}"
    headers = {"WWW-Authenticate": 'Bearer realm="tidevoy"'}
    if asked.by_htmx:
        headers["HX-Redirect"] = LOGIN
    go_to = None
    if asked.wants_html and asked.method == "GET" and not asked.by_htmx:
        way_back = quote(asked.path[:_LONGEST_WAY_BACK], safe="/")
        go_to = LOGIN if way_back == "/" else f"{LOGIN}?next={way_back}"
    return Refusal(Kind.UNAUTHENTICATED, reason, detail, headers, go_to=go_to)
