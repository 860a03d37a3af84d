//! Logins that fail: the error, its sequence number, and how many bytes are taken.

mod login_parties;

use login_parties::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{ClientTls, Compression, FirstPacket, NodeTls, Progress, Rules, first_packet};
use mysql_proto::packet::Header;

const PLUGIN: &str = "mysql_native_password";

/// A login whose client got the greeting.
fn greeted(rules: Rules, piece: usize) -> LoginExchange {
    let mut exchange = LoginExchange::new(rules, piece);
    exchange.start(&Server::TiDb.greeting(true, PLUGIN), false, CLIENT);
    exchange
}

fn header(length: usize, sequence: u8) -> [u8; 4] {
    Header { length, sequence }.bytes()
}

#[test]
fn first_packets_other_than_a_login_are_rejected() {
    let good = response(CLIENT, b"", PLUGIN);
    let ssl = head(CLIENT.with(Capabilities::SSL));
    let old = CLIENT.without(Capabilities::PROTOCOL_41);
    let mut no_end = head(CLIENT);
    no_end.extend(b"root");
    let cases: [(&str, Vec<u8>, ProxyError, bool); 11] = [
        ("empty", frame(1, b""), ProxyError::BadPacket, false),
        ("short", frame(1, &good[..31]), ProxyError::BadPacket, false),
        ("no user", frame(1, &no_end), ProxyError::BadPacket, true),
        ("number 0", frame(0, &good), ProxyError::BadPacket, false),
        ("number 2", frame(2, &good), ProxyError::BadPacket, false),
        ("HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec(), ProxyError::BadPacket, false),
        ("bare TLS", b"\x16\x03\x01\x02\x00\x01\x00".to_vec(), ProxyError::BadPacket, false),
        ("old", frame(1, b"\x85\x24\0\0\0root\0\x08abcdefgh"), ProxyError::TooOld, false),
        ("old TLS", frame(1, b"\x85\x2c\0\0\0"), ProxyError::TooOld, false),
        ("old bits", frame(1, &response(old, b"", PLUGIN)), ProxyError::TooOld, false),
        ("large", header(1024 * 1024 + 1, 1).to_vec(), ProxyError::PacketTooLarge, false),
    ];
    for (name, bytes, why, with_state) in cases {
        for piece in [1, 3, 4096] {
            println!("{name}, pieces of {piece}");
            let mut exchange = greeted(RULES, piece);
            let (_, progress) = exchange.send_client_bytes(&bytes);
            exchange.client_next = bytes[3].wrapping_add(1);
            exchange.expect_rejection(progress, why, with_state);
            assert_eq!(exchange.send_client_bytes(b"more"), (0, progress));
            assert_eq!(exchange.send_node_bytes(b"more"), (0, progress));
        }
    }
    // TLS that was not offered, or a second SSLRequest.
    let disabled = Rules { client_tls: ClientTls::Disabled, ..RULES };
    let mut exchange = greeted(disabled, 4096);
    let progress = exchange.send_client_packet(&ssl);
    exchange.expect_rejection(progress, ProxyError::BadPacket, false);
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.send_client_packet(&ssl), Progress::StartClientTls);
    let progress = exchange.send_client_packet(&ssl);
    exchange.expect_rejection(progress, ProxyError::BadPacket, true);
}

#[test]
fn response_of_1_mib_is_accepted_and_a_larger_one_rejected() {
    let mut payload = response(CLIENT.without(Capabilities::CONNECT_ATTRS), b"", PLUGIN);
    payload.resize(1024 * 1024, 0);
    let mut exchange = greeted(RULES, usize::MAX);
    assert_eq!(exchange.send_client_packet(&payload), Progress::More);
    assert_eq!(exchange.receive_as_node().len(), payload.len());
    // Rejected by the header alone, before the payload arrives; also with TLS, where the protocol is known.
    let mut exchange = greeted(RULES, usize::MAX);
    exchange.send_client_packet(&head(CLIENT.with(Capabilities::SSL)));
    let (taken, progress) = exchange.send_client_bytes(&header(1024 * 1024 + 1, 2));
    assert_eq!(taken, 4);
    exchange.client_next = 3;
    exchange.expect_rejection(progress, ProxyError::PacketTooLarge, true);
}

