//! Complete logins: all combinations of TLS with all ways to authenticate.

mod login_parties;

use login_parties::*;
use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{ClientTls, Compression, NodeTls, Progress, Rules};

/// Defines `Account` and the list of all its variants.
macro_rules! accounts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// How the account authenticates.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum Account {
            $($(#[$doc])* $name,)*
        }

        const ACCOUNTS: &[Account] = &[$(Account::$name,)*];
    };
}

accounts! {
    Native,
    NativeAfterSwitch,
    OldAfterSwitch,
    /// The node has the password in its cache.
    Sha2Known,
    Sha2,
    Sha2AfterSwitch,
    /// The client already has the public key.
    Sha2KeyAtHand,
    Sm3AfterSwitch,
    Sha256,
    Sha256AfterSwitch,
    /// The client already has the public key.
    Sha256KeyAtHand,
    ClearAtOnce,
    ClearAfterSwitch,
    DialogAfterSwitch,
    Ed25519,
    Parsec,
}

use Account::*;

impl Account {
    /// Whether a client with TLS sends the password in clear text.
    fn exposes(self) -> bool {
        !matches!(self, Native | NativeAfterSwitch | OldAfterSwitch | Sha2Known | Ed25519 | Parsec)
    }
}

struct Case {
    server: Server,
    account: Account,
    client_tls: bool,
    node_tls: bool,
    clear_text_allowed: bool,
    piece: usize,
}

/// The client requests the key, unless it has one, and sends its password. Checks what the node gets.
fn password_step(exchange: &mut LoginExchange, case: &Case, request: u8, key_at_hand: bool, salt: &[u8]) {
    if case.client_tls {
        assert_eq!(exchange.send_client_packet(PASSWORD), Progress::More);
        assert_eq!(exchange.receive_as_node(), PASSWORD);
        return;
    }
    if !key_at_hand {
        assert_eq!(exchange.send_client_packet(&[request]), Progress::More);
        if !case.node_tls {
            assert_eq!(exchange.receive_as_node(), [request]);
            assert_eq!(exchange.send_node_packet(&[b"\x01", PEM].concat()), Progress::More);
        }
        assert_eq!(exchange.receive_as_client(), [b"\x01", PEM].concat());
    }
    assert!(exchange.to_node.is_empty());
    assert_eq!(exchange.send_client_packet(&hidden(salt)), Progress::More);
    let expected = if case.node_tls { PASSWORD.to_vec() } else { hidden(salt) };
    assert_eq!(exchange.receive_as_node(), expected);
}

/// Sends the response, and checks that the node gets it with only its capabilities changed.
fn respond(exchange: &mut LoginExchange, case: &Case, claimed: Capabilities, auth: &[u8], plugin: &str) {
    let payload = response(claimed, auth, plugin);
    assert_eq!(exchange.send_client_packet(&payload), Progress::More);
    check_response(exchange, case, &payload);
}

fn check_response(exchange: &mut LoginExchange, case: &Case, expected: &[u8]) {
    let payload = exchange.receive_as_node();
    let ssl = mysql_proto::handshake_response::capabilities(&payload).has(Capabilities::SSL);
    assert_eq!(ssl, case.node_tls);
    assert_eq!(exchange.login.node_ssl_request().is_some(), case.node_tls);
    assert_eq!(payload[4..], expected[4..]);
}

