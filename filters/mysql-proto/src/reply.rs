//! Reads the first bytes of a node's response.
//!
//! The functions take the first payload bytes of a message ([`REPLY_PREFIX_BYTES`] are enough). None in a result means
//! that they do not understand these bytes, unless documented otherwise.

use crate::command_observer::PasswordRequest;
use crate::lenenc;
use crate::login;
use crate::packet::MAX_PAYLOAD;

/// Bytes of a response that matter: header byte, two integers of up to 9 bytes, status and warnings.
pub(crate) const REPLY_PREFIX_BYTES: usize = 1 + 9 + 9 + 2 + 2;

/// First bytes of packets.
pub(crate) const OK: u8 = 0x00;
/// In COM_CHANGE_USER: more authentication data.
pub(crate) const AUTH_MORE: u8 = 0x01;
/// In COM_CHANGE_USER: another factor of authentication.
pub(crate) const AUTH_NEXT_FACTOR: u8 = 0x02;
pub(crate) const LOCAL_INFILE: u8 = 0xfb;
/// The end of definitions or rows; in COM_CHANGE_USER, a switch to another authentication plugin.
pub(crate) const END: u8 = 0xfe;
pub(crate) const ERROR: u8 = 0xff;

/// "Error code" of MariaDB's progress reports, which are not errors and do not end a response.
pub(crate) const PROGRESS: u16 = 0xffff;

/// How the node asks for the password: caching_sha2_password's "full authentication", or a switch to a plugin that
/// sends the password. None: it does not ask. Of plugin names that exceed the prefix, the first bytes are compared.
pub(crate) fn password_request(payload: &[u8]) -> Option<PasswordRequest> {
    // Also a packet that came in one piece is cut to the prefix, so that the result does not depend on the splitting.
    match &payload[..payload.len().min(REPLY_PREFIX_BYTES)] {
        [AUTH_MORE, 0x04] => Some(PasswordRequest::Encrypted),
        [END, switch @ ..] => login::password_request_of_switch(switch),
        _ => None,
    }
}

fn u16_at(payload: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*payload.get(at..)?.first_chunk()?))
}

/// The code of an ERR packet.
pub(crate) fn error_code(payload: &[u8]) -> Option<u16> {
    u16_at(payload, 1)
}

/// Whether an ERR packet says that the node has no such statement (ER_UNKNOWN_STMT_HANDLER).
///
/// TiDB sends some errors as ER_UNKNOWN_ERROR, with their code in the text (pingcap/tidb `pkg/server/conn.go`,
/// `writeError`, for an `SQLError` of `pkg/parser/mysql/error.go`).
pub(crate) fn is_unknown_statement(payload: &[u8]) -> bool {
    const MARKER_AND_STATE: usize = 6;
    match error_code(payload) {
        Some(1243) => true,
        Some(1105) => payload.get(3 + MARKER_AND_STATE..).is_some_and(|text| text.starts_with(b"ERROR 1243 ")),
        _ => false,
    }
}

/// The status flags of an OK packet. What follows (warnings, text, session tracking) does not matter.
pub(crate) fn ok_status(payload: &[u8]) -> Option<u16> {
    let (_, rows) = lenenc::read(payload.get(1..)?)?;
    let (_, id) = lenenc::read(payload.get(1 + rows..)?)?;
    u16_at(payload, 1 + rows + id)
}

/// Whether a packet that begins with `fe` ends definitions or rows. A row begins with `fe` only if its first value has
/// 2^24 bytes or more, and then its first packet has the maximum length.
pub(crate) const fn is_end(first: u8, length: usize) -> bool {
    first == END && length < MAX_PAYLOAD
}

/// The status flags of a packet for which [`is_end`] holds: an EOF packet or, with `deprecate_eof`, an OK packet that
/// begins with `fe`. EOF packets are read in both cases: they are shorter than any OK packet.
pub(crate) fn end_status(payload: &[u8], length: usize, deprecate_eof: bool) -> Option<u16> {
    match length {
        5 => u16_at(payload, 3),
        7.. if deprecate_eof => ok_status(payload),
        _ => None,
    }
}

/// The column count of a result set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Columns {
    pub(crate) count: u16,
    /// Whether column definitions follow.
    pub(crate) defined: bool,
}

/// The column count, and the optional byte after it, which says whether definitions follow (1) or not (0).
///
/// That byte comes with MARIADB_CLIENT_CACHE_METADATA and MySQL's CLIENT_OPTIONAL_RESULTSET_METADATA. MySQL's
/// documentation puts the byte before the count, but MySQL's server writes it after the count
/// (`start_result_metadata`), and MySQL's client reads it there.
pub(crate) fn columns(payload: &[u8], length: usize) -> Option<Columns> {
    let (count, width) = lenenc::read(payload)?;
    let count = u16::try_from(count).ok().filter(|count| *count > 0)?;
    let defined = match length - width {
        0 => true,
        1 => match payload.get(width)? {
            0 => false,
            1 => true,
            _ => return None,
        },
        _ => return None,
    };
    Some(Columns { count, defined })
}

/// The first packet of the response to COM_STMT_PREPARE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prepared {
    pub(crate) statement: u32,
    pub(crate) columns: u16,
    pub(crate) parameters: u16,
    /// Whether definitions follow. False only with CLIENT_OPTIONAL_RESULTSET_METADATA.
    pub(crate) defined: bool,
}

