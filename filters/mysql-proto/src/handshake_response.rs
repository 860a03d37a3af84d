//! The client's first packets: HandshakeResponse41 and SSLRequest.
//!
//! Layout: capabilities u32, largest packet u32, collation u8, 23 bytes of filler (MariaDB's own capabilities in
//! the last 4), user NUL, authentication data, database NUL, plugin NUL, attributes
//! ("Protocol::HandshakeResponse41", dev.mysql.com). An SSLRequest is the first 32 bytes.

use crate::capability::Capabilities;
use crate::greeting::{MYSQL, clear_unsupported};
use crate::login_names::LoginNames;
use crate::secret::SecretBytes;
use crate::{lenenc, packet};
use std::ops::Range;

/// Bytes before the user name; an SSLRequest has only these.
pub const HEAD: usize = 32;
/// Maximum payload bytes of a packet from the client during its login.
pub const MAX_RESPONSE_BYTES: usize = 1024 * 1024;
/// Maximum bytes of connection attributes. MySQL's servers reject clients that send more ("Performance Schema
/// Connection Attribute Tables", dev.mysql.com).
pub const MAX_ATTRIBUTES_BYTES: usize = 64 * 1024;
/// Maximum bytes of the length before the attributes.
const MAX_LENGTH_BYTES: usize = 9;

/// Where MariaDB's clients have their own capabilities.
const EXTENDED: Range<usize> = 28..HEAD;

/// The byte ranges of the fields that the proxy reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeResponse {
    /// The user's name.
    user: Range<usize>,
    /// None if the response has no database, or only a part of its name.
    database: Option<Range<usize>>,
    /// The authentication data, without length or NUL.
    pub auth: Range<usize>,
    /// The authentication data with its length or NUL.
    auth_field: Range<usize>,
    /// The name of the client's plugin; None if the response has none.
    pub plugin: Option<Range<usize>>,
    /// Everything after the plugin: the length of the attributes, the attributes, and perhaps the compression level
    /// of zstd.
    pub attributes: Range<usize>,
    form: Form,
}

/// How the authentication data is encoded: its length in front, or NUL at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Lenenc,
    Byte,
    Nul,
}

impl HandshakeResponse {
    /// Finds the fields of `payload`, whose layout depends on `capabilities`. None if the user name or the
    /// authentication data is incomplete.
    ///
    /// Later fields may be missing, as in MySQL's server.
    #[must_use]
    pub fn parse(payload: &[u8], capabilities: Capabilities) -> Option<Self> {
        let user = until_nul(payload, HEAD)?;
        let field = user.end + 1;
        let rest = payload.get(field..)?;
        let form = if capabilities.has(Capabilities::PLUGIN_AUTH_LENENC_DATA) {
            Form::Lenenc
        } else if capabilities.has(Capabilities::SECURE_CONNECTION) {
            Form::Byte
        } else {
            Form::Nul
        };
        let auth = match form {
            _ if rest.is_empty() => field..field,
            Form::Lenenc => {
                let (length, width) = lenenc::read(rest)?;
                let start = field + width;
                start..start.checked_add(usize::try_from(length).ok()?)?
            }
            Form::Byte => field + 1..field + 1 + usize::from(rest[0]),
            Form::Nul => until_nul(payload, field).unwrap_or(field..payload.len()),
        };
        payload.get(auth.clone())?;
        let mut end = auth.end + usize::from(form == Form::Nul);
        end = end.min(payload.len());
        let auth_field = field..end;
        let mut plugin = None;
        let has_database = capabilities.has(Capabilities::CONNECT_WITH_DB);
        let database = if has_database { until_nul(payload, end) } else { None };
        end = database.as_ref().map_or(end, |name| name.end + 1);
        let is_database_complete = !has_database || database.is_some();
        if is_database_complete && capabilities.has(Capabilities::PLUGIN_AUTH) && end < payload.len() {
            let name = until_nul(payload, end).unwrap_or(end..payload.len());
            end = payload.len().min(name.end + 1);
            plugin = Some(name);
        }
        Some(Self { user, database, auth, auth_field, plugin, attributes: end..payload.len(), form })
    }

    /// The user and the database in `payload`.
    #[must_use]
    pub fn names(&self, payload: &[u8]) -> LoginNames {
        let database = self.database.clone().map_or(&[][..], |name| &payload[name]);
        LoginNames::new(&payload[self.user.clone()], database)
    }

