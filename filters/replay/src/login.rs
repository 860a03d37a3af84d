//! The client's side of the login, without I/O ("Connection Phase", dev.mysql.com).

use aws_lc_rs::digest::{Algorithm, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use mysql_proto::capability::Capabilities;
use mysql_proto::error;
use mysql_proto::greeting::Greeting;
use mysql_proto::lenenc;
use mysql_proto::packet::packets;
use mysql_proto::secret::SecretBytes;

const NATIVE: &[u8] = b"mysql_native_password";
const CACHING_SHA2: &[u8] = b"caching_sha2_password";
/// utf8mb4_general_ci. The capture does not know with which character set its client logged in.
const COLLATION: u8 = 45;
const CONNECTION_ATTRIBUTES: [(&str, &str); 1] = [("program_name", "tidevoy-replay")];

/// What the replay needs: responses as the captured clients could get them.
const REQUIRED: Capabilities = Capabilities(1)
    .with(Capabilities::PROTOCOL_41)
    .with(Capabilities::TRANSACTIONS)
    .with(Capabilities::SECURE_CONNECTION)
    .with(Capabilities::MULTI_STATEMENTS)
    .with(Capabilities::MULTI_RESULTS)
    .with(Capabilities::PLUGIN_AUTH);
/// What it uses if the server offers it.
const OPTIONAL: Capabilities = Capabilities::LOCAL_FILES
    .with(Capabilities::PS_MULTI_RESULTS)
    .with(Capabilities::CONNECT_ATTRS)
    .with(Capabilities::DEPRECATE_EOF);

/// Why a login failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LoginError {
    #[error("error {code}: {text}")]
    Refused { code: u16, text: String },
    #[error("the server offers no TLS")]
    NoTls,
    #[error("the account uses {plugin}, which needs TLS (--ca-file or --tls-insecure)")]
    NeedsTls { plugin: String },
    #[error("the account uses {plugin}, which is not supported")]
    UnsupportedPlugin { plugin: String },
    #[error("the server lacks capabilities of MySQL 4.1 and later")]
    MissingCapabilities,
    #[error("the server's answer is not MySQL's protocol")]
    Protocol,
}

/// What the caller does next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LoginStep {
    /// Wait for the next packet.
    Wait,
    Send(SecretBytes),
    /// Send the first packet, begin TLS, and send the second one through TLS.
    StartTls {
        request: Vec<u8>,
        response: SecretBytes,
    },
    Done,
}

pub(crate) struct Login<'a> {
    pub(crate) user: &'a [u8],
    pub(crate) password: &'a [u8],
    pub(crate) database: &'a [u8],
    pub(crate) uses_tls: bool,
    /// What client and server agreed on; empty before the greeting.
    pub(crate) capabilities: Capabilities,
    plugin: Vec<u8>,
}

impl<'a> Login<'a> {
    pub(crate) fn new(user: &'a [u8], password: &'a [u8], database: &'a [u8], uses_tls: bool) -> Self {
        Self { user, password, database, uses_tls, capabilities: Capabilities::default(), plugin: Vec::new() }
    }

    /// Handles a packet of the server.
    pub(crate) fn receive(&mut self, sequence: u8, payload: &[u8]) -> Result<LoginStep, LoginError> {
        if let Some(code) = error::code(payload) {
            return Err(LoginError::Refused { code, text: error_text(payload) });
        }
        let next = sequence.wrapping_add(1);
        if self.capabilities == Capabilities::default() {
            return self.on_greeting(next, payload);
        }
        match payload {
            [0x00, ..] => Ok(LoginStep::Done),
            [0xfe, switch @ ..] => {
                let (plugin, salt) = split_at_nul(switch);
                self.plugin = plugin.to_vec();
                let proof = self.proof(salt.strip_suffix(b"\0").unwrap_or(salt))?;
                Ok(LoginStep::Send(packets(&proof, next).into()))
            }
            // caching_sha2_password: the server knows the hash already, and OK follows.
            [0x01, 0x03] => Ok(LoginStep::Wait),
            // It asks for the password.
            [0x01, 0x04] if self.uses_tls => Ok(LoginStep::Send(packets(&self.clear_password(), next).into())),
            [0x01, 0x04] => Err(LoginError::NeedsTls { plugin: lossy(&self.plugin) }),
            _ => Err(LoginError::Protocol),
        }
    }

