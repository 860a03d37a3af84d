"""Credentials, authorization policy, login redirects, rate limits and audit of the REST API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth.access_control import client_network
from api.auth.audit import Auditor
from api.auth.caller import Caller, CallerRole
from api.auth.credentials import (
    CredentialStore,
    PresentedCredentials,
    certificate_names,
    new_token,
    read_credentials,
    sha256,
)
from api.auth.login import safe_return_path
from api.auth.policy import AuthRequest, Denial, authorize, is_allowed_host, is_public
from api.auth.rate_limit import TokenBuckets
from controlplane.config.api import ApiSettings

OPERATOR_TOKEN, VIEWER_TOKEN = new_token(), new_token()
TLS = {"cert": "/c", "key": "/k", "client_ca": "/a"}
API = ApiSettings.model_validate(
    {
        "tls": TLS,
        "tokens": [
            {"name": "anna", "role": "operator", "sha256": sha256(OPERATOR_TOKEN.encode())},
            {"name": "vera", "role": "viewer", "sha256": sha256(VIEWER_TOKEN.encode())},
        ],
        "clients": [{"name": "ops.example", "role": "operator"}],
    }
)
CREDENTIALS = CredentialStore(API)


def authorize_request(method: str = "GET", path: str = "/v1/nodes", **fields: Any) -> Caller | Denial:
    request = AuthRequest(method, path, "10.0.0.9", **{"credentials": PresentedCredentials(), **fields})
    return authorize(request, API, CREDENTIALS)


# --- authentication ---


def test_tokens_are_random_and_long() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(token.startswith("tvy_") and len(token) == 47 for token in tokens)


@given(st.binary(max_size=600))
def test_only_the_exact_token_authenticates(guess: bytes) -> None:
    principal = CREDENTIALS.find(PresentedCredentials(bearer=guess))
    assert principal is None or guess == OPERATOR_TOKEN.encode()


@pytest.mark.parametrize("suffix", [b" ", b"\x00", b"x", b"x" * 600])
def test_extended_or_truncated_token_is_rejected(suffix: bytes) -> None:
    assert CREDENTIALS.find(PresentedCredentials(bearer=OPERATOR_TOKEN.encode() + suffix)) is None
    assert CREDENTIALS.find(PresentedCredentials(bearer=OPERATOR_TOKEN.encode()[:-1])) is None


def test_precedence_of_bearer_token_cookie_and_certificate() -> None:
    valid, wrong, names = OPERATOR_TOKEN.encode(), b"tvy_wrong", ("ops.example",)
    assert CREDENTIALS.find(PresentedCredentials(bearer=wrong, cookie=valid, certificate_names=names)) is None
    principal = CREDENTIALS.find(PresentedCredentials(cookie=wrong, certificate_names=names))
    assert principal is not None
    assert (principal.name, principal.by_cookie) == ("ops.example", False)
    principal = CREDENTIALS.find(PresentedCredentials(cookie=valid, certificate_names=names))
    assert principal is not None
    assert (principal.name, principal.by_cookie) == ("anna", True)


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"cookie", b"host"]), st.binary(max_size=80))))
def test_arbitrary_headers_do_not_authenticate(headers: list[tuple[bytes, bytes]]) -> None:
    assert CREDENTIALS.find(read_credentials(headers)) is None


@pytest.mark.parametrize(
    ("value", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer   abc ", b"abc"),
        (b"Bearer", b""),
        (b"Basic abc", b""),
        (b"abc", b""),
        (b"", b""),
    ],
)
def test_reads_token_from_authorization_header(value: bytes, token: bytes) -> None:
    assert read_credentials([(b"authorization", value)]).bearer == token


def test_reads_token_from_cookie() -> None:
    cookies = [(b"cookie", b"a=b; tidevoy_token=abc;c=d"), (b"cookie", b"x_tidevoy_token=no")]
    assert read_credentials(cookies).cookie == b"abc"


def test_reads_names_from_client_certificate() -> None:
    subject = ((("commonName", "cn.example"),),)
    names = (("DNS", "a.example"), ("URI", "spiffe://x/ops"), ("IP Address", "10.0.0.1"), ("email", "a@b"))
    both = {"subject": subject, "subjectAltName": names}
    assert certificate_names(both) == ("a.example", "spiffe://x/ops", "a@b")
    assert certificate_names({"subject": subject}) == ("cn.example",)
    assert certificate_names({"subject": subject, "subjectAltName": (("IP Address", "10.0.0.1"),)}) == ()
    assert certificate_names(None) == certificate_names({}) == ()


# --- authorization ---


@given(
    st.sampled_from(["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "get"]),
    st.sampled_from(["/v1/nodes", "/", "/healthz/", "/static", "//healthz", "/loginx", "/metrics"]),
    st.sampled_from(
        [
            PresentedCredentials(),
            PresentedCredentials(bearer=b"x"),
            PresentedCredentials(cookie=b"x"),
            PresentedCredentials(certificate_names=("x",)),
        ]
    ),
)
def test_unauthenticated_request_is_denied_for_any_method_and_path(
    method: str, path: str, credentials: PresentedCredentials
) -> None:
    verdict = authorize_request(method, path, credentials=credentials)
    assert isinstance(verdict, Denial)
    assert (verdict.kind.status, verdict.caller) == (401, None)


@given(st.text("GETPOSDLHAUNICX", min_size=1, max_size=8))
def test_viewer_may_only_read(method: str) -> None:
    verdict = authorize_request(method, credentials=PresentedCredentials(bearer=VIEWER_TOKEN.encode()))
    assert isinstance(verdict, Caller) == (method in ("GET", "HEAD", "OPTIONS"))


def test_without_authentication_every_caller_is_operator() -> None:
    verdict = authorize(
        AuthRequest("POST", "/v1/nodes", "10.0.0.9", PresentedCredentials(bearer=b"x")),
        ApiSettings(),
        CredentialStore(ApiSettings()),
    )
    assert verdict == Caller("anonymous", CallerRole.OPERATOR, "10.0.0.9")


@pytest.mark.parametrize("origin", [None, "null", "https://evil.example", "https://here.evil", "here"])
def test_cookie_is_denied_for_cross_origin_write(origin: str | None) -> None:
    cookie = PresentedCredentials(cookie=OPERATOR_TOKEN.encode())
    verdict = authorize_request("POST", credentials=cookie, origin_header=origin, host="here")
    assert isinstance(verdict, Denial)
    assert verdict.reason == "foreign_origin"
    assert isinstance(
        authorize_request("POST", credentials=cookie, origin_header="https://here", host="here"), Caller
    )


def test_with_tls_http_origin_is_cross_origin() -> None:
    cookie = PresentedCredentials(cookie=OPERATOR_TOKEN.encode())
    for origin, is_admitted in (("https://here", True), ("http://here", False)):
        verdict = authorize_request(
            "POST", credentials=cookie, origin_header=origin, host="here", is_tls=True
        )
        assert isinstance(verdict, Caller) == is_admitted


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", True),
        ("10.0.0.1", True),
        ("10.0.0.1:3080", True),
        ("[fd00::1]", True),
        ("[fd00::1]:3080", True),
        ("controlplane:3080", True),
        ("a.localhost:3080", True),
        ("OPS.example.org:3080", True),
        ("evil.example", False),
        ("evil.example.:3080", False),
        ("10.0.0.1.evil.example", False),
        ("10.0.0.1:3080.evil.example", False),
        ("evil.example:10.0.0.1", False),
        (f"{'a' * 300}.localhost", False),
    ],
)
def test_allows_only_known_host_names(host: str, expected: bool) -> None:
    assert is_allowed_host(host, ApiSettings(host_names=("ops.example.org",))) == expected


def test_denial_never_contains_the_credentials() -> None:
    secret = "tvy_must-not-be-disclosed"
    for credentials in (
        PresentedCredentials(bearer=secret.encode()),
        PresentedCredentials(cookie=secret.encode()),
        PresentedCredentials(certificate_names=(secret,)),
    ):
        assert secret not in repr(authorize_request(credentials=credentials))


@given(st.text(max_size=30))
def test_only_listed_paths_are_public(path: str) -> None:
    expected = path in ("/healthz", "/readyz", "/login", "/logout") or path.startswith("/static/")
    assert is_public(path, API) == expected


@given(st.text("/\\a.:?#@ \r\n\t%", max_size=12))
def test_login_redirects_only_to_local_paths(requested: str) -> None:
    path = safe_return_path(requested)
    assert path.startswith("/")
    assert not path.startswith("//")
    assert not set(path) & set("\\ \r\n\t")
    assert path in (requested, "/")


# --- rate limits ---


@given(
    st.floats(0.1, 100),
    st.integers(1, 50),
    st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_bucket_never_exceeds_its_rate(rate: float, burst: int, pauses: list[float]) -> None:
    now, taken = 0.0, 0
    buckets = TokenBuckets(1, lambda: now)
    for pause in pauses:
        now += pause
        wait = buckets.take("key", rate, burst)
        taken += wait == 0
        assert wait >= 0
        if wait:  # the next token is available after this time
            now += wait * 1.001 + 1e-6
            assert buckets.take("key", rate, burst) == 0
            taken += 1
    assert taken <= burst + rate * now + 1


def test_number_of_buckets_is_bounded() -> None:
    buckets = TokenBuckets(3, lambda: 0.0)
    for key in range(100):
        assert buckets.take(key, 1.0, 1.0) == 0
    assert len(buckets) == 3
    assert buckets.take(99, 1.0, 1.0) == 1.0  # the most recently used buckets are kept


@pytest.mark.parametrize(
    ("ip", "network"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", "unknown address"),
        ("evil.example", "unknown address"),
    ],
)
def test_clients_are_limited_per_ipv4_address_or_ipv6_64_network(ip: str, network: str) -> None:
    assert client_network(ip) == network


# --- audit ---


def test_write_to_unknown_path_emits_no_audit_event() -> None:
    events: list[tuple[object, ...]] = []
    auditor = Auditor(lambda *event: events.append(event), list)
    caller = Caller("anna", CallerRole.OPERATOR, "10.0.0.1")
    scope = {"type": "http", "method": "POST", "path": "/nowhere", "state": {}, "headers": []}
    auditor.record_write(scope, caller, 404)
    auditor.record_denial(scope, caller, 403)
    assert events == []