#[test]
fn clients_without_tls_are_rejected_if_tls_is_required() {
    let rules = Rules { client_tls: ClientTls::Required, ..RULES };
    for claimed in [CLIENT, CLIENT.with(Capabilities::SSL)] {
        let mut exchange = greeted(rules, 5);
        let progress = exchange.send_client_packet(&response(claimed, &[7; 20], PLUGIN));
        exchange.expect_rejection(progress, ProxyError::TlsRequired, true);
    }
    let mut exchange = greeted(rules, 5);
    let ssl = CLIENT.with(Capabilities::SSL);
    assert_eq!(exchange.send_client_packet(&head(ssl)), Progress::StartClientTls);
    assert_eq!(exchange.send_client_packet(&response(ssl, &[7; 20], PLUGIN)), Progress::More);
}

/// Clients such as PHP's mysqlnd rely on their own request: they compress after the OK packet, and would wait for ever.
#[test]
fn compression_that_was_not_offered_is_rejected() {
    let both = Capabilities::COMPRESS.with(Capabilities::ZSTD_COMPRESSION);
    let passed = Rules { compression: Compression::Passthrough, ..RULES };
    let all = Server::TiDb.capabilities(true);
    for (rules, node, offered) in [
        (RULES, all, Capabilities(0)),
        // A change of user could expose a password unnoticed.
        (passed, all.without(Capabilities::SSL), Capabilities(0)),
        (passed, all.without(both), Capabilities(0)),
        (passed, all.without(Capabilities::ZSTD_COMPRESSION), Capabilities::COMPRESS),
    ] {
        for asked in [Capabilities::COMPRESS, Capabilities::ZSTD_COMPRESSION, both] {
            // Without TLS; with TLS; with TLS, and requested only in the response.
            for (tls, outside, inside) in [(false, asked, asked), (true, asked, asked), (true, Capabilities(0), asked)]
            {
                let mut exchange = LoginExchange::new(rules, 4096);
                exchange.start(&greeting(node, "8.0", 0, PLUGIN), tls, CLIENT.with(outside));
                let ssl = if tls { Capabilities::SSL } else { Capabilities(0) };
                let progress = exchange.send_client_packet(&response(CLIENT.with(inside).with(ssl), &[7; 20], PLUGIN));
                if offered.has(asked) {
                    assert_eq!(progress, Progress::More);
                } else {
                    exchange.expect_rejection(progress, ProxyError::CompressionNotOffered, true);
                }
            }
        }
    }
}

#[test]
fn login_knows_whether_it_awaits_the_client() {
    let mut exchange = LoginExchange::new(RULES, 4096);
    assert!(!exchange.login.awaits_client(), "the greeting is still awaited");
    exchange.start(&Server::TiDb.greeting(true, PLUGIN), false, CLIENT);
    assert!(exchange.login.awaits_client());
    // A node that has begun a packet must send its rest.
    exchange.send_node_bytes(b"\x05");
    assert!(!exchange.login.awaits_client());
    let mut exchange = greeted(RULES, 4096);
    let ssl = frame(1, &head(CLIENT.with(Capabilities::SSL)));
    for piece in [&ssl[..20], &ssl[20..]] {
        exchange.send_client_bytes(piece);
        assert!(exchange.login.awaits_client(), "the rest of the SSLRequest, or TLS and the response");
    }
    exchange.client_next = 2;
    let first = frame(2, &response(CLIENT, &[7; 32], "caching_sha2_password"));
    exchange.send_client_bytes(&first[..40]);
    assert!(exchange.login.awaits_client());
    exchange.send_client_bytes(&first[40..]);
    assert!(!exchange.login.awaits_client());
    exchange.receive_as_node();
    exchange.send_node_packet(&[1, 4]);
    assert!(exchange.login.awaits_client());
    // A held response that waits for the password: the node does not know of it.
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password")), Progress::More);
    assert!(exchange.login.awaits_client());
    exchange.send_node_packet(b"\xff\x10\x04Too many connections");
    assert!(!exchange.login.awaits_client(), "the login has ended");
}

