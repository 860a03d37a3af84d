"""The doors' decisions: credentials, rules, where a login leads, limits; and the filter for the kernel."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.auth import kernel_filter
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
from api.auth.rate_limit import TokenBucket, TokenBuckets
from api.auth.source_tracker import MAX_BANS, SourceTracker, source_key
from controlplane.config.api import ApiLimitSettings, ApiSettings

TOKEN, OTHER = new_token(), new_token()
TLS = {"cert": "/c", "key": "/k", "client_ca": "/a"}
API = ApiSettings.model_validate(
    {
        "tls": TLS,
        "tokens": [
            {"name": "anna", "role": "operator", "sha256": sha256(TOKEN.encode())},
            {"name": "vera", "role": "viewer", "sha256": sha256(OTHER.encode())},
        ],
        "clients": [{"name": "ops.example", "role": "operator"}],
    }
)
KEYS = CredentialStore(API)


def ask(method: str = "GET", path: str = "/v1/nodes", **more: Any) -> Caller | Denial:
    return authorize(
        AuthRequest(method, path, "10.0.0.9", **{"credentials": PresentedCredentials(), **more}), API, KEYS
    )


# --- who ---


def test_tokens_are_random_and_long() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(token.startswith("tvy_") and len(token) == 47 for token in tokens)


@given(st.binary(max_size=600))
def test_nothing_but_the_token_opens(guess: bytes) -> None:
    holder = KEYS.find(PresentedCredentials(bearer=guess))
    assert holder is None or guess == TOKEN.encode()


@pytest.mark.parametrize("end", [b" ", b"\x00", b"x", b"x" * 600])
def test_a_token_with_something_behind_it_is_another(end: bytes) -> None:
    assert KEYS.find(PresentedCredentials(bearer=TOKEN.encode() + end)) is None
    assert KEYS.find(PresentedCredentials(bearer=TOKEN.encode()[:-1])) is None


def test_what_counts_when_several_are_shown() -> None:
    right, wrong, names = TOKEN.encode(), b"tvy_wrong", ("ops.example",)
    assert KEYS.find(PresentedCredentials(bearer=wrong, cookie=right, certificate_names=names)) is None
    found = KEYS.find(PresentedCredentials(cookie=wrong, certificate_names=names))
    assert found is not None
    assert (found.name, found.by_cookie) == ("ops.example", False)
    found = KEYS.find(PresentedCredentials(cookie=right, certificate_names=names))
    assert found is not None
    assert (found.name, found.by_cookie) == ("anna", True)


@given(st.lists(st.tuples(st.sampled_from([b"authorization", b"cookie", b"host"]), st.binary(max_size=80))))
def test_whatever_headers_hold_is_no_credential(headers: list[tuple[bytes, bytes]]) -> None:
    assert KEYS.find(read_credentials(headers)) is None


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
def test_the_token_of_a_header(value: bytes, token: bytes) -> None:
    assert read_credentials([(b"authorization", value)]).bearer == token


def test_the_token_of_a_cookie() -> None:
    cookies = [(b"cookie", b"a=b; tidevoy_token=abc;c=d"), (b"cookie", b"x_tidevoy_token=no")]
    assert read_credentials(cookies).cookie == b"abc"


def test_the_names_of_a_certificate() -> None:
    subject = ((("commonName", "cn.example"),),)
    names = (("DNS", "a.example"), ("URI", "spiffe://x/ops"), ("IP Address", "10.0.0.1"), ("email", "a@b"))
    both = {"subject": subject, "subjectAltName": names}
    assert certificate_names(both) == ("a.example", "spiffe://x/ops", "a@b")
    assert certificate_names({"subject": subject}) == ("cn.example",)
    assert certificate_names({"subject": subject, "subjectAltName": (("IP Address", "10.0.0.1"),)}) == ()
    assert certificate_names(None) == certificate_names({}) == ()


# --- may ---


@given(
    st.sampled_from(["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "get"]),
    st.sampled_from(
        ["/v1/nodes", "/", "/healthz/", "/static", "/static", "//healthz", "/loginx", "/metrics"]
    ),
    st.sampled_from(
        [
            PresentedCredentials(),
            PresentedCredentials(bearer=b"x"),
            PresentedCredentials(cookie=b"x"),
            PresentedCredentials(certificate_names=("x",)),
        ]
    ),
)
def test_who_is_not_known_is_refused_whatever_it_asks(
    method: str, path: str, what: PresentedCredentials
) -> None:
    verdict = ask(method, path, credentials=what)
    assert isinstance(verdict, Denial)
    assert (verdict.kind.value.status, verdict.caller) == (401, None)


@given(st.text("GETPOSDLHAUNICX", min_size=1, max_size=8))
def test_a_viewer_does_nothing_but_read(method: str) -> None:
    verdict = ask(method, credentials=PresentedCredentials(bearer=OTHER.encode()))
    assert isinstance(verdict, Caller) == (method in ("GET", "HEAD", "OPTIONS"))


def test_where_nobody_is_asked() -> None:
    verdict = authorize(
        AuthRequest("POST", "/v1/nodes", "10.0.0.9", PresentedCredentials(bearer=b"x")),
        ApiSettings(),
        CredentialStore(ApiSettings()),
    )
    assert verdict == Caller("anonymous", CallerRole.OPERATOR, "10.0.0.9")


@pytest.mark.parametrize("page", [None, "null", "https://evil.example", "https://here.evil", "here"])
def test_a_cookie_changes_nothing_from_elsewhere(page: str | None) -> None:
    cookie = PresentedCredentials(cookie=TOKEN.encode())
    verdict = ask("POST", credentials=cookie, origin_header=page, host="here")
    assert isinstance(verdict, Denial)
    assert verdict.reason == "foreign_origin"
    assert isinstance(ask("POST", credentials=cookie, origin_header="https://here", host="here"), Caller)


def test_with_tls_a_page_without_it_is_foreign() -> None:
    cookie = PresentedCredentials(cookie=TOKEN.encode())
    for page, is_let_in in (("https://here", True), ("http://here", False)):
        verdict = ask("POST", credentials=cookie, origin_header=page, host="here", is_tls=True)
        assert isinstance(verdict, Caller) == is_let_in


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
def test_which_names_lead_here(host: str, expected: bool) -> None:
    assert is_allowed_host(host, ApiSettings(host_names=("ops.example.org",))) == expected


def test_a_refusal_never_repeats_what_was_shown() -> None:
    secret = "tvy_not-to-be-told"
    for what in (
        PresentedCredentials(bearer=secret.encode()),
        PresentedCredentials(cookie=secret.encode()),
        PresentedCredentials(certificate_names=(secret,)),
    ):
        assert secret not in repr(ask(credentials=what))


@given(st.text(max_size=30))
def test_what_is_open_is_a_short_list(path: str) -> None:
    expected = path in ("/healthz", "/readyz", "/login", "/logout") or path.startswith("/static/")
    assert is_public(path, API) == expected


@given(st.text("/\\a.:?#@ \r\n\t%", max_size=12))
def test_a_login_leads_to_a_path_of_ours(wanted: str) -> None:
    path = safe_return_path(wanted)
    assert path.startswith("/")
    assert not path.startswith("//")
    assert not set(path) & set("\\ \r\n\t")
    assert path in (wanted, "/")


# --- how often ---


@given(
    st.floats(0.1, 100),
    st.integers(1, 50),
    st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_a_bucket_gives_no_more_than_its_rate(rate: float, burst: int, pauses: list[float]) -> None:
    bucket, now, given_out = TokenBucket(float(burst), 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        wait = bucket.take(rate, float(burst), now)
        given_out += wait == 0
        assert wait >= 0
        if wait:  # and no sooner
            assert TokenBucket(bucket.tokens, now).take(rate, float(burst), now + wait * 1.001 + 1e-6) == 0
    assert given_out <= burst + rate * now + 1


def test_buckets_are_bounded() -> None:
    buckets = TokenBuckets(3)
    for key in range(100):
        buckets.take(key, 1.0, 1.0, 0.0)
    assert len(buckets) == 3


LIMITS = ApiLimitSettings(connections=8, connections_per_source=4, refusals_per_second=2)


def banned_after(sources: SourceTracker, source: str, now: float) -> tuple[int, float]:
    """How many refusals it takes, and how long the ban lasts."""
    for count in range(1, 1000):
        if seconds := sources.record_denial(source, LIMITS, now):
            return count, seconds
    raise AssertionError("never")


def test_bans_grow_and_are_forgiven() -> None:
    sources, now = SourceTracker(), 1000.0
    lasts = []
    for _ in range(5):
        _, seconds = banned_after(sources, "10.0.0.9", now)
        assert sources.is_banned("10.0.0.9", now + seconds - 0.01)
        assert not sources.is_banned("10.0.0.9", now + seconds)
        assert sources.admit_connection("10.0.0.9", LIMITS, now, requires_auth=True) == "banned"
        lasts.append(seconds)
        now += seconds
    assert lasts == [10, 20, 40, 60, 60]
    assert banned_after(sources, "10.0.0.9", now + 601)[1] == 10
    assert not sources.is_banned("10.0.0.8", now)


def test_few_refusals_ban_nobody() -> None:
    sources = SourceTracker()
    assert not any(sources.record_denial("10.0.0.9", LIMITS, float(second)) for second in range(1000))
    assert banned_after(sources, "10.0.0.8", 0.0)[0] == 31  # 30 are allowed at once


def test_the_table_of_bans_is_bounded() -> None:
    sources = SourceTracker()
    for number in range(2 * MAX_BANS):
        banned_after(sources, f"10.0.{number // 256}.{number % 256}", 0.0)
    assert len(sources.banned_sources(0.0)) == MAX_BANS
    assert sources.next_ban_end(0.0) == 10.0
    assert sources.next_ban_end(10.0) is None


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=200))
def test_connections_are_counted_right(steps: list[tuple[str, bool]]) -> None:
    sources = SourceTracker()
    held = {"a": 0, "b": 0, "c": 0}
    for source, opens in steps:
        if opens:
            refused = sources.admit_connection(source, LIMITS, 0.0, requires_auth=False)
            full = sum(held.values()) >= 8 or held[source] >= 4
            assert bool(refused) == full
            held[source] += not refused
        elif held[source]:
            sources.release_connection(source)
            held[source] -= 1
        assert sources.connections == sum(held.values())


def test_a_crowd_of_strangers_does_not_keep_out_who_is_known() -> None:
    sources, roomy = SourceTracker(), ApiLimitSettings(connections=65_536)
    sources.mark_trusted("10.0.0.1", 0.0)
    outcomes = [
        sources.admit_connection(f"10.1.{n // 256}.{n % 256}", roomy, 0.0, requires_auth=True)
        for n in range(500)
    ]
    assert outcomes == [""] * 100 + ["strangers"] * 400
    assert sources.admit_connection("10.0.0.1", roomy, 0.0, requires_auth=True) == ""
    assert sources.admit_connection("10.9.0.1", roomy, 0.0, requires_auth=False) == ""


@pytest.mark.parametrize(
    ("ip", "source"),
    [
        ("10.0.0.9", "10.0.0.9"),
        ("::ffff:10.0.0.9", "10.0.0.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_what_one_caller_cannot_change_at_will(ip: str, source: str) -> None:
    assert source_key(ip) == source


# --- the kernel's filter ---


def passes(program: list[kernel_filter.Instruction], header: bytes) -> bool:
    """What the kernel does with a packet whose IP header is this."""
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        if operation in (0x20, 0x30):
            offset, width = operand - 0xFFF00000, 4 if operation == 0x20 else 1
            accumulator = int.from_bytes(header[offset : offset + width])
        elif operation == 0x74:
            accumulator >>= operand
        elif operation == 0x15:
            at += if_true if accumulator == operand else if_false
        elif operation == 0x05:
            at += operand
        else:
            assert operation == 0x06
            return operand != 0


def header_from(ip: str) -> bytes:
    address = ipaddress.ip_address(ip)
    if address.version == 4:
        return b"\x45" + bytes(11) + address.packed + bytes(4)
    return b"\x60" + bytes(7) + address.packed + bytes(16)


_V4 = st.ip_addresses(v=4).map(str)
_V6 = st.ip_addresses(v=6).filter(lambda ip: getattr(ip, "ipv4_mapped", None) is None).map(str)


@given(st.lists(_V4 | _V6, max_size=20), _V4 | _V6)
def test_the_filter_drops_what_is_shut_out_and_nothing_else(banned: list[str], other: str) -> None:
    sources = sorted({source_key(ip) for ip in banned})
    program = kernel_filter.build_filter(sources)
    assert len(program) <= 4096
    assert not any(passes(program, header_from(ip)) for ip in banned)
    assert passes(program, header_from(other)) == (source_key(other) not in sources)


def test_a_filter_that_cannot_be_had_leaves_none_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert kernel_filter.drop_sources(listener, ["127.0.0.2"])
        too_many = [f"2001:db8:0:{number:x}::/64" for number in range(1000)]
        assert not kernel_filter.drop_sources(listener, too_many)
        source = ("127.0.0.2", 0)
        socket.create_connection(listener.getsockname(), timeout=1, source_address=source).close()


# --- telling ---


def test_a_write_to_nothing_is_not_told() -> None:
    told: list[tuple[object, ...]] = []
    auditor = Auditor(lambda *event: told.append(event), list)
    caller = Caller("anna", CallerRole.OPERATOR, "10.0.0.1")
    scope = {"type": "http", "method": "POST", "path": "/nowhere", "state": {}, "headers": []}
    auditor.record_write(scope, caller, 404)
    auditor.record_denial(scope, caller, 403)
    assert told == []