/// Runs one login to its end.
fn run(case: &Case) {
    let rules = Rules { allow_cleartext_backend: case.clear_text_allowed, ..RULES };
    let mut exchange = LoginExchange::new(rules, case.piece);
    let mut claimed = CLIENT.with(Capabilities::CONNECT_WITH_DB);
    if case.server == Server::MariaDb {
        claimed = claimed.without(CLIENT_MYSQL);
    }
    let default = match case.account {
        Sha2Known | Sha2 | Sha2KeyAtHand => "caching_sha2_password",
        Sha256 | Sha256KeyAtHand => "sha256_password",
        _ => "mysql_native_password",
    };
    exchange.start(&case.server.greeting(case.node_tls, default), case.client_tls, claimed);
    if case.client_tls {
        claimed = claimed.with(Capabilities::SSL);
    }
    let is_rejected = case.account.exposes() && case.client_tls && !case.node_tls && !case.clear_text_allowed;
    let hash = &[7; 32];
    let check_rejection = |exchange: &mut LoginExchange, progress: Progress| {
        if is_rejected {
            exchange.expect_rejection(progress, ProxyError::ClearTextPassword, true);
        } else {
            assert_eq!(progress, Progress::More);
        }
        is_rejected
    };
    match case.account {
        Native => respond(&mut exchange, case, claimed, &hash[..20], default),
        NativeAfterSwitch | OldAfterSwitch => {
            respond(&mut exchange, case, claimed, &hash[..20], "auth_unknown_plugin");
            let packet =
                if case.account == OldAfterSwitch { vec![0xfe] } else { switch("mysql_native_password", OTHER_SALT) };
            assert_eq!(exchange.send_node_packet(&packet), Progress::More);
            assert_eq!(exchange.receive_as_client(), packet);
            // An empty password is an empty packet.
            assert_eq!(exchange.send_client_packet(b""), Progress::More);
            assert_eq!(exchange.receive_as_node(), b"");
        }
        Sha2Known => {
            respond(&mut exchange, case, claimed, hash, default);
            assert_eq!(exchange.send_node_packet(&[1, 3]), Progress::More);
            assert_eq!(exchange.receive_as_client(), [1, 3]);
        }
        Sha2 | Sha2KeyAtHand => {
            respond(&mut exchange, case, claimed, hash, default);
            let progress = exchange.send_node_packet(&[1, 4]);
            if check_rejection(&mut exchange, progress) {
                return;
            }
            assert_eq!(exchange.receive_as_client(), [1, 4]);
            password_step(&mut exchange, case, 2, case.account == Sha2KeyAtHand, SALT);
        }
        Sha2AfterSwitch | Sm3AfterSwitch => {
            respond(&mut exchange, case, claimed, &hash[..20], default);
            let name = if case.account == Sm3AfterSwitch { "tidb_sm3_password" } else { "caching_sha2_password" };
            assert_eq!(exchange.send_node_packet(&switch(name, OTHER_SALT)), Progress::More);
            assert_eq!(exchange.receive_as_client(), switch(name, OTHER_SALT));
            assert_eq!(exchange.send_client_packet(hash), Progress::More);
            assert_eq!(exchange.receive_as_node(), hash);
            let progress = exchange.send_node_packet(&[1, 4]);
            if check_rejection(&mut exchange, progress) {
                return;
            }
            assert_eq!(exchange.receive_as_client(), [1, 4]);
            password_step(&mut exchange, case, 2, false, OTHER_SALT);
        }
        Sha256 | Sha256KeyAtHand => {
            let auth = match (case.client_tls, case.account) {
                (true, _) => PASSWORD.to_vec(),
                (false, Sha256) => vec![1],
                (false, _) => hidden(SALT),
            };
            let payload = response(claimed, &auth, default);
            let progress = exchange.send_client_packet(&payload);
            if check_rejection(&mut exchange, progress) {
                return;
            }
            if case.client_tls || !case.node_tls {
                check_response(&mut exchange, case, &payload);
                if auth == [1] {
                    assert_eq!(exchange.send_node_packet(&[b"\x01", PEM].concat()), Progress::More);
                    assert_eq!(exchange.receive_as_client(), [b"\x01", PEM].concat());
                    password_step(&mut exchange, case, 1, true, SALT);
                }
            } else {
                if auth == [1] {
                    assert_eq!(exchange.receive_as_client(), [b"\x01", PEM].concat());
                    assert!(exchange.to_node.is_empty() && exchange.login.node_ssl_request().is_none());
                    assert_eq!(exchange.send_client_packet(&hidden(SALT)), Progress::More);
                }
                check_response(&mut exchange, case, &response(claimed, PASSWORD, default));
            }
        }
        Sha256AfterSwitch | ClearAfterSwitch | DialogAfterSwitch => {
            respond(&mut exchange, case, claimed, &hash[..20], default);
            let packet = match case.account {
                Sha256AfterSwitch => switch("sha256_password", OTHER_SALT),
                ClearAfterSwitch => switch("mysql_clear_password", b""),
                _ => switch("dialog", b"\x04Password: "),
            };
            let progress = exchange.send_node_packet(&packet);
            if check_rejection(&mut exchange, progress) {
                return;
            }
            assert_eq!(exchange.receive_as_client(), packet);
            if case.account == Sha256AfterSwitch {
                password_step(&mut exchange, case, 1, false, OTHER_SALT);
            } else {
                assert_eq!(exchange.send_client_packet(PASSWORD), Progress::More);
                assert_eq!(exchange.receive_as_node(), PASSWORD);
            }
            if case.account == DialogAfterSwitch {
                // MariaDB leaves out the 01 in front of data that cannot be mistaken for another packet.
                assert_eq!(exchange.send_node_packet(b"\x05PIN: "), Progress::More);
                assert_eq!(exchange.receive_as_client(), b"\x05PIN: ");
                assert_eq!(exchange.send_client_packet(b"1234\0"), Progress::More);
                assert_eq!(exchange.receive_as_node(), b"1234\0");
            }
        }
        ClearAtOnce => {
            let payload = response(claimed, PASSWORD, "mysql_clear_password");
            let progress = exchange.send_client_packet(&payload);
            if check_rejection(&mut exchange, progress) {
                return;
            }
            check_response(&mut exchange, case, &payload);
        }
        Ed25519 | Parsec => {
            respond(&mut exchange, case, claimed, &hash[..20], default);
            let name = if case.account == Parsec { "parsec" } else { "client_ed25519" };
            assert_eq!(exchange.send_node_packet(&switch(name, &[9; 32])), Progress::More);
            assert_eq!(exchange.receive_as_client(), switch(name, &[9; 32]));
            if case.account == Parsec {
                assert_eq!(exchange.send_client_packet(b""), Progress::More);
                assert_eq!(exchange.receive_as_node(), b"");
                assert_eq!(exchange.send_node_packet(b"P\x00salt"), Progress::More);
                assert_eq!(exchange.receive_as_client(), b"P\x00salt");
            }
            assert_eq!(exchange.send_client_packet(&[5; 64]), Progress::More);
            assert_eq!(exchange.receive_as_node(), [5; 64]);
        }
    }
    finish(&mut exchange, case, claimed);
}

