"""Greeting, login packets and accounts: the bytes that TiDB sends and accepts."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.tidb_sim.accounts import Account, find_account, hash_password
from sandbox.tidb_sim.greeting import (
    OFFERED_CAPABILITIES,
    LoginRefused,
    build_greeting,
    new_salt,
    parse_change_user,
    parse_greeting,
    parse_handshake_response,
)
from sandbox.tidb_sim.packets import (
    MAX_PACKET_PAYLOAD,
    TYPE_JSON,
    BadSequence,
    Capability,
    MalformedPacket,
    err,
    frames,
    lenenc_bytes,
    lenenc_int,
    ok,
    parse_payload,
    read_lenenc_int,
    result_set,
)

SALT = bytes(range(1, 21))
BASE = Capability.PROTOCOL_41 | Capability.SECURE_CONNECTION | Capability.PLUGIN_AUTH


def native_password_scramble(password: bytes, salt: bytes) -> bytes:
    """Return a client's mysql_native_password response to a salt."""
    once = hashlib.sha1(password).digest()
    mask = hashlib.sha1(salt + hashlib.sha1(once).digest()).digest()
    return bytes(left ^ right for left, right in zip(once, mask, strict=True))


def stored_hash(password: bytes) -> str:
    return "*" + hashlib.sha1(hashlib.sha1(password).digest()).hexdigest().upper()


def handshake_response(capabilities: Capability, *parts: bytes) -> bytes:
    """Return the payload of a HandshakeResponse41: its head with collation 45, then the parts."""
    return struct.pack("<IIB23x", capabilities, 1 << 24, 45) + b"".join(parts)


def test_greeting_has_tidb_layout() -> None:
    payload = build_greeting("8.0.11-TiDB-v8.5.3", 0x1_0000_0007, SALT)
    head = b"\x0a8.0.11-TiDB-v8.5.3\0" + b"\x07\0\0\0" + SALT[:8] + b"\0"
    assert payload.startswith(head)
    low, collation, status, high, size = struct.unpack_from("<HBHHB", payload, len(head))
    assert (collation, status, size) == (46, 2, 21)
    assert low | high << 16 == OFFERED_CAPABILITIES
    assert payload[len(head) + 8 :] == bytes(10) + SALT[8:] + b"\0mysql_native_password\0"
    parsed = parse_greeting(payload)
    assert (parsed.version, parsed.connection_id, parsed.capabilities) == (
        "8.0.11-TiDB-v8.5.3",
        7,
        OFFERED_CAPABILITIES,
    )


def test_offers_capabilities_of_tidb_except_zstd() -> None:
    capability_bits = (0, 1, 2, 3, 5, 7, 9, 10, 13, 15, 16, 17, 19, 20, 24)
    assert sum(1 << bit for bit in capability_bits) == OFFERED_CAPABILITIES


def test_greeting_offers_tls() -> None:
    payload = build_greeting("8", 1, SALT, offered=OFFERED_CAPABILITIES | Capability.SSL)
    assert parse_greeting(payload).capabilities == OFFERED_CAPABILITIES | Capability.SSL


def test_salt_has_no_nul_no_dollar_and_only_seven_bits() -> None:
    salt_bytes = b"".join(new_salt() for _ in range(500))
    assert len(salt_bytes) == 10_000
    assert not set(salt_bytes) & ({0, 0x24} | set(range(128, 256)))


def test_parses_full_handshake_response() -> None:
    attributes = lenenc_bytes(b"_os") + lenenc_bytes(b"Linux")
    login = parse_handshake_response(
        handshake_response(
            BASE | Capability.CONNECT_WITH_DB | Capability.CONNECT_ATTRS,
            b"anna\0" + lenenc_bytes(b"x" * 20) + b"shop\0mysql_native_password\0" + lenenc_bytes(attributes),
        )
    )
    assert (login.user, login.auth_response, login.database) == ("anna", b"x" * 20, "shop")
    assert (login.plugin, login.attributes, login.collation) == (
        "mysql_native_password",
        {"_os": "Linux"},
        45,
    )


@pytest.mark.parametrize(
    ("capabilities", "auth", "expected"),
    [
        (Capability.LENENC_AUTH, b"\xfc\x2c\x01" + b"t" * 300, b"t" * 300),
        (Capability.LENENC_AUTH, b"\x01\x00", b""),  # TiDB's parser treats length 1 as empty.
        (Capability.SECURE_CONNECTION, b"\x03abc", b"abc"),
        (Capability(0), b"abc\0", b"abc"),
    ],
)
def test_parses_three_forms_of_auth_data(capabilities: Capability, auth: bytes, expected: bytes) -> None:
    all_capabilities = Capability.PROTOCOL_41 | Capability.PLUGIN_AUTH | capabilities
    login = parse_handshake_response(handshake_response(all_capabilities, b"u\0" + auth + b"p\0"))
    assert (login.auth_response, login.plugin) == (expected, "p")


def test_ignores_malformed_connection_attributes() -> None:
    login = parse_handshake_response(
        handshake_response(BASE | Capability.CONNECT_ATTRS, b"u\0\0p\0\x09\x05ab")
    )
    assert (login.user, login.attributes) == ("u", {})


def test_refuses_clients_without_protocol_41() -> None:
    with pytest.raises(LoginRefused, match="1251"):
        parse_handshake_response(handshake_response(Capability.SECURE_CONNECTION, b"u\0\0"))
    with pytest.raises(LoginRefused, match="1251"):
        parse_handshake_response(b"\x85\x24\0\0\0old\0")  # HandshakeResponse320