    /// Returns `payload` with `auth` as authentication data; None if `auth` is too long for the encoding.
    #[must_use]
    pub fn with_auth(&self, payload: &[u8], auth: &[u8]) -> Option<SecretBytes> {
        let mut changed = SecretBytes::with_capacity(payload.len() + MAX_LENGTH_BYTES + auth.len() + 1);
        changed.extend_from_slice(&payload[..self.auth_field.start]);
        match self.form {
            Form::Lenenc => {
                let mut length = Vec::new();
                lenenc::write(&mut length, auth.len() as u64);
                changed.extend_from_slice(&length);
            }
            Form::Byte => changed.push(u8::try_from(auth.len()).ok()?),
            Form::Nul => {}
        }
        changed.extend_from_slice(auth);
        if self.form == Form::Nul && auth.last() != Some(&0) {
            changed.push(0);
        }
        changed.extend_from_slice(&payload[self.auth_field.end..]);
        Some(changed)
    }
}

/// The user name in a HandshakeResponse41. None: the payload is cut short.
#[must_use]
pub fn user(payload: &[u8]) -> Option<&[u8]> {
    until_nul(payload, HEAD).map(|user| &payload[user])
}

/// Whether `attributes`, which begin with their length, exceed [`MAX_ATTRIBUTES_BYTES`].
#[must_use]
pub(crate) fn exceeds_attribute_limit(attributes: &[u8]) -> bool {
    // The compression level of zstd, one byte, may follow the attributes.
    attributes.len() > MAX_ATTRIBUTES_BYTES + MAX_LENGTH_BYTES + 1
        || lenenc::read(attributes).is_some_and(|(length, _)| length > MAX_ATTRIBUTES_BYTES as u64)
}

/// The capabilities at the front of a client's first packet. Missing bytes count as zero: before protocol 4.1 there
/// were 2 bytes.
#[must_use]
pub fn capabilities(payload: &[u8]) -> Capabilities {
    let mut bytes = [0; 4];
    for (byte, &given) in bytes.iter_mut().zip(payload) {
        *byte = given;
    }
    Capabilities(u32::from_le_bytes(bytes))
}

/// Sets the capabilities in a response or SSLRequest of at least [`HEAD`] bytes. Clears the MariaDB capabilities that
/// the tracker does not support.
pub fn set_capabilities(payload: &mut [u8], capabilities: Capabilities) {
    payload[..4].copy_from_slice(&capabilities.0.to_le_bytes());
    if !capabilities.has(MYSQL) {
        clear_unsupported(&mut payload[EXTENDED]);
    }
}

/// The SSLRequest packet, header included, with the payload `head`, in which `capabilities` and SSL are set.
#[must_use]
pub fn ssl_request(head: [u8; HEAD], capabilities: Capabilities) -> [u8; packet::HEADER + HEAD] {
    let mut whole = [0; packet::HEADER + HEAD];
    let header = packet::Header { length: HEAD, sequence: 1 };
    whole[..packet::HEADER].copy_from_slice(&header.bytes());
    whole[packet::HEADER..].copy_from_slice(&head);
    set_capabilities(&mut whole[packet::HEADER..], capabilities.with(Capabilities::SSL));
    whole
}