fn finish(exchange: &mut LoginExchange, case: &Case, claimed: Capabilities) {
    let mut bytes = frame(exchange.node_next, OK);
    let ok = bytes.len();
    bytes.extend(b"the session's");
    let (taken, progress) = exchange.send_node_bytes(&bytes);
    assert_eq!(taken, ok, "no byte of the session is taken");
    let Progress::Established(agreed) = progress else {
        panic!("{progress:?}");
    };
    let both = claimed
        .and(case.server.capabilities(true))
        .without(Capabilities::COMPRESS)
        .without(Capabilities::ZSTD_COMPRESSION);
    assert_eq!(agreed, both);
    assert_eq!(exchange.receive_as_client(), OK);
    assert!(exchange.to_client.is_empty() && exchange.to_node.is_empty());
    assert_eq!(exchange.send_client_bytes(b"\x01\0\0\0\x0e"), (0, progress));
}

#[test]
fn every_account_logs_in_over_every_combination_of_tls() {
    for server in Server::ALL {
        for &account in ACCOUNTS {
            for bits in 0..8 {
                for piece in [1, 3, 4096] {
                    let case = Case {
                        server,
                        account,
                        client_tls: bits & 1 != 0,
                        node_tls: bits & 2 != 0,
                        clear_text_allowed: bits & 4 != 0,
                        piece,
                    };
                    println!(
                        "{server:?} {account:?} client TLS {} node TLS {} clear text allowed {} pieces {piece}",
                        case.client_tls, case.node_tls, case.clear_text_allowed
                    );
                    run(&case);
                }
            }
        }
    }
}

