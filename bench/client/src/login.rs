//! The client's side of MySQL's login (MySQL: "Connection Phase").

use std::rc::Rc;

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use mysql_proto::capability::Capabilities;
use mysql_proto::greeting::Greeting;
use rustls::ClientConnection;

use crate::failure::Failure;
use crate::options::TlsMode;
use crate::packets::{PacketSplitter, packet};
use crate::response::{Answer, parse_error};
use crate::target::Target;

const NATIVE: &[u8] = b"mysql_native_password";
/// The maximum payload of a packet within the login.
const MAX_PACKET_BYTES: usize = 64 * 1024;
/// utf8mb4_general_ci.
const COLLATION: u8 = 45;
/// The capabilities of this client. The first bit tells MariaDB that this is a client of MySQL.
const CAPABILITIES: Capabilities = Capabilities(1)
    .with(Capabilities::PROTOCOL_41)
    .with(Capabilities::TRANSACTIONS)
    .with(Capabilities::SECURE_CONNECTION)
    .with(Capabilities::PLUGIN_AUTH);

/// What the connection has to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait for more bytes.
    More,
    Send(Vec<u8>),
    /// Send the first packet, begin TLS, and send the second packet through TLS.
    BeginTls(Vec<u8>, Vec<u8>),
    /// Logged in.
    Done,
}

#[derive(Debug)]
pub(crate) struct Login {
    target: Rc<Target>,
    packets: PacketSplitter,
    kept: Vec<u8>,
    greeted: bool,
}

impl Login {
    pub(crate) fn new(target: Rc<Target>) -> Self {
        Self { target, packets: PacketSplitter::default(), kept: Vec::new(), greeted: false }
    }

    /// A TLS session that has not begun.
    pub(crate) fn session(&self) -> Result<ClientConnection, Failure> {
        self.target.session()
    }

    /// Consumes the server's `bytes` up to the end of a packet.
    pub(crate) fn take(&mut self, bytes: &mut &[u8]) -> Result<Step, Failure> {
        while let Some(piece) = self.packets.next(bytes) {
            if piece.length > MAX_PACKET_BYTES {
                return Err(Failure::Protocol(format!("a packet of {} bytes within the login", piece.length)));
            }
            self.kept.extend_from_slice(piece.bytes);
            if piece.ends() {
                let payload = std::mem::take(&mut self.kept);
                return self.on_packet(&payload, piece.sequence.wrapping_add(1));
            }
        }
        Ok(Step::More)
    }

    /// Handles a complete packet. `sequence`: the sequence number of a reply.
    fn on_packet(&mut self, payload: &[u8], sequence: u8) -> Result<Step, Failure> {
        if payload.first() == Some(&0xff) {
            return Err(match parse_error(payload)? {
                Answer::Refused { code, text } => Failure::Refused { code, text },
                Answer::Ok | Answer::Rows(_) => unexpected(payload),
            });
        }
        if !self.greeted {
            self.greeted = true;
            return self.on_greeting(payload, sequence);
        }
        match payload {
            [0x00, ..] => Ok(Step::Done),
            [0xfe, switch @ ..] => {
                let mut parts = switch.splitn(2, |&byte| byte == 0);
                let plugin = parts.next().unwrap_or_default();
                let salt = parts.next().unwrap_or_default();
                Ok(Step::Send(packet(sequence, &self.proof(plugin, salt.strip_suffix(b"\0").unwrap_or(salt))?)))
            }
            // caching_sha2_password: the server accepts the password, and OK follows.
            [0x01, 0x03] => Ok(Step::More),
            _ => Err(unexpected(payload)),
        }
    }

    fn on_greeting(&self, payload: &[u8], sequence: u8) -> Result<Step, Failure> {
        let greeting = Greeting::parse(payload).ok_or_else(|| unexpected(payload))?;
        if self.target.tls != TlsMode::Mysql {
            return Ok(Step::Send(packet(sequence, &self.response(CAPABILITIES, &greeting.salt)?)));
        }
        if !greeting.capabilities.has(Capabilities::SSL) {
            return Err(Failure::Setting("the server offers no TLS; choose --tls none or first".into()));
        }
        let capabilities = CAPABILITIES.with(Capabilities::SSL);
        let request = packet(sequence, &head(capabilities));
        Ok(Step::BeginTls(request, packet(sequence.wrapping_add(1), &self.response(capabilities, &greeting.salt)?)))
    }

    /// MySQL: "Protocol::HandshakeResponse41".
    fn response(&self, capabilities: Capabilities, salt: &[u8]) -> Result<Vec<u8>, Failure> {
        let proof = self.proof(NATIVE, salt)?;
        let mut payload = head(capabilities);
        payload.extend(self.target.user.as_bytes());
        payload.push(0);
        payload.push(proof.len() as u8);
        payload.extend(proof);
        payload.extend(NATIVE);
        payload.push(0);
        Ok(payload)
    }

    /// The proof that the client knows the password. Without a password it is empty, whatever the plugin.
    fn proof(&self, plugin: &[u8], salt: &[u8]) -> Result<Vec<u8>, Failure> {
        let password = self.target.password.as_bytes();
        if password.is_empty() {
            return Ok(Vec::new());
        }
        if plugin != NATIVE {
            let plugin = plugin.escape_ascii();
            return Err(Failure::Setting(format!(
                "the account uses {plugin}; choose one of mysql_native_password, or without a password"
            )));
        }
        Ok(scramble(password, salt))
    }
}

