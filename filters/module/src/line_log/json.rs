//! Lines of JSON.
//!
//! What they contain comes from clients. So a line consists of printable ASCII characters: JSON escapes hide all others,
//! among them line breaks and the control characters of terminals.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};

/// The line of a record, with its line break.
pub(crate) fn to_line(record: &impl Serialize) -> Vec<u8> {
    let mut line = Vec::with_capacity(512);
    let mut serializer = serde_json::Serializer::with_formatter(&mut line, AsciiFormatter);
    // Serializing cannot fail: writing to memory cannot, and all keys are strings.
    let _ = record.serialize(&mut serializer);
    line.push(b'\n');
    line
}

/// Compact JSON that escapes all characters except printable ASCII characters.
struct AsciiFormatter;

impl serde_json::ser::Formatter for AsciiFormatter {
    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        const DELETE: char = '\x7f';
        let is_printable = |character: char| character.is_ascii() && character != DELETE;
        let mut rest = fragment;
        while let Some(special) = rest.find(|character| !is_printable(character)) {
            writer.write_all(&rest.as_bytes()[..special])?;
            let character = rest[special..].chars().next().unwrap_or_default();
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = &rest[special + character.len_utf8()..];
        }
        writer.write_all(rest.as_bytes())
    }
}

pub(crate) fn write_time<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*time))
}

/// A dual-stack listener has IPv6 addresses for IPv4 clients. The line has the IPv4 address.
pub(crate) fn write_address<S: Serializer>(address: &Option<SocketAddr>, serializer: S) -> Result<S::Ok, S::Error> {
    match address {
        Some(address) => serializer.collect_str(&SocketAddr::new(address.ip().to_canonical(), address.port())),
        None => serializer.serialize_none(),
    }
}

pub(crate) fn write_milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_micros() as f64 / 1000.0)
}