#[test]
fn greeting_to_the_client_offers_tls_and_compression_by_the_rules() {
    for server in Server::ALL {
        for node_tls in [false, true] {
            for client_tls in [ClientTls::Disabled, ClientTls::Optional, ClientTls::Required] {
                for compression in [Compression::Off, Compression::Passthrough] {
                    let rules = Rules { client_tls, compression, ..RULES };
                    let mut exchange = LoginExchange::new(rules, 7);
                    let greeting = server.greeting(node_tls, "mysql_native_password");
                    exchange.send_node_packet(&greeting);
                    let payload = exchange.receive_as_client();
                    let mut expected = server.capabilities(client_tls != ClientTls::Disabled);
                    // In a compressed session, a change of user could expose a password unnoticed.
                    let exposable = client_tls != ClientTls::Disabled && !node_tls;
                    if exposable || compression == Compression::Off {
                        expected = expected.without(Capabilities::COMPRESS).without(Capabilities::ZSTD_COMPRESSION);
                    }
                    assert_eq!(offered(&payload), expected);
                    let edited = payload.iter().zip(&greeting).filter(|(a, b)| a != b).count();
                    let most = if server == Server::MariaDb { 5 } else { 4 };
                    assert!(payload.len() == greeting.len() && edited <= most);
                }
            }
        }
    }
}

#[test]
fn offered_compression_is_passed_to_the_node() {
    let both = Capabilities::COMPRESS.with(Capabilities::ZSTD_COMPRESSION);
    for asked in [Capabilities::COMPRESS, Capabilities::ZSTD_COMPRESSION, both, Capabilities(0)] {
        let mut exchange = LoginExchange::new(Rules { compression: Compression::Passthrough, ..RULES }, 5);
        exchange.start(&Server::TiDb.greeting(true, ""), false, CLIENT);
        exchange.send_client_packet(&response(CLIENT.with(asked), b"", "mysql_native_password"));
        let request = exchange.login.node_ssl_request().expect("the node has TLS");
        let payload = exchange.receive_as_node();
        for capabilities in [&payload, &request[4..]].map(mysql_proto::handshake_response::capabilities) {
            assert_eq!(capabilities.and(both), asked);
        }
        let progress = exchange.send_node_packet(OK);
        let Progress::Established(agreed) = progress else { panic!("{progress:?}") };
        assert_eq!(agreed.and(both), asked);
    }
}

#[test]
fn node_gets_the_capabilities_of_the_clients_ssl_request() {
    // Some drivers announce fewer capabilities inside TLS; servers use those of the SSLRequest.
    let claimed = CLIENT.with(Capabilities::SSL);
    let mut inside = response(CLIENT, b"", "mysql_native_password");
    inside[8] = 33;
    inside[1] &= !0x02;
    let mut exchange = LoginExchange::new(RULES, 4096);
    exchange.start(&Server::MySql.greeting(true, ""), true, CLIENT);
    exchange.send_client_packet(&inside);
    let request = exchange.login.node_ssl_request().expect("the node has TLS");
    assert_eq!(request[4..], head(claimed));
    assert_eq!(mysql_proto::handshake_response::capabilities(&exchange.receive_as_node()), claimed);
    let progress = exchange.send_node_packet(OK);
    let Progress::Established(agreed) = progress else { panic!("{progress:?}") };
    assert!(agreed.has(Capabilities::SSL));
}

#[test]
fn unsupported_mariadb_capabilities_are_removed_on_both_sides() {
    let claimed = CLIENT.without(CLIENT_MYSQL);
    let mut exchange = LoginExchange::new(RULES, 4096);
    let greeting = Server::MariaDb.greeting(true, "");
    exchange.send_node_packet(&greeting);
    let edited = exchange.receive_as_client();
    let at = greeting.iter().position(|&byte| byte == 0x1d).expect("the filler");
    assert_eq!(edited[at], 0x0c);
    let mut payload = response(claimed, b"", "mysql_native_password");
    payload[28] = 0x1d;
    exchange.send_client_packet(&payload);
    assert_eq!(exchange.login.node_ssl_request().expect("TLS")[4 + 28], 0x0c);
    assert_eq!(exchange.receive_as_node()[28], 0x0c);
}

