//! The server's first packet (protocol 10): parses it, and edits its capabilities in place.
//!
//! Layout: `0a`, version NUL, connection id u32, 8 bytes of salt, `00`, low half of the capabilities u16; then, in all
//! current servers: collation u8, status u16, high half u16, length of the salt u8, 10 bytes of filler, the rest of the
//! salt, plugin NUL ("Protocol::HandshakeV10", dev.mysql.com).

use crate::capability::Capabilities;
use std::ops::Range;

/// Maximum payload bytes of a greeting. Real greetings have about 100.
pub const MAX_GREETING_BYTES: usize = 64 * 1024;

/// MariaDB's servers and clients leave this bit of MySQL unset. The filler then contains MariaDB's own capabilities
/// ("Connecting", MariaDB's protocol documentation).
pub(crate) const MYSQL: Capabilities = Capabilities(1);

/// MariaDB capabilities that the tracker does not support: progress reports, which look like errors but do not end a
/// response (bit 32); several commands in one packet (33); results without column definitions (36). The proxy removes
/// them from the first packets of both sides.
const UNSUPPORTED: u32 = 1 | 1 << 1 | 1 << 4;

/// Bytes of the salt in its first field; the second field has the rest.
const FIRST_SALT: usize = 8;
/// Bytes of the salt that clients use, without the NUL after it.
const SALT: usize = 20;

/// The fields of a greeting that the proxy uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    pub capabilities: Capabilities,
    /// The salt with which clients hash or encrypt a password: 20 bytes, or 8 if the server sends no more.
    pub salt: Vec<u8>,
    /// The range of the plugin's name; empty if there is none.
    pub plugin: Range<usize>,
    /// Where the low half of the capabilities is.
    low: usize,
    /// Where the high half of the capabilities is. None: the greeting is too short for it.
    high: Option<usize>,
    /// Where MariaDB's own capabilities are. None: the server has none.
    extended: Option<usize>,
}

impl Greeting {
    /// Parses a payload; None unless it is a greeting of protocol 10 with protocol 4.1.
    #[must_use]
    pub fn parse(payload: &[u8]) -> Option<Self> {
        if *payload.first()? != 10 {
            return None;
        }
        let version = payload.iter().skip(1).position(|&byte| byte == 0)?;
        let first_salt = 1 + version + 1 + 4;
        let low = first_salt + FIRST_SALT + 1;
        let mut salt = payload.get(first_salt..first_salt + FIRST_SALT)?.to_vec();
        let mut bits = u32::from(half(payload, low)?);
        let filler = low + 8;
        let high = payload.get(low + 5..filler + 10).map(|_| low + 5);
        let mut plugin = payload.len()..payload.len();
        let mut extended = None;
        if let Some(high) = high {
            bits |= u32::from(half(payload, high)?) << 16;
            if bits & MYSQL.0 == 0 {
                extended = Some(filler + 6);
            }
            let mut rest = filler + 10;
            if Capabilities(bits).has(Capabilities::SECURE_CONNECTION) {
                // At least 13 bytes, whatever the length field says: 12 bytes of salt and a NUL.
                let length = usize::from(payload[high + 2]).saturating_sub(FIRST_SALT);
                let end = payload.len().min(rest + length.max(SALT - FIRST_SALT + 1));
                salt.extend(&payload[rest..end.min(rest + SALT - FIRST_SALT)]);
                rest = end;
            }
            if Capabilities(bits).has(Capabilities::PLUGIN_AUTH) {
                let name = payload[rest..].iter().take_while(|&&byte| byte != 0);
                plugin = rest..rest + name.count();
            }
        }
        let capabilities = Capabilities(bits);
        capabilities.has(Capabilities::PROTOCOL_41).then_some(Self { capabilities, salt, plugin, low, high, extended })
    }

    /// Replaces the capabilities in `payload`, from which `self` was parsed, and clears the MariaDB capabilities that
    /// the tracker does not support. The layout stays the same.
    pub fn offer(&self, payload: &mut [u8], capabilities: Capabilities) {
        let [a, b, c, d] = capabilities.0.to_le_bytes();
        payload[self.low..self.low + 2].copy_from_slice(&[a, b]);
        if let Some(high) = self.high {
            payload[high..high + 2].copy_from_slice(&[c, d]);
        }
        if let Some(extended) = self.extended {
            clear_unsupported(&mut payload[extended..extended + 4]);
        }
    }
}

/// Clears unsupported bits in MariaDB's 4 bytes of capabilities.
pub(crate) fn clear_unsupported(extended: &mut [u8]) {
    for (byte, mask) in extended.iter_mut().zip(UNSUPPORTED.to_le_bytes()) {
        *byte &= !mask;
    }
}