    fn on_greeting(&mut self, next: u8, payload: &[u8]) -> Result<LoginStep, LoginError> {
        let greeting = Greeting::parse(payload).ok_or(LoginError::Protocol)?;
        let offered = greeting.capabilities.understood();
        // MariaDB does not offer the first bit.
        if !offered.has(REQUIRED.without(Capabilities(1))) {
            return Err(LoginError::MissingCapabilities);
        }
        if self.uses_tls && !greeting.capabilities.has(Capabilities::SSL) {
            return Err(LoginError::NoTls);
        }
        self.capabilities = REQUIRED.with(OPTIONAL.and(offered));
        if self.uses_tls {
            self.capabilities = self.capabilities.with(Capabilities::SSL);
        }
        if !self.database.is_empty() {
            self.capabilities = self.capabilities.with(Capabilities::CONNECT_WITH_DB);
        }
        self.plugin = payload[greeting.plugin.clone()].to_vec();
        // With another plugin, the server asks for a switch.
        if self.plugin != CACHING_SHA2 {
            self.plugin = NATIVE.to_vec();
        }
        let response_sequence = if self.uses_tls { next.wrapping_add(1) } else { next };
        let response: SecretBytes = packets(&self.response(&greeting.salt)?, response_sequence).into();
        Ok(if self.uses_tls {
            LoginStep::StartTls { request: packets(&self.head(), next), response }
        } else {
            LoginStep::Send(response)
        })
    }

    /// The beginning of the handshake response, which is the whole request for TLS.
    fn head(&self) -> Vec<u8> {
        let mut payload = self.capabilities.0.to_le_bytes().to_vec();
        payload.extend((1_u32 << 30).to_le_bytes()); // the largest packet
        payload.push(COLLATION);
        payload.extend([0; 23]);
        payload
    }

    fn response(&self, salt: &[u8]) -> Result<Vec<u8>, LoginError> {
        let proof = self.proof(salt)?;
        let mut payload = self.head();
        payload.extend(self.user);
        payload.push(0);
        payload.push(proof.len() as u8);
        payload.extend(proof.iter());
        if self.capabilities.has(Capabilities::CONNECT_WITH_DB) {
            payload.extend(self.database);
            payload.push(0);
        }
        payload.extend(&self.plugin);
        payload.push(0);
        if self.capabilities.has(Capabilities::CONNECT_ATTRS) {
            let mut attributes = Vec::new();
            for text in CONNECTION_ATTRIBUTES.iter().flat_map(|(key, value)| [key, value]) {
                lenenc::write(&mut attributes, text.len() as u64);
                attributes.extend(text.as_bytes());
            }
            lenenc::write(&mut payload, attributes.len() as u64);
            payload.extend(attributes);
        }
        Ok(payload)
    }

    /// The authentication data of the plugin. Without a password it is empty, whatever the plugin.
    fn proof(&self, salt: &[u8]) -> Result<SecretBytes, LoginError> {
        if self.password.is_empty() {
            return Ok(SecretBytes::default());
        }
        match &*self.plugin {
            NATIVE => Ok(native_proof(self.password, salt).into()),
            // TiDB asks for the password, whatever hash it gets for the second one.
            CACHING_SHA2 | b"tidb_sm3_password" => Ok(sha2_proof(self.password, salt).into()),
            b"mysql_clear_password" | b"sha256_password" if self.uses_tls => Ok(self.clear_password()),
            b"mysql_clear_password" | b"sha256_password" => Err(LoginError::NeedsTls { plugin: lossy(&self.plugin) }),
            other => Err(LoginError::UnsupportedPlugin { plugin: lossy(other) }),
        }
    }

    fn clear_password(&self) -> SecretBytes {
        let mut password = SecretBytes::with_capacity(self.password.len() + 1);
        password.extend_from_slice(self.password);
        password.push(0);
        password
    }
}

/// The text of an ERR packet, which has a marker and a state of five characters before it, or not.
pub(crate) fn error_text(payload: &[u8]) -> String {
    let text = payload.get(3..).unwrap_or_default();
    let text = if text.first() == Some(&b'#') { text.get(6..).unwrap_or_default() } else { text };
    lossy(text)
}

/// SHA1(password) XOR SHA1(salt, SHA1(SHA1(password))).
fn native_proof(password: &[u8], salt: &[u8]) -> Vec<u8> {
    let once = hash(&SHA1_FOR_LEGACY_USE_ONLY, &[password]);
    let salted = hash(&SHA1_FOR_LEGACY_USE_ONLY, &[salt, &hash(&SHA1_FOR_LEGACY_USE_ONLY, &[&once])]);
    xor(&once, &salted)
}

/// SHA256(password) XOR SHA256(SHA256(SHA256(password)), salt).
fn sha2_proof(password: &[u8], salt: &[u8]) -> Vec<u8> {
    let once = hash(&SHA256, &[password]);
    let salted = hash(&SHA256, &[&hash(&SHA256, &[&hash(&SHA256, &[password])]), salt]);
    xor(&once, &salted)
}

fn hash(algorithm: &'static Algorithm, parts: &[&[u8]]) -> Vec<u8> {
    digest(algorithm, &parts.concat()).as_ref().to_vec()
}

fn xor(one: &[u8], other: &[u8]) -> Vec<u8> {
    one.iter().zip(other).map(|(one, other)| one ^ other).collect()
}