/// The first part of a handshake response, which is the whole TLS request.
fn head(capabilities: Capabilities) -> Vec<u8> {
    let mut payload = capabilities.0.to_le_bytes().to_vec();
    payload.extend((1_u32 << 24).to_le_bytes());
    payload.push(COLLATION);
    payload.extend([0; 23]);
    payload
}

/// SHA1(password) XOR SHA1(salt, SHA1(SHA1(password))).
fn scramble(password: &[u8], salt: &[u8]) -> Vec<u8> {
    let sha1 = |bytes: &[u8]| digest(&SHA1_FOR_LEGACY_USE_ONLY, bytes);
    let once = sha1(password);
    let salted = sha1(&[salt, sha1(once.as_ref()).as_ref()].concat());
    once.as_ref().iter().zip(salted.as_ref()).map(|(one, other)| one ^ other).collect()
}

fn unexpected(payload: &[u8]) -> Failure {
    let shown = &payload[..payload.len().min(48)];
    Failure::Protocol(format!("\"{}\" within the login", shown.escape_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::tests::server;

    const SALT: &[u8] = b"abcdefghijklmnopqrst";

    fn greeting(capabilities: Capabilities) -> Vec<u8> {
        let [a, b, c, d] = capabilities.0.to_le_bytes();
        let mut payload = b"\x0a8.0.11\0\x07\0\0\0".to_vec();
        payload.extend(&SALT[..8]);
        payload.extend([0, a, b, 45, 2, 0, c, d, 21]);
        payload.extend([0; 10]);
        payload.extend(&SALT[8..]);
        payload.push(0);
        payload.extend(b"caching_sha2_password\0");
        packet(0, &payload)
    }

    fn login(password: &str, tls: TlsMode) -> Login {
        let mut server = server("127.0.0.1:4000");
        server.account.password = password.into();
        server.tls = tls;
        Login::new(Rc::new(Target::new(&server).expect("a target")))
    }

    #[test]
    fn account_without_a_password_sends_an_empty_proof_for_any_plugin() {
        let mut login = login("", TlsMode::None);
        for byte in &greeting(CAPABILITIES)[..8] {
            assert_eq!(login.take(&mut std::slice::from_ref(byte)).expect("a part"), Step::More);
        }
        let Step::Send(response) = login.take(&mut &greeting(CAPABILITIES)[8..]).expect("a greeting") else {
            panic!("no answer")
        };
        assert_eq!(response[3], 1);
        assert_eq!(&response[36..], b"root\0\0mysql_native_password\0");
        let switch = packet(2, b"\xfecaching_sha2_password\0abcdefghijklmnopqrst\0");
        assert_eq!(login.take(&mut &switch[..]).expect("a switch"), Step::Send(packet(3, b"")));
        let done = [packet(4, b"\x01\x03"), packet(5, b"\0\0\0\x02\0\0\0")].concat();
        let mut bytes = &done[..];
        assert_eq!(login.take(&mut bytes).expect("more"), Step::More);
        assert_eq!(login.take(&mut bytes).expect("OK"), Step::Done);
    }

    #[test]
    fn proof_of_a_password_can_be_checked_by_the_server() {
        let mut login = login("secret", TlsMode::None);
        let Step::Send(response) = login.take(&mut &greeting(CAPABILITIES)[..]).expect("a greeting") else {
            panic!("no answer")
        };
        let proof = &response[36 + 6..36 + 26];
        // A server stores only SHA1(SHA1(password)), and checks the proof in this way.
        let sha1 = |bytes: &[u8]| digest(&SHA1_FOR_LEGACY_USE_ONLY, bytes).as_ref().to_vec();
        let stored = sha1(&sha1(b"secret"));
        let mask = sha1(&[SALT, &stored].concat());
        let once: Vec<u8> = proof.iter().zip(&mask).map(|(one, other)| one ^ other).collect();
        assert_eq!(sha1(&once), stored);
        let other = login.take(&mut &packet(2, b"\xfecaching_sha2_password\0salt\0")[..]).expect_err("a plugin");
        assert!(other.to_string().contains("uses caching_sha2_password"), "{other}");
    }

    #[test]
    fn tls_begins_after_the_tls_request() {
        let mut asking = login("", TlsMode::Mysql);
        let step = asking.take(&mut &greeting(CAPABILITIES.with(Capabilities::SSL))[..]).expect("a greeting");
        let Step::BeginTls(request, response) = step else { panic!("no TLS") };
        assert_eq!((request.len(), request[3], response[3]), (36, 1, 2));
        assert_eq!(request[4..], response[4..36]);
        let failure = login("", TlsMode::Mysql).take(&mut &greeting(CAPABILITIES)[..]).expect_err("no TLS");
        assert!(failure.to_string().contains("offers no TLS"), "{failure}");
    }

    #[test]
    fn errors_and_invalid_packets_of_the_server_are_reported() {
        let refused = packet(0, b"\xff\x10\x04Too many connections");
        let failure = login("", TlsMode::None).take(&mut &refused[..]).expect_err("refused");
        assert_eq!(failure.to_string(), "the server answered with error 1040: Too many connections");
        for strange in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], &packet(0, b""), &packet(0, b"\x09abc")] {
            let mut login = login("", TlsMode::None);
            assert!(matches!(login.take(&mut &strange[..]), Err(Failure::Protocol(_))), "{strange:?}");
        }
    }
}
