//! Logins that end badly: who is told what, with which number, and how much was taken.

mod login_parties;

use login_parties::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{ClientTls, Compression, FirstPacket, NodeTls, Progress, Rules, first_packet};
use mysql_proto::packet::Header;

const PLUGIN: &str = "mysql_native_password";

/// A login of which the client heard the greeting.
fn greeted(rules: Rules, piece: usize) -> LoginExchange {
    let mut exchange = LoginExchange::new(rules, piece);
    exchange.start(&Server::TiDb.greeting(true, PLUGIN), false, CLIENT);
    exchange
}

fn header(length: usize, sequence: u8) -> [u8; 4] {
    Header { length, sequence }.bytes()
}

#[test]
fn what_is_no_login_is_refused() {
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
    // TLS that was not offered, or twice.
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
fn the_largest_response_is_taken_and_one_byte_more_is_not() {
    let mut payload = response(CLIENT.without(Capabilities::CONNECT_ATTRS), b"", PLUGIN);
    payload.resize(1024 * 1024, 0);
    let mut exchange = greeted(RULES, usize::MAX);
    assert_eq!(exchange.send_client_packet(&payload), Progress::More);
    assert_eq!(exchange.receive_as_node().len(), payload.len());
    // Refused by its header, before any of it is waited for; also behind TLS, where the dialect is known.
    let mut exchange = greeted(RULES, usize::MAX);
    exchange.send_client_packet(&head(CLIENT.with(Capabilities::SSL)));
    let (taken, progress) = exchange.send_client_bytes(&header(1024 * 1024 + 1, 2));
    assert_eq!(taken, 4);
    exchange.client_next = 3;
    exchange.expect_rejection(progress, ProxyError::PacketTooLarge, true);
}

#[test]
fn tls_is_required_of_all_who_came_without() {
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

/// Who asks for it may go by that alone, as PHP's mysqlnd does: it compresses from the OK on, and waits for ever.
#[test]
fn compression_that_was_not_offered_is_refused() {
    let both = Capabilities::COMPRESS.with(Capabilities::ZSTD_COMPRESSION);
    let passed = Rules { compression: Compression::Passthrough, ..RULES };
    let all = Server::TiDb.capabilities(true);
    for (rules, node, offered) in [
        (RULES, all, Capabilities(0)),
        // A change of user could tell a password, unseen.
        (passed, all.without(Capabilities::SSL), Capabilities(0)),
        (passed, all.without(both), Capabilities(0)),
        (passed, all.without(Capabilities::ZSTD_COMPRESSION), Capabilities::COMPRESS),
    ] {
        for asked in [Capabilities::COMPRESS, Capabilities::ZSTD_COMPRESSION, both] {
            // Without TLS; with it; with it, and asked for only inside.
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
fn whose_turn_it_is_is_known() {
    let mut exchange = LoginExchange::new(RULES, 4096);
    assert!(!exchange.login.awaits_client(), "the greeting is awaited");
    exchange.start(&Server::TiDb.greeting(true, PLUGIN), false, CLIENT);
    assert!(exchange.login.awaits_client());
    // What the node has begun to say it owes the rest of.
    exchange.send_node_bytes(b"\x05");
    assert!(!exchange.login.awaits_client());
    let mut exchange = greeted(RULES, 4096);
    let ssl = frame(1, &head(CLIENT.with(Capabilities::SSL)));
    for piece in [&ssl[..20], &ssl[20..]] {
        exchange.send_client_bytes(piece);
        assert!(exchange.login.awaits_client(), "half of it, or TLS and the response behind it");
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
    // A response that waits for the password: the node knows nothing of it.
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password")), Progress::More);
    assert!(exchange.login.awaits_client());
    exchange.send_node_packet(b"\xff\x10\x04Too many connections");
    assert!(!exchange.login.awaits_client(), "it is over");
}

#[test]
fn a_client_may_not_talk_out_of_turn() {
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
    // Nor before the greeting: a port scanner, or another protocol.
    let mut exchange = LoginExchange::new(RULES, 1);
    let (taken, progress) = exchange.send_client_bytes(b"EHLO example\r\n");
    assert_eq!(taken, 0);
    exchange.expect_rejection(progress, ProxyError::BadPacket, false);
}

#[test]
fn what_is_no_node_is_refused() {
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
    // Too early.
    for (node_tls, why) in
        [(NodeTls::Disabled, ProxyError::NodeProtocol), (NodeTls::Preferred, ProxyError::NodeTlsFailed)]
    {
        let mut exchange = greeted(Rules { node_tls, ..RULES }, 4096);
        let progress = exchange.send_node_packet(OK);
        exchange.expect_rejection(progress, why, false);
    }
}

#[test]
fn what_a_node_may_not_say_during_the_login() {
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
    // While it waits for a response that waits for a password.
    let mut exchange = greeted(RULES, 4096);
    assert_eq!(exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password")), Progress::More);
    exchange.receive_as_client();
    let progress = exchange.send_node_packet(OK);
    exchange.expect_rejection(progress, ProxyError::NodeTlsFailed, true);
}

#[test]
fn an_error_of_the_node_comes_through_at_any_time() {
    let with = b"\xff\x15\x04#28000Access denied";
    let without = b"\xff\x10\x04Too many connections";
    // Instead of the greeting.
    let mut exchange = LoginExchange::new(RULES, 2);
    let mut bytes = frame(0, without);
    bytes.push(0x55);
    assert_eq!(exchange.send_node_bytes(&bytes), (bytes.len() - 1, Progress::Denied(1040)));
    assert_eq!(exchange.receive_as_client(), without);
    // Behind it, before the client has said a word, or in the middle of one.
    for (begun, number) in [(0, 1), (1, 2), (5, 2)] {
        let mut exchange = greeted(RULES, 2);
        exchange.send_client_bytes(&frame(1, &response(CLIENT, b"", PLUGIN))[..begun]);
        assert_eq!(exchange.send_node_packet(without), Progress::Denied(1040));
        exchange.client_next = number;
        assert_eq!(exchange.receive_as_client(), without);
    }
    // In answer, over links that count differently, even where the node miscounts.
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
fn a_password_for_another_key_is_refused() {
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
    // The key is given once.
    let mut exchange = greeted(RULES, 100);
    exchange.send_client_packet(&response(CLIENT, &[1], "sha256_password"));
    exchange.receive_as_client();
    let progress = exchange.send_client_packet(&[1]);
    exchange.expect_rejection(progress, ProxyError::PasswordUnreadable, true);
}

#[test]
fn a_refusal_of_the_caller_fits_where_the_login_stands() {
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
fn a_first_packet_is_told_as_soon_as_it_can_be() {
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
fn a_client_that_was_told_to_wait_has_to() {
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
fn a_client_that_forgets_its_plugin_is_taken_to_have_the_greetings() {
    let claimed = CLIENT.without(Capabilities::CONNECT_ATTRS);
    let mut exchange = LoginExchange::new(RULES, 4096);
    exchange.start(&Server::MySql.greeting(false, "sha256_password"), true, claimed);
    let mut payload = response(claimed, PASSWORD, "");
    payload.pop();
    let progress = exchange.send_client_packet(&payload);
    exchange.expect_rejection(progress, ProxyError::ClearTextPassword, true);
}

#[test]
fn the_plugin_of_session_tokens_is_refused_wherever_it_is_named() {
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
fn attributes_may_have_64_kib_and_not_a_byte_more() {
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