/// The connection id in the payload of a greeting. None: it is no greeting.
#[must_use]
pub fn connection_id(payload: &[u8]) -> Option<u32> {
    let (&10, rest) = payload.split_first()? else { return None };
    let version = rest.iter().position(|&byte| byte == 0)?;
    Some(u32::from_le_bytes(*rest.get(version + 1..)?.first_chunk()?))
}

fn half(payload: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*payload.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long(bits: u32, version: &str, filler: [u8; 10], plugin: &str) -> Vec<u8> {
        let mut payload = vec![10];
        payload.extend(version.as_bytes());
        payload.extend([0, 7, 0, 0, 0]);
        payload.extend(b"abcdefgh\0");
        payload.extend(&bits.to_le_bytes()[..2]);
        payload.extend([46, 2, 0]);
        payload.extend(&bits.to_le_bytes()[2..]);
        payload.push(21);
        payload.extend(filler);
        payload.extend(b"ijklmnopqrst\0");
        payload.extend(plugin.as_bytes());
        payload.push(0);
        payload
    }

    const BITS: u32 = 1 << 9 | 1 << 15 | 1 << 19;

    #[test]
    fn parse_joins_both_salt_fields_and_finds_the_plugin() {
        let payload = long(BITS | 1, "8.0.11-TiDB-v8.5.3", [0; 10], "caching_sha2_password");
        let greeting = Greeting::parse(&payload).expect("a greeting");
        assert_eq!(greeting.salt, b"abcdefghijklmnopqrst");
        assert_eq!(&payload[greeting.plugin.clone()], b"caching_sha2_password");
        assert_eq!(greeting.capabilities, Capabilities(BITS | 1));
        assert_eq!(connection_id(&payload), Some(7));
        assert_eq!([&b""[..], b"\x0a8.0", b"\x0a8.0\0\x01\0\0", b"\xff"].map(connection_id), [None; 4]);
    }

    #[test]
    fn second_salt_field_has_13_bytes_even_if_its_length_says_fewer() {
        let mut payload = long(BITS | 1, "8.0", [0; 10], "plug");
        let at = payload.iter().position(|&byte| byte == 21).expect("a length");
        for length in [0, 8, 20] {
            payload[at] = length;
            let greeting = Greeting::parse(&payload).expect("a greeting");
            assert_eq!(greeting.salt, b"abcdefghijklmnopqrst");
            assert_eq!(&payload[greeting.plugin], b"plug");
        }
    }

    #[test]
    fn plugin_name_without_nul_is_accepted() {
        let mut payload = long(BITS | 1, "5.5.9", [0; 10], "mysql_native_password");
        payload.pop();
        let greeting = Greeting::parse(&payload).expect("a greeting");
        assert_eq!(&payload[greeting.plugin], b"mysql_native_password");
    }

    #[test]
    fn greeting_with_short_salt_and_no_plugin_is_accepted() {
        let mut payload = b"\x0a5.0\0\x07\0\0\0abcdefgh\0".to_vec();
        payload.extend([0x01, 0x02]);
        let greeting = Greeting::parse(&payload).expect("a greeting");
        assert_eq!(greeting.salt, b"abcdefgh");
        assert!(greeting.plugin.is_empty());
        let before = payload.clone();
        greeting.offer(&mut payload, greeting.capabilities.with(Capabilities::SSL));
        assert_eq!(payload.len(), before.len());
        assert_eq!(payload[payload.len() - 2..], [0x01, 0x0a]);
        // The long layout without the second part of the salt and without a plugin.
        let payload = long(1 | 1 << 9, "4.1", [0; 10], "");
        assert_eq!(Greeting::parse(&payload).expect("a greeting").salt, b"abcdefgh");
    }

    #[test]
    fn offer_clears_unsupported_capabilities_of_mariadb_only() {
        let filler = [0, 0, 0, 0, 0, 0, 0x3f, 0, 0, 0x80];
        for (mysql, kept) in [(0, 0x2c), (1, 0x3f)] {
            let mut payload = long(BITS | mysql, "11.8.2-MariaDB", filler, "mysql_native_password");
            let before = payload.clone();
            let greeting = Greeting::parse(&payload).expect("a greeting");
            greeting.offer(&mut payload, greeting.capabilities);
            let at = before.windows(10).position(|window| window == filler).expect("filler");
            assert_eq!(payload[at..at + 10], [0, 0, 0, 0, 0, 0, kept, 0, 0, 0x80]);
            payload[at + 6] = 0x3f;
            assert_eq!(payload, before);
        }
    }

    #[test]
    fn truncated_and_unsupported_greetings_are_rejected() {
        let good = long(BITS | 1, "8.0", [0; 10], "x");
        for end in 0..20 {
            assert_eq!(Greeting::parse(&good[..end]), None, "{end}");
        }
        assert_eq!(Greeting::parse(b"\x09abc\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"), None);
        assert_eq!(Greeting::parse(&long(1 | 1 << 15, "4.0", [0; 10], "x")), None);
    }
}