/// The range from `start` to the next NUL, without the NUL; None if there is no NUL.
fn until_nul(payload: &[u8], start: usize) -> Option<Range<usize>> {
    let length = payload.get(start..)?.iter().position(|&byte| byte == 0)?;
    Some(start..start + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Capabilities = Capabilities::PROTOCOL_41.with(Capabilities::PLUGIN_AUTH);
    const LENENC: Capabilities = BASE.with(Capabilities::SECURE_CONNECTION).with(Capabilities::PLUGIN_AUTH_LENENC_DATA);

    fn payload(capabilities: Capabilities, auth: &[u8], rest: &[u8]) -> Vec<u8> {
        let mut payload = capabilities.0.to_le_bytes().to_vec();
        payload.resize(HEAD, 0);
        payload.extend(b"root\0");
        payload.extend(auth);
        payload.extend(rest);
        payload
    }

    #[test]
    fn auth_data_is_read_and_replaced_in_all_three_encodings() {
        let forms: [(Capabilities, &[u8]); 3] =
            [(LENENC, b"\x03abc"), (BASE.with(Capabilities::SECURE_CONNECTION), b"\x03abc"), (BASE, b"abc\0")];
        for (capabilities, field) in forms {
            for database in [false, true] {
                let (capabilities, rest): (_, &[u8]) = if database {
                    (capabilities.with(Capabilities::CONNECT_WITH_DB), b"test\0plug\0\x00")
                } else {
                    (capabilities, b"plug\0\x00")
                };
                let whole = payload(capabilities, field, rest);
                let response = HandshakeResponse::parse(&whole, capabilities).expect("a response");
                let names = response.names(&whole);
                assert_eq!((names.user(), names.database()), (&b"root"[..], &b"test"[..if database { 4 } else { 0 }]));
                assert_eq!(&whole[response.auth.clone()], b"abc");
                assert_eq!(&whole[response.plugin.clone().expect("a plugin")], b"plug");
                assert_eq!(&whole[response.attributes.clone()], b"\x00");
                let other = response.with_auth(&whole, b"secret\0").expect("it fits");
                let changed = HandshakeResponse::parse(&other, capabilities).expect("a response");
                assert!(other[changed.auth.clone()].starts_with(b"secret"));
                assert_eq!(&other[changed.plugin.expect("a plugin")], b"plug");
                assert!(other.ends_with(rest));
            }
        }
    }

    #[test]
    fn auth_data_over_255_bytes_needs_a_lenenc_length() {
        let whole = payload(LENENC, b"\x00", b"");
        let response = HandshakeResponse::parse(&whole, LENENC).expect("a response");
        let other = response.with_auth(&whole, &[7; 300]).expect("it fits");
        assert_eq!(HandshakeResponse::parse(&other, LENENC).expect("a response").auth.len(), 300);
        let short = BASE.with(Capabilities::SECURE_CONNECTION);
        let response = HandshakeResponse::parse(&whole, short).expect("a response");
        assert_eq!(response.with_auth(&whole, &[7; 300]), None);
    }

    #[test]
    fn fields_after_the_auth_data_may_be_missing() {
        let with_database = LENENC.with(Capabilities::CONNECT_WITH_DB);
        for (capabilities, rest) in [(LENENC, &b""[..]), (with_database, b""), (with_database, b"db")] {
            let whole = payload(capabilities, b"\x00", rest);
            let response = HandshakeResponse::parse(&whole, capabilities).expect("a response");
            assert_eq!((response.plugin, response.attributes.end), (None, whole.len()));
        }
        let whole = payload(LENENC, b"", b"");
        assert!(HandshakeResponse::parse(&whole, LENENC).expect("a response").auth.is_empty());
    }

    #[test]
    fn with_auth_adds_missing_auth_data() {
        for capabilities in [LENENC, BASE.with(Capabilities::SECURE_CONNECTION), BASE] {
            let whole = payload(capabilities, b"", b"");
            let response = HandshakeResponse::parse(&whole, capabilities).expect("a response");
            let other = response.with_auth(&whole, b"abc").expect("it fits");
            let changed = HandshakeResponse::parse(&other, capabilities).expect("a response");
            assert_eq!(&other[changed.auth], b"abc");
        }
    }

    #[test]
    fn incomplete_auth_data_is_rejected() {
        let huge = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff";
        for auth in [&b"\x05abc"[..], b"\xfc\x00", b"\xff", huge] {
            assert_eq!(HandshakeResponse::parse(&payload(LENENC, auth, b""), LENENC), None, "{auth:?}");
        }
        let no_nul = &payload(LENENC, b"", b"")[..HEAD + 4];
        assert_eq!(HandshakeResponse::parse(no_nul, LENENC), None);
        assert_eq!(HandshakeResponse::parse(&[0; HEAD], LENENC), None);
    }

    #[test]
    fn ssl_request_is_the_response_head_with_the_ssl_bit() {
        let mut head = [0; HEAD];
        head[4..9].copy_from_slice(&[1, 2, 3, 4, 46]);
        head[28] = 0x3f;
        let whole = ssl_request(head, Capabilities::PROTOCOL_41);
        assert_eq!(whole[..4], [32, 0, 0, 1]);
        assert_eq!(whole[4..13], [0, 0x0a, 0, 0, 1, 2, 3, 4, 46]);
        assert_eq!(whole[32], 0x2c);
        assert_eq!(ssl_request(head, Capabilities(1))[32], 0x3f);
    }
}
