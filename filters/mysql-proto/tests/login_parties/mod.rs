//! A client and a node on the two sides of a login, with strict sequence numbers. Shared by the tests of logins.

#![allow(dead_code, reason = "each test binary uses a part")]

use mysql_proto::capability::Capabilities;
use mysql_proto::error::ProxyError;
use mysql_proto::login::{ClientTls, Compression, Login, NodeTls, Output, PasswordKey, Progress, Rules};
use mysql_proto::packet::{HEADER, Header};
use mysql_proto::secret::SecretBytes;

pub(crate) const SALT: &[u8; 20] = b"abcdefghIJKLMNOPqrst";
pub(crate) const OTHER_SALT: &[u8; 20] = b"tsrqPONMLKJIhgfedcba";
pub(crate) const PASSWORD: &[u8] = b"open sesame, and longer than a salt\0";
pub(crate) const PEM: &[u8] = b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n";
pub(crate) const OK: &[u8] = &[0, 0, 0, 2, 0, 0, 0];

pub(crate) const RULES: Rules = Rules {
    client_tls: ClientTls::Optional,
    node_tls: NodeTls::Preferred,
    compression: Compression::Off,
    allow_cleartext_backend: false,
};

/// Capabilities of libmysqlclient.
pub(crate) const CLIENT: Capabilities =
    Capabilities(0x09ff_a685).without(Capabilities::SSL).without(Capabilities::CONNECT_WITH_DB);

/// Bit 0. In MySQL it is CLIENT_LONG_PASSWORD. In MariaDB it is CLIENT_MYSQL, which MariaDB's own clients and servers
/// leave unset.
pub(crate) const CLIENT_MYSQL: Capabilities = Capabilities(1);

/// Replaces RSA: only [`encrypt`] produces what this key decrypts.
pub(crate) struct TestKey;

pub(crate) fn encrypt(clear: &[u8]) -> Vec<u8> {
    let mut encrypted = vec![0xee, clear.len() as u8];
    encrypted.extend(clear.iter().map(|byte| byte ^ 0x99));
    encrypted.resize(256, 0x11);
    encrypted
}

impl PasswordKey for TestKey {
    fn public_pem(&self) -> &[u8] {
        PEM
    }

    fn decrypt(&self, encrypted: &[u8]) -> Option<SecretBytes> {
        let [0xee, length, rest @ ..] = encrypted else {
            return None;
        };
        let clear = rest.get(..usize::from(*length))?;
        (encrypted.len() == 256).then(|| clear.iter().map(|byte| byte ^ 0x99).collect::<Vec<_>>().into())
    }
}

/// The encrypted password that a client without TLS sends.
pub(crate) fn hidden(salt: &[u8]) -> Vec<u8> {
    let mixed: Vec<u8> = PASSWORD.iter().zip(salt.iter().cycle()).map(|(a, b)| a ^ b).collect();
    encrypt(&mixed)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    TiDb,
    MySql,
    MariaDb,
}

impl Server {
    pub(crate) const ALL: [Self; 3] = [Self::TiDb, Self::MySql, Self::MariaDb];

    pub(crate) fn capabilities(self, tls: bool) -> Capabilities {
        let bits = match self {
            // 8.5: compression, no session tracking, no TLS unless configured.
            Self::TiDb => 0x051b_a6af,
            Self::MySql => 0xdfff_ffff,
            // CLIENT_MYSQL is unset: the filler has MariaDB's capabilities.
            Self::MariaDb => 0x81ff_fffe,
        };
        let bits = Capabilities(bits).without(Capabilities::SSL);
        if tls { bits.with(Capabilities::SSL) } else { bits }
    }

    pub(crate) fn greeting(self, tls: bool, plugin: &str) -> Vec<u8> {
        let (version, extended) = match self {
            Self::TiDb => ("8.0.11-TiDB-v8.5.3", 0),
            Self::MySql => ("8.4.3", 0),
            Self::MariaDb => ("5.5.5-10.11.6-MariaDB", 0x1d),
        };
        greeting(self.capabilities(tls), version, extended, plugin)
    }
}

pub(crate) fn greeting(capabilities: Capabilities, version: &str, extended: u8, plugin: &str) -> Vec<u8> {
    let bits = capabilities.0.to_le_bytes();
    let mut payload = vec![10];
    payload.extend(version.as_bytes());
    payload.extend([0, 9, 0, 0, 0]);
    payload.extend(&SALT[..8]);
    payload.extend([0, bits[0], bits[1], 46, 2, 0, bits[2], bits[3], 21]);
    payload.extend([0, 0, 0, 0, 0, 0, extended, 0, 0, 0]);
    payload.extend(&SALT[8..]);
    payload.push(0);
    payload.extend(plugin.as_bytes());
    payload.push(0);
    payload
}

/// The capabilities in a greeting.
pub(crate) fn offered(payload: &[u8]) -> Capabilities {
    mysql_proto::greeting::Greeting::parse(payload).expect("a greeting").capabilities
}

pub(crate) fn head(capabilities: Capabilities) -> Vec<u8> {
    let mut payload = capabilities.0.to_le_bytes().to_vec();
    payload.extend([0, 0, 0, 1, 46]);
    payload.resize(32, 0);
    payload
}