#[test]
fn packets_of_a_client_out_of_turn_are_rejected() {
    let first = frame(1, &response(CLIENT, &[7; 20], PLUGIN));
    for sequence in [0, 2, 3] {
        let both = [first.clone(), frame(sequence, b"\x03select 1")].concat();
        for piece in [1, first.len(), 4096] {
            let mut exchange = greeted(RULES, piece);
            let (taken, progress) = exchange.send_client_bytes(&both);
            assert_eq!((taken, progress), (first.len(), Progress::Rejected(ProxyError::BadPacket)));
            assert_eq!(exchange.to_client, ProxyError::BadPacket.packet(2, true));
        }
    }
    // Nor before the greeting, like a port scanner or a client of another protocol.
    let mut exchange = LoginExchange::new(RULES, 1);
    let (taken, progress) = exchange.send_client_bytes(b"EHLO example\r\n");
    assert_eq!(taken, 0);
    exchange.expect_rejection(progress, ProxyError::BadPacket, false);
}

#[test]
fn invalid_greetings_and_early_packets_of_a_node_are_rejected() {
    let greeting = Server::MySql.greeting(true, PLUGIN);
    for bytes in [
        frame(0, b"\x09old"),
        frame(0, b""),
        frame(1, &greeting),
        frame(0, b"\xff"),
        header(64 * 1024 + 1, 0).to_vec(),
        b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
    ] {
        for piece in [1, 4096] {
            let mut exchange = LoginExchange::new(RULES, piece);
            let (_, progress) = exchange.send_node_bytes(&bytes);
            exchange.expect_rejection(progress, ProxyError::NodeProtocol, false);
        }
    }
    let required = Rules { node_tls: NodeTls::Required, ..RULES };
    let mut exchange = LoginExchange::new(required, 4096);
    let progress = exchange.send_node_packet(&Server::MySql.greeting(false, PLUGIN));
    exchange.expect_rejection(progress, ProxyError::NodeWithoutTls, false);
    // An OK packet before the client's response.
    for (node_tls, why) in
        [(NodeTls::Disabled, ProxyError::NodeProtocol), (NodeTls::Preferred, ProxyError::NodeTlsFailed)]
    {
        let mut exchange = greeted(Rules { node_tls, ..RULES }, 4096);
        let progress = exchange.send_node_packet(OK);
        exchange.expect_rejection(progress, why, false);
    }
}

#[test]
fn invalid_packets_of_a_node_during_the_login_are_rejected() {
    for (plugin, payload, number) in [
        (PLUGIN, &b"\x02"[..], 2),
        (PLUGIN, b"\xfb", 2),
        ("caching_sha2_password", b"P\0salt", 2),
        (PLUGIN, OK, 3),
        (PLUGIN, b"\xfemysql_native_password\0", 0),
    ] {
        let mut exchange = greeted(Rules { node_tls: NodeTls::Disabled, ..RULES }, 3);
        exchange.send_client_packet(&response(CLIENT, &[7; 20], plugin));
        exchange.to_node.clear();
        let (_, progress) = exchange.send_node_bytes(&frame(number, payload));
        exchange.expect_rejection(progress, ProxyError::NodeProtocol, true);
    }
    // While the proxy holds a response that waits for a password.
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password")), Progress::More);
    exchange.receive_as_client();
    let progress = exchange.send_node_packet(OK);
    exchange.expect_rejection(progress, ProxyError::NodeTlsFailed, true);
}