fn split_at_nul(bytes: &[u8]) -> (&[u8], &[u8]) {
    let end = bytes.iter().position(|byte| *byte == 0);
    end.map_or((bytes, &[]), |end| (&bytes[..end], &bytes[end + 1..]))
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mysql_proto::handshake_response::HandshakeResponse;

    const SALT: &[u8] = b"abcdefghijklmnopqrst";

    fn greeting(offered: Capabilities, plugin: &str) -> Vec<u8> {
        let [a, b, c, d] = offered.0.to_le_bytes();
        let mut payload = b"\x0a8.0.11-TiDB\0\x07\0\0\0".to_vec();
        payload.extend(&SALT[..8]);
        payload.extend([0, a, b, 45, 2, 0, c, d, 21]);
        payload.extend([0; 10]);
        payload.extend(&SALT[8..]);
        payload.push(0);
        payload.extend(plugin.as_bytes());
        payload.push(0);
        payload
    }

    fn response_of(login: &mut Login<'_>, offered: Capabilities, plugin: &str) -> Vec<u8> {
        let step = login.receive(0, &greeting(offered, plugin)).expect("a greeting");
        let LoginStep::Send(response) = step else { panic!("{step:?}") };
        assert_eq!(response[3], 1);
        response[4..].to_vec()
    }

    #[test]
    fn response_has_user_proof_and_database() {
        let mut login = Login::new(b"app", b"secret", b"shop", false);
        let payload = response_of(&mut login, REQUIRED.with(OPTIONAL), "mysql_native_password");
        let response = HandshakeResponse::parse(&payload, login.capabilities).expect("a response");
        assert_eq!((response.names(&payload).user(), response.names(&payload).database()), (&b"app"[..], &b"shop"[..]));
        assert!(payload.ends_with(b"\x0cprogram_name\x0etidevoy-replay"));
        assert!(login.capabilities.has(Capabilities::DEPRECATE_EOF));
        // A server stores SHA1(SHA1(password)), and checks the proof in this way.
        let sha1 = |bytes: &[u8]| hash(&SHA1_FOR_LEGACY_USE_ONLY, &[bytes]);
        let stored = sha1(&sha1(b"secret"));
        let once = xor(&payload[response.auth], &sha1(&[SALT, &stored].concat()));
        assert_eq!(sha1(&once), stored);
        assert_eq!(login.receive(2, b"\0\0\0\x02\0\0\0"), Ok(LoginStep::Done));
    }

    #[test]
    fn without_a_password_the_proof_is_empty_for_any_plugin() {
        let mut login = Login::new(b"root", b"", b"", false);
        let payload = response_of(&mut login, REQUIRED, "caching_sha2_password");
        assert!(payload[32..].starts_with(b"root\0\0caching_sha2_password\0"));
        let step = login.receive(2, b"\xfeauth_of_another_kind\0salt\0");
        assert_eq!(step, Ok(LoginStep::Send(vec![0, 0, 0, 3].into())));
    }

    #[test]
    fn password_is_sent_in_clear_text_only_through_tls() {
        let mut plain = Login::new(b"root", b"secret", b"", false);
        response_of(&mut plain, REQUIRED, "caching_sha2_password");
        let plugin = || "caching_sha2_password".to_owned();
        assert_eq!(plain.receive(2, b"\x01\x04"), Err(LoginError::NeedsTls { plugin: plugin() }));
        assert_eq!(plain.receive(2, b"\x01\x03"), Ok(LoginStep::Wait));
        let clear = plain.receive(2, b"\xfemysql_clear_password\0");
        assert_eq!(clear, Err(LoginError::NeedsTls { plugin: "mysql_clear_password".to_owned() }));
        let mut secured = Login::new(b"root", b"secret", b"", true);
        let step = secured.receive(0, &greeting(REQUIRED.with(Capabilities::SSL), "caching_sha2_password"));
        let Ok(LoginStep::StartTls { request, response }) = step else { panic!("no TLS") };
        assert_eq!((request.len(), request[3], response[3]), (36, 1, 2));
        assert_eq!(request[4..], response[4..36]);
        assert_eq!(secured.receive(2, b"\x01\x04"), Ok(LoginStep::Send(b"\x07\0\0\x03secret\0"[..].into())));
    }

    #[test]
    fn errors_of_the_server_are_reported() {
        let mut login = Login::new(b"root", b"", b"", true);
        assert_eq!(login.receive(0, &greeting(REQUIRED, "")), Err(LoginError::NoTls));
        let mut login = Login::new(b"root", b"secret", b"", false);
        let refused = login.receive(0, b"\xff\x10\x04Too many connections");
        assert_eq!(refused, Err(LoginError::Refused { code: 1040, text: "Too many connections".into() }));
        assert_eq!(login.receive(0, b"HTTP/1.1 400"), Err(LoginError::Protocol));
        assert_eq!(login.receive(0, &greeting(Capabilities::PROTOCOL_41, "")), Err(LoginError::MissingCapabilities));
        response_of(&mut login, REQUIRED, "mysql_native_password");
        let refused = login.receive(2, b"\xff\x15\x04#28000Access denied");
        assert_eq!(refused, Err(LoginError::Refused { code: 1045, text: "Access denied".into() }));
        let other = login.receive(2, b"\xfedialog\0");
        assert_eq!(other, Err(LoginError::UnsupportedPlugin { plugin: "dialog".into() }));
    }
}