@pytest.mark.parametrize("tail", [b"", b"u", b"u\0", b"u\0\x14abc"])
def test_rejects_truncated_handshake_response(tail: bytes) -> None:
    with pytest.raises(MalformedPacket):
        parse_handshake_response(handshake_response(BASE, tail))


@given(st.binary(max_size=120))
def test_parser_raises_only_malformed_packet(tail: bytes) -> None:
    for extra in (
        Capability(0),
        Capability.LENENC_AUTH,
        Capability.CONNECT_WITH_DB | Capability.CONNECT_ATTRS,
    ):
        try:
            parse_handshake_response(handshake_response(BASE | extra, tail))
        except MalformedPacket:
            continue


def test_change_user_keeps_capabilities_and_ignores_charset() -> None:
    previous = parse_handshake_response(handshake_response(BASE, b"u\0\0p\0"))
    with pytest.raises(MalformedPacket):
        parse_change_user(b"\x11anna\0\x14abc\0", previous)
    login = parse_change_user(b"\x11anna\0\x03abcshop\0\xff\x00mysql_native_password\0", previous)
    assert (login.user, login.auth_response, login.database) == ("anna", b"abc", "shop")
    assert (login.plugin, login.collation) == ("mysql_native_password", previous.collation)


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_length_encoded_integers_round_trip(value: int) -> None:
    encoded = lenenc_int(value)
    assert read_lenenc_int(encoded + b"x", 0) == (value, len(encoded))


@pytest.mark.parametrize(
    "size", [0, 5, MAX_PACKET_PAYLOAD - 1, MAX_PACKET_PAYLOAD, MAX_PACKET_PAYLOAD + 1, 2 * MAX_PACKET_PAYLOAD]
)
def test_long_payloads_are_split_and_joined(size: int) -> None:
    payload = bytes(size)
    data = bytearray(frames(0, [payload]) + b"behind")
    assert len(data) == 4 * (size // MAX_PACKET_PAYLOAD + 1) + size + 6
    assert parse_payload(data, check_sequence=True) == (payload, len(data) - 6)
    assert parse_payload(data[:-7], check_sequence=True) is None
    data[3] = 9
    assert parse_payload(data, check_sequence=False) is not None
    with pytest.raises(BadSequence, match="9 != 0"):
        parse_payload(data, check_sequence=True)


def test_result_set_encodes_null() -> None:
    packets = result_set([("a", TYPE_JSON), ("b", TYPE_JSON)], [[b"{}", None]], 2, deprecate_eof=True)
    assert packets[0] == b"\x02"
    assert packets[3] == b"\x02{}\xfb"
    assert len(packets) == 5


def test_ok_and_err_have_tidb_bytes() -> None:
    assert ok(2).hex() == "00000002000000"
    assert err(1045, "no", "28000") == b"\xff\x15\x04#28000no"
    assert err(1040, "Too many connections", None) == b"\xff\x10\x04Too many connections"


def test_native_password_response_is_valid_only_with_its_salt() -> None:
    account = Account("%", stored_hash(b"secret"))
    assert account.verify_native_password(SALT, native_password_scramble(b"secret", SALT))
    assert not account.verify_native_password(SALT[::-1], native_password_scramble(b"secret", SALT))
    assert not account.verify_native_password(SALT, native_password_scramble(b"wrong", SALT))
    assert not account.verify_native_password(SALT, b"")
    assert not account.verify_native_password(SALT, b"short")


def test_empty_password_matches_only_empty_scramble() -> None:
    account = Account("%", "")
    assert account.verify_native_password(SALT, b"")
    assert not account.verify_native_password(SALT, native_password_scramble(b"", SALT))


@pytest.mark.parametrize(
    ("privileges", "expected"),
    [
        ('{"access":0}', Account("%", "")),
        ('{"plugin":"mysql_native_password","authentication_string":"*AB"}', Account("%", "*AB")),
        (
            '{"plugin":"unix_socket","authentication_string":"caching_sha2_password:*AB"}',
            Account("%", "*AB", "caching_sha2_password"),
        ),
        (
            '{"plugin":"unix_socket","authentication_string":"tidb_auth_token:"}',
            Account("%", "", "tidb_auth_token"),
        ),
    ],
)
def test_reads_accounts(privileges: str, expected: Account) -> None:
    assert Account.from_row("%", privileges) == expected


def test_verifies_clear_password() -> None:
    account = Account("%", hash_password(b"secret"), "caching_sha2_password")
    assert account.verify_clear_password(b"secret")
    assert not account.verify_clear_password(b"wrong")
    assert not account.verify_clear_password(b"")
    assert Account("%", "").verify_clear_password(b"")
    assert not Account("%", "").verify_clear_password(b"x")


@pytest.mark.parametrize(
    ("hosts", "peer", "chosen"),
    [
        (["%", "localhost"], "127.0.0.1", "localhost"),
        (["%", "localhost"], "10.0.0.7", "%"),
        (["%", "10.0.0.7"], "10.0.0.7", "10.0.0.7"),
        (["10.0.0.8", "localhost"], "10.0.0.7", None),
        (["::1"], "::1", "::1"),
        ([], "10.0.0.7", None),
    ],
)
def test_selects_account_with_most_specific_host(hosts: list[str], peer: str, chosen: str | None) -> None:
    account = find_account([Account(host, "") for host in hosts], peer)
    assert (account.host if account else None) == chosen