/// A response; `capabilities` must include PLUGIN_AUTH and PLUGIN_AUTH_LENENC_DATA.
pub(crate) fn response(capabilities: Capabilities, auth: &[u8], plugin: &str) -> Vec<u8> {
    let mut payload = head(capabilities);
    payload.extend(b"root\0");
    mysql_proto::lenenc::write(&mut payload, auth.len() as u64);
    payload.extend(auth);
    if capabilities.has(Capabilities::CONNECT_WITH_DB) {
        payload.extend(b"test\0");
    }
    payload.extend(plugin.as_bytes());
    payload.push(0);
    if capabilities.has(Capabilities::CONNECT_ATTRS) {
        payload.extend(b"\x0a\x04_pid\x0442\0\0");
    }
    payload
}

pub(crate) fn switch(plugin: &str, salt: &[u8]) -> Vec<u8> {
    let mut payload = vec![0xfe];
    payload.extend(plugin.as_bytes());
    payload.push(0);
    payload.extend(salt);
    payload.push(0);
    payload
}

pub(crate) fn frame(sequence: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = Header { length: payload.len(), sequence }.bytes().to_vec();
    packet.extend(payload);
    packet
}

/// A login, and the bytes for both sides that the test has not read yet. Passes bytes in pieces of `piece`.
pub(crate) struct LoginExchange {
    pub(crate) login: Login,
    pub(crate) piece: usize,
    pub(crate) client_next: u8,
    pub(crate) node_next: u8,
    pub(crate) to_client: Vec<u8>,
    pub(crate) to_node: Vec<u8>,
    node_started: bool,
}

impl LoginExchange {
    pub(crate) fn new(rules: Rules, piece: usize) -> Self {
        Self {
            login: Login::new(rules),
            piece,
            client_next: 0,
            node_next: 0,
            to_client: Vec::new(),
            to_node: Vec::new(),
            node_started: false,
        }
    }

    /// Passes raw bytes of the client. Returns how many were taken, and the last progress.
    pub(crate) fn send_client_bytes(&mut self, bytes: &[u8]) -> (usize, Progress) {
        self.send(bytes, true)
    }

    /// Passes raw bytes of the node. Returns how many were taken, and the last progress.
    pub(crate) fn send_node_bytes(&mut self, bytes: &[u8]) -> (usize, Progress) {
        self.send(bytes, false)
    }

    fn send(&mut self, bytes: &[u8], client: bool) -> (usize, Progress) {
        let mut taken = 0;
        let mut last = Progress::More;
        for piece in bytes.chunks(self.piece) {
            let mut out = Output::default();
            let (count, progress) = if client {
                self.login.on_client_bytes(piece, &TestKey, &mut out)
            } else {
                self.login.on_node_bytes(piece, &mut out)
            };
            taken += count;
            last = progress;
            if client {
                self.to_node.extend(out.onward.iter());
                self.to_client.extend(out.back.iter());
            } else {
                self.to_client.extend(out.onward.iter());
                assert!(out.back.is_empty(), "a node gets no answer to its bytes");
            }
            if progress != Progress::More {
                break;
            }
            assert_eq!(count, piece.len(), "all bytes are taken before more are awaited");
        }
        (taken, last)
    }

    pub(crate) fn send_client_packet(&mut self, payload: &[u8]) -> Progress {
        let packet = frame(self.client_next, payload);
        self.client_next = self.client_next.wrapping_add(1);
        self.send_client_bytes(&packet).1
    }

    pub(crate) fn send_node_packet(&mut self, payload: &[u8]) -> Progress {
        let packet = frame(self.node_next, payload);
        self.node_next = self.node_next.wrapping_add(1);
        self.send_node_bytes(&packet).1
    }

    /// Takes the next packet for the client, and checks its sequence number.
    pub(crate) fn receive_as_client(&mut self) -> Vec<u8> {
        let payload = pop(&mut self.to_client, self.client_next);
        self.client_next = self.client_next.wrapping_add(1);
        payload
    }

    /// Takes the next packet for the node, and checks its sequence number.
    pub(crate) fn receive_as_node(&mut self) -> Vec<u8> {
        if !self.node_started {
            self.node_started = true;
            if let Some(request) = self.login.node_ssl_request() {
                assert_eq!(request[..HEADER], [32, 0, 0, self.node_next]);
                self.login.on_node_tls_started();
                self.node_next += 1;
            }
        }
        let payload = pop(&mut self.to_node, self.node_next);
        self.node_next = self.node_next.wrapping_add(1);
        payload
    }

    /// Passes the greeting and, with `tls`, the client's SSLRequest.
    pub(crate) fn start(&mut self, greeting: &[u8], tls: bool, claimed: Capabilities) {
        assert_eq!(self.send_node_packet(greeting), Progress::More);
        assert_eq!(self.receive_as_client().len(), greeting.len());
        if tls {
            let request = head(claimed.with(Capabilities::SSL));
            assert_eq!(self.send_client_packet(&request), Progress::StartClientTls);
        }
    }

    /// Asserts that the login ended with `why`, and that only the client got an error packet.
    pub(crate) fn expect_rejection(&mut self, progress: Progress, why: ProxyError, with_state: bool) {
        assert_eq!(progress, Progress::Rejected(why));
        let payload = self.receive_as_client();
        assert_eq!(frame(0, &payload), why.packet(0, with_state));
        assert!(self.to_client.is_empty() && self.to_node.is_empty());
    }
}

fn pop(bytes: &mut Vec<u8>, sequence: u8) -> Vec<u8> {
    let header = Header::parse(bytes).expect("a packet");
    assert_eq!(header.sequence, sequence, "sequence number");
    let rest = bytes.split_off(HEADER + header.length);
    let payload = bytes.split_off(HEADER);
    *bytes = rest;
    payload
}