#[test]
fn error_of_the_node_reaches_the_client_at_any_time() {
    let with = b"\xff\x15\x04#28000Access denied";
    let without = b"\xff\x10\x04Too many connections";
    // In place of the greeting.
    let mut exchange = LoginExchange::new(RULES, 2);
    let mut bytes = frame(0, without);
    bytes.push(0x55);
    assert_eq!(exchange.send_node_bytes(&bytes), (bytes.len() - 1, Progress::Denied(1040)));
    assert_eq!(exchange.receive_as_client(), without);
    // After the greeting, before or within the client's first packet.
    for (begun, number) in [(0, 1), (1, 2), (5, 2)] {
        let mut exchange = greeted(RULES, 2);
        exchange.send_client_bytes(&frame(1, &response(CLIENT, b"", PLUGIN))[..begun]);
        assert_eq!(exchange.send_node_packet(without), Progress::Denied(1040));
        exchange.client_next = number;
        assert_eq!(exchange.receive_as_client(), without);
    }
    // As the answer to the response, with different sequence numbers on both sides and a wrong number from the node.
    for (client_tls, node_tls) in [(false, false), (false, true), (true, false), (true, true)] {
        for wrong in [0, 9] {
            let mut exchange = LoginExchange::new(RULES, 2);
            exchange.start(&Server::TiDb.greeting(node_tls, PLUGIN), client_tls, CLIENT);
            exchange.send_client_packet(&response(CLIENT, &[7; 20], PLUGIN));
            exchange.receive_as_node();
            exchange.node_next += wrong;
            assert_eq!(exchange.send_node_packet(with), Progress::Denied(1045));
            assert_eq!(exchange.receive_as_client(), with);
        }
    }
}

#[test]
fn password_for_another_key_or_salt_is_rejected() {
    let other_salt = hidden(OTHER_SALT);
    for encrypted in [&[0x33; 256][..], &other_salt, b"open sesame\0"] {
        for asks in [false, true] {
            let mut exchange = greeted(RULES, 100);
            exchange.send_client_packet(&response(CLIENT, &[7; 32], "caching_sha2_password"));
            exchange.receive_as_node();
            exchange.send_node_packet(&[1, 4]);
            exchange.receive_as_client();
            if asks {
                exchange.send_client_packet(&[2]);
                exchange.receive_as_client();
            }
            let progress = exchange.send_client_packet(encrypted);
            exchange.expect_rejection(progress, ProxyError::PasswordUnreadable, true);
        }
        let mut exchange = greeted(RULES, 100);
        let progress = exchange.send_client_packet(&response(CLIENT, encrypted, "sha256_password"));
        exchange.expect_rejection(progress, ProxyError::PasswordUnreadable, true);
    }
    // The client may request the key only once.
    let mut exchange = greeted(RULES, 100);
    exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password"));
    exchange.receive_as_client();
    let progress = exchange.send_client_packet(&[1]);
    exchange.expect_rejection(progress, ProxyError::PasswordUnreadable, true);
}

#[test]
fn error_packet_of_the_caller_fits_the_progress_of_the_login() {
    let why = ProxyError::LoginTooSlow;
    let mut exchange = LoginExchange::new(RULES, 4096);
    assert_eq!(exchange.login.error_packet(why), why.packet(0, false));
    exchange.send_node_bytes(&frame(0, &Server::TiDb.greeting(true, PLUGIN))[..20]);
    assert_eq!(exchange.login.error_packet(why), why.packet(0, false));
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.login.error_packet(why), why.packet(1, false));
    let ssl = frame(1, &head(CLIENT.with(Capabilities::SSL)));
    for begun in [1, 4, 20] {
        let mut exchange = greeted(RULES, 4096);
        exchange.send_client_bytes(&ssl[..begun]);
        assert_eq!(exchange.login.error_packet(why), why.packet(2, false));
    }
    exchange.send_client_bytes(&ssl);
    assert_eq!(exchange.login.error_packet(why), why.packet(2, true));
    exchange.client_next = 2;
    exchange.send_client_packet(&response(CLIENT, &[7; 32], "caching_sha2_password"));
    assert_eq!(exchange.login.error_packet(why), why.packet(3, true));
    exchange.receive_as_node();
    exchange.send_node_packet(&[1, 4]);
    assert_eq!(exchange.login.error_packet(why), why.packet(4, true));
}