#[test]
fn bytes_after_an_ssl_request_are_not_taken() {
    for piece in [1, 2, 35, 36, 37, 4096] {
        let mut exchange = LoginExchange::new(RULES, piece);
        exchange.send_node_packet(&Server::TiDb.greeting(true, ""));
        exchange.receive_as_client();
        let mut bytes = frame(1, &head(CLIENT.with(Capabilities::SSL)));
        bytes.extend(b"\x16\x03\x01ClientHello");
        assert_eq!(exchange.send_client_bytes(&bytes), (36, Progress::StartClientTls));
        assert!(exchange.to_client.is_empty() && exchange.to_node.is_empty());
    }
}

#[test]
fn node_connection_uses_tls_according_to_its_mode() {
    for (mode, offered, used) in [
        (NodeTls::Disabled, true, false),
        (NodeTls::Disabled, false, false),
        (NodeTls::Preferred, true, true),
        (NodeTls::Preferred, false, false),
        (NodeTls::Required, true, true),
    ] {
        let mut exchange = LoginExchange::new(Rules { node_tls: mode, ..RULES }, 4096);
        exchange.start(&Server::TiDb.greeting(offered, ""), false, CLIENT);
        assert_eq!(exchange.login.node_ssl_request(), None);
        exchange.send_client_packet(&response(CLIENT, b"", "mysql_native_password"));
        assert_eq!(exchange.login.node_ssl_request().is_some(), used, "{mode:?} {offered}");
    }
}

#[test]
fn client_without_plugins_logs_in() {
    let claimed = CLIENT.without(Capabilities::PLUGIN_AUTH).without(Capabilities::CONNECT_ATTRS);
    for node_tls in [false, true] {
        let mut exchange = LoginExchange::new(RULES, 9);
        exchange.start(&Server::MySql.greeting(node_tls, "sha256_password"), false, claimed);
        let mut payload = head(claimed);
        payload.extend(b"root\0\x14aaaaaaaaaaaaaaaaaaaa");
        assert_eq!(exchange.send_client_packet(&payload), Progress::More);
        assert_eq!(exchange.receive_as_node()[32..], payload[32..]);
        assert!(matches!(exchange.send_node_packet(OK), Progress::Established(_)));
    }
}

#[test]
fn short_greeting_is_passed_on() {
    let payload = b"\x0a5.0\0\x07\0\0\0abcdefgh\0\x01\x82";
    let mut exchange = LoginExchange::new(RULES, 1);
    assert_eq!(exchange.send_node_packet(payload), Progress::More);
    assert_eq!(exchange.receive_as_client()[..], b"\x0a5.0\0\x07\0\0\0abcdefgh\0\x01\x8a"[..]);
}

#[test]
fn recorded_greeting_of_mariadb_is_edited_in_three_bytes() {
    // MariaDB 10.11.19 of Debian 12.
    let mut payload = b"\x0a5.5.5-10.11.19-MariaDB-0+deb12u1\0\x11\0\0\0\x39\x60\x5b\x26\x4a\x25\x76\x48\0".to_vec();
    payload.extend(b"\xfe\xf7\x08\x02\x00\xff\x81\x15\0\0\0\0\0\0\x1d\0\0\0");
    payload.extend(b"\x41\x4d\x40\x37\x33\x3a\x6a\x27\x23\x78\x54\x78\0mysql_native_password\0");
    assert_eq!(payload.len(), 0x64);
    let mut exchange = LoginExchange::new(RULES, 11);
    exchange.send_node_packet(&payload);
    let changed: Vec<(usize, u8)> =
        exchange.receive_as_client().into_iter().enumerate().filter(|&(at, byte)| byte != payload[at]).collect();
    // Changed: TLS is offered to clients although the node has none; no zlib; no capabilities that change the framing
    // of results.
    assert_eq!(changed, [(0x2f, 0xde), (0x30, 0xff), (0x3d, 0x0c)]);
}