/// Reads the first packet of the response to COM_STMT_PREPARE.
pub(crate) fn prepared(payload: &[u8], optional_metadata: bool) -> Option<Prepared> {
    if *payload.first()? != OK {
        return None;
    }
    Some(Prepared {
        statement: u32::from_le_bytes(*payload.get(1..)?.first_chunk()?),
        columns: u16_at(payload, 5)?,
        parameters: u16_at(payload, 7)?,
        defined: !optional_metadata || payload.get(12) != Some(&0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ok_status_is_read_after_two_lenenc_integers() {
        assert_eq!(ok_status(b"\x00\x00\x00\x02\x00\x00\x00"), Some(2));
        assert_eq!(ok_status(b"\x00\xfc\x00\x01\xfd\x00\x00\x01\x03\x40\x00\x00"), Some(0x4003));
        let longest = [&[0, 0xfe][..], &[1; 8], &[0xfe], &[1; 8], &[0x21, 0x43, 0, 0]].concat();
        assert_eq!(longest.len(), REPLY_PREFIX_BYTES);
        assert_eq!(ok_status(&longest), Some(0x4321));
        for cut in 0..REPLY_PREFIX_BYTES - 2 {
            assert_eq!(ok_status(&longest[..cut]), None, "{cut}");
        }
        assert_eq!(ok_status(b"\x00\xff\x00\x02\x00\x00\x00"), None);
    }

    #[test]
    fn unknown_statement_is_recognized_by_both_error_codes() {
        let text = b"#HY000ERROR 1243 (HY000): Unknown prepared statement handler 9 given to stmt_execute";
        let packet = |code: u16, text: &[u8]| [&[ERROR][..], &code.to_le_bytes(), text].concat();
        for unknown in [packet(1243, b"#HY000Unknown prepared statement handler"), packet(1105, text)] {
            assert!(is_unknown_statement(&unknown) && is_unknown_statement(&unknown[..REPLY_PREFIX_BYTES]));
        }
        for other in [packet(1105, b"#HY000ERROR 1835 (HY000): Malformed"), packet(1105, b"#HY000"), packet(1062, text)]
        {
            assert!(!is_unknown_statement(&other));
        }
    }

    #[test]
    fn end_status_is_read_from_eof_and_ok_packets() {
        assert_eq!(end_status(b"\xfe\x01\x00\x22\x00", 5, false), Some(0x22));
        assert_eq!(end_status(b"\xfe\x01\x00\x22\x00", 5, true), Some(0x22));
        assert_eq!(end_status(b"\xfe\x00\x00\x22\x00\x00\x00", 7, true), Some(0x22));
        assert_eq!(end_status(b"\xfe\x00\x00\x22\x00\x00\x00", 7, false), None);
        assert_eq!(end_status(b"\xfe", 1, true), None);
        assert!(is_end(0xfe, MAX_PAYLOAD - 1) && !is_end(0xfe, MAX_PAYLOAD) && !is_end(0xfd, 5));
    }

    #[test]
    fn column_count_says_whether_definitions_follow() {
        let read = |payload: &[u8]| columns(payload, payload.len()).map(|columns| (columns.count, columns.defined));
        assert_eq!(read(b"\x05"), Some((5, true)));
        assert_eq!(read(b"\x05\x01"), Some((5, true)));
        assert_eq!(read(b"\x05\x00"), Some((5, false)));
        assert_eq!(read(b"\xfc\x00\x10"), Some((4096, true)));
        let wrong: [&[u8]; 6] = [b"", b"\x00", b"\x05\x02", b"\x05\x01\x01", b"\xfc\x00\x00", b"\xfd\x00\x00\x01"];
        for wrong in wrong {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn prepare_response_says_whether_definitions_follow() {
        let payload = b"\x00\x04\x03\x02\x01\x01\x00\x02\x00\x00\x00\x00\x00";
        let read = |payload: &[u8], optional| {
            prepared(payload, optional).map(|it| (it.statement, it.columns, it.parameters, it.defined))
        };
        assert_eq!(read(payload, false), Some((0x0102_0304, 1, 2, true)));
        assert_eq!(read(payload, true), Some((0x0102_0304, 1, 2, false)));
        assert_eq!(read(&payload[..12], true), Some((0x0102_0304, 1, 2, true)));
        assert_eq!(read(&payload[..8], true), None);
        assert_eq!(read(b"\xfe\x04\x03\x02\x01\x01\x00\x02\x00", true), None);
    }

    #[test]
    fn password_requests_are_recognized() {
        for (reply, request) in [
            (&b"\x01\x04"[..], PasswordRequest::Encrypted),
            (b"\xfesha256_password\0", PasswordRequest::Encrypted),
            (b"\xfemysql_clear_password\0", PasswordRequest::ClearText),
            (b"\xfedialog", PasswordRequest::ClearText),
            (b"\xfedialog\0", PasswordRequest::ClearText),
            (b"\xfeauthentication_openid_", PasswordRequest::ClearText),
            (b"\xfetidb_session_token\0", PasswordRequest::SessionToken),
            (b"\xfetidb_session_token\0salt", PasswordRequest::SessionToken),
        ] {
            assert_eq!(password_request(reply), Some(request), "{reply:?}");
        }
        for other in
            [&b"\x01\x03"[..], b"\x01", b"\xfe", b"\xfemysql_native_password\0", b"\xfecaching_sha2_password", b"\0"]
        {
            assert_eq!(password_request(other), None, "{other:?}");
        }
    }
}