#[test]
fn first_packet_is_classified_once_enough_bytes_are_there() {
    let greeting = frame(0, &Server::MariaDb.greeting(true, PLUGIN));
    for end in 0..greeting.len() {
        assert_eq!(first_packet(&greeting[..end]), FirstPacket::Incomplete, "{end}");
    }
    assert_eq!(first_packet(&greeting), FirstPacket::Greeting);
    assert_eq!(first_packet(&[greeting, b"x".to_vec()].concat()), FirstPacket::Greeting);
    for (payload, code) in [
        (&b"\xff\x10\x04Too many connections"[..], 1040),
        (b"\xff\x1d\x04#08S01Server shutdown in progress", 1053),
        (b"\xff\x51\x04", 1105),
    ] {
        for sequence in [0, 1] {
            let bytes = frame(sequence, payload);
            assert_eq!(first_packet(&bytes[..bytes.len() - 1]), FirstPacket::Incomplete);
            assert_eq!(first_packet(&bytes), FirstPacket::Error(code));
        }
    }
    let old = Server::MySql.capabilities(true).without(Capabilities::PROTOCOL_41);
    for bytes in [
        frame(0, &login_parties::greeting(old, "4.0", 0, "")),
        frame(1, &Server::TiDb.greeting(true, PLUGIN)),
        frame(0, b"\xff\x10"),
        frame(0, b""),
        b"\x05\0\0\0\x09".to_vec(),
        b"HTTP/1.1 400 Bad Request".to_vec(),
        b"SSH-2.0-OpenSSH_9.6\r\n".to_vec(),
        b"220 mail.example ESMTP\r\n".to_vec(),
        header(64 * 1024 + 1, 0).to_vec(),
    ] {
        assert_eq!(first_packet(&bytes), FirstPacket::Invalid, "{bytes:?}");
    }
    assert_eq!(first_packet(&header(64 * 1024, 0)), FirstPacket::Incomplete);
}

#[test]
fn client_packet_after_fast_authentication_is_rejected() {
    let mut exchange = greeted(RULES, 4096);
    exchange.send_client_packet(&response(CLIENT, &[7; 32], "caching_sha2_password"));
    exchange.receive_as_node();
    assert_eq!(exchange.send_node_packet(&[1, 3]), Progress::More);
    exchange.receive_as_client();
    let (taken, progress) = exchange.send_client_bytes(&frame(4, PASSWORD));
    assert_eq!(taken, 0);
    exchange.expect_rejection(progress, ProxyError::BadPacket, true);
}

#[test]
fn missing_plugin_name_means_the_plugin_of_the_greeting() {
    let claimed = CLIENT.without(Capabilities::CONNECT_ATTRS);
    let mut exchange = LoginExchange::new(RULES, 4096);
    exchange.start(&Server::MySql.greeting(false, "sha256_password"), true, claimed);
    let mut payload = response(claimed, PASSWORD, "");
    payload.pop();
    let progress = exchange.send_client_packet(&payload);
    exchange.expect_rejection(progress, ProxyError::ClearTextPassword, true);
}

#[test]
fn session_token_plugin_is_rejected_from_client_and_node() {
    for claimed in [CLIENT, CLIENT.with(Capabilities::CONNECT_WITH_DB), CLIENT.without(Capabilities::CONNECT_ATTRS)] {
        let mut exchange = greeted(RULES, 4096);
        let progress = exchange.send_client_packet(&response(claimed, b"a token", "tidb_session_token"));
        exchange.expect_rejection(progress, ProxyError::SessionTokenPlugin, true);
    }
    let mut exchange = greeted(RULES, 4096);
    exchange.send_client_packet(&response(CLIENT, b"", PLUGIN));
    exchange.receive_as_node();
    let progress = exchange.send_node_packet(&switch("tidb_session_token", b""));
    exchange.expect_rejection(progress, ProxyError::SessionTokenPlugin, true);
}

#[test]
fn attributes_of_64_kib_are_accepted_and_larger_ones_rejected() {
    const MAX: usize = 64 * 1024;
    for (length, fits) in [(MAX, true), (MAX + 1, false)] {
        let mut payload = response(CLIENT.without(Capabilities::CONNECT_ATTRS), b"", PLUGIN);
        payload[..4].copy_from_slice(&CLIENT.with(Capabilities::CONNECT_ATTRS).0.to_le_bytes());
        payload.push(0xfe);
        payload.extend((length as u64).to_le_bytes());
        payload.resize(payload.len() + length, b'a');
        let mut exchange = greeted(RULES, 4096);
        let progress = exchange.send_client_packet(&payload);
        if fits {
            assert_eq!(progress, Progress::More);
            assert_eq!(exchange.receive_as_node().len(), payload.len());
        } else {
            exchange.expect_rejection(progress, ProxyError::AttributesTooLarge, true);
        }
    }
}
