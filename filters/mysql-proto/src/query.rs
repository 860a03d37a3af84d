//! The texts and ids of statements in requests.

use std::ops::Range;

use crate::command::Command;
use crate::lenenc;

/// MariaDB: the statement id that stands for the statement prepared last.
pub const LAST_PREPARED: u32 = u32::MAX;

/// What precedes the text of COM_QUERY if there are no attributes, although client and node have agreed on them: the count
/// 0, and one set of parameters.
pub const NO_ATTRIBUTES: &[u8] = &[0, 1];

/// Where the text of COM_QUERY or COM_STMT_PREPARE is in the payload. `has_attributes`: client and node have agreed on
/// query attributes, which precede the text of COM_QUERY. None: another command, or invalid attributes.
///
/// Format: MySQL source documentation, "COM_QUERY", "COM_STMT_PREPARE" and "Binary Protocol Value". TiDB ignores a zero
/// byte at the end (pingcap/tidb `pkg/server/conn.go`, `dispatch`).
#[must_use]
pub fn text_range(payload: &[u8], has_attributes: bool) -> Option<Range<usize>> {
    let (&command, rest) = payload.split_first()?;
    let text = match Command::from(command) {
        Command::Query if has_attributes => skip_attributes(rest)?,
        Command::Query | Command::Prepare => rest,
        _ => return None,
    };
    let start = payload.len() - text.len();
    Some(start..start + text.strip_suffix(b"\0").unwrap_or(text).len())
}

/// The text of COM_QUERY, as far as it was received. `content`: what was received behind the command. None: attributes
/// precede the text, or not even their number was received.
#[must_use]
pub fn known_text(content: &[u8], has_attributes: bool) -> Option<&[u8]> {
    if has_attributes { content.strip_prefix(NO_ATTRIBUTES) } else { Some(content) }
}

/// The statement id in the payload of a command that names a prepared statement.
#[must_use]
pub fn statement_id(payload: &[u8]) -> Option<u32> {
    payload.get(1..)?.first_chunk().map(|id| u32::from_le_bytes(*id))
}

fn skip_attributes(bytes: &[u8]) -> Option<&[u8]> {
    let (count, bytes) = integer(bytes)?;
    let (_sets, mut bytes) = integer(bytes)?;
    if count == 0 {
        return Some(bytes);
    }
    // Each attribute takes three bytes at least, so a count that passes is small enough to store the types.
    let nulls = bytes.get(..count.checked_add(7)? / 8)?;
    bytes = bytes.get(nulls.len()..)?;
    let (&[1], mut bytes) = bytes.split_first_chunk()? else { return None };
    let mut types = Vec::new();
    for _ in 0..count {
        let (&[kind, _sign], behind) = bytes.split_first_chunk()?;
        (_, bytes) = text(behind)?; // the name
        types.push(kind);
    }
    for (index, kind) in types.into_iter().enumerate() {
        let is_null = nulls[index / 8] >> (index % 8) & 1 == 1;
        let length = match kind {
            _ if is_null => 0,
            0x06 => 0,                                                     // NULL
            0x01 => 1,                                                     // TINYINT
            0x02 | 0x0d => 2,                                              // SMALLINT, YEAR
            0x03 | 0x04 | 0x09 => 4,                                       // INT, FLOAT, MEDIUMINT
            0x05 | 0x08 => 8,                                              // DOUBLE, BIGINT
            0x07 | 0x0a | 0x0b | 0x0c => 1 + usize::from(*bytes.first()?), // TIMESTAMP, DATE, TIME, DATETIME
            _ => {
                let (value, behind) = integer(bytes)?;
                bytes = behind;
                value
            }
        };
        bytes = bytes.get(length..)?;
    }
    Some(bytes)
}

fn integer(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (value, length) = lenenc::read(bytes)?;
    Some((usize::try_from(value).ok()?, &bytes[length..]))
}

fn text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, bytes) = integer(bytes)?;
    bytes.split_at_checked(length)
}
