//! Builds messages of clients and servers.

use mysql_proto::capability::Capabilities;
use mysql_proto::command::Command;
use mysql_proto::packet::{Header, MAX_PAYLOAD};

/// Both ways to end rows: an EOF packet, or an OK packet that begins with `fe`.
pub(crate) const OLD: Capabilities = Capabilities::PROTOCOL_41;
pub(crate) const NEW: Capabilities = Capabilities::PROTOCOL_41.with(Capabilities::DEPRECATE_EOF);

pub(crate) const AUTOCOMMIT: u16 = 0x0002;

/// One message, in as many packets as it takes.
pub(crate) fn message(payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(payload.len() + 8);
    let mut rest = payload;
    for sequence in 0.. {
        let (now, later) = rest.split_at(rest.len().min(MAX_PAYLOAD));
        bytes.extend(Header { length: now.len(), sequence }.bytes());
        bytes.extend(now);
        rest = later;
        if now.len() < MAX_PAYLOAD {
            break;
        }
    }
    bytes
}

/// A command; `rest`: its payload after the first byte.
pub(crate) fn command(command: Command, rest: &[u8]) -> Vec<u8> {
    message(&[&[command as u8], rest].concat())
}

pub(crate) fn query() -> Vec<u8> {
    command(Command::Query, b"SELECT 1")
}

/// A command that names a statement.
pub(crate) fn on(what: Command, statement: u32) -> Vec<u8> {
    command(what, &[&statement.to_le_bytes()[..], &[0, 1, 0, 0, 0]].concat())
}

pub(crate) fn ok(status: u16) -> Vec<u8> {
    message(&[&[0, 0, 0][..], &status.to_le_bytes(), &[0, 0]].concat())
}

/// An OK packet with long integers, a text and session tracking.
pub(crate) fn long_ok(status: u16) -> Vec<u8> {
    let tracked = b"\x05hello\x09\x00\x07\x05autoc";
    message(&[&[0, 0xfd, 1, 2, 3, 0xfe, 1, 2, 3, 4, 5, 6, 7, 8][..], &status.to_le_bytes(), &[0, 0], tracked].concat())
}

pub(crate) fn err(code: u16) -> Vec<u8> {
    message(&[&[0xff][..], &code.to_le_bytes(), b"#HY000", b"no"].concat())
}

/// MariaDB's progress report of a long statement.
pub(crate) fn progress() -> Vec<u8> {
    message(b"\xff\xff\xff\x01\x01\x02\x10\x27\x00\x05stage")
}

pub(crate) fn eof(status: u16) -> Vec<u8> {
    message(&[&[0xfe, 0, 0][..], &status.to_le_bytes()].concat())
}

/// The end of rows.
pub(crate) fn end(capabilities: Capabilities, status: u16) -> Vec<u8> {
    if capabilities.has(Capabilities::DEPRECATE_EOF) {
        message(&[&[0xfe, 0, 0][..], &status.to_le_bytes(), &[0, 0]].concat())
    } else {
        eof(status)
    }
}

pub(crate) fn definition() -> Vec<u8> {
    message(b"\x03def\x01d\x01t\x01t\x01a\x01a\x0c\x21\0\x0b\0\0\0\x03\0\0\0\0\0")
}

/// `count` definitions and, without DEPRECATE_EOF, an EOF packet.
pub(crate) fn definitions(capabilities: Capabilities, count: u16, status: u16) -> Vec<u8> {
    let mut bytes = definition().repeat(usize::from(count));
    if count > 0 && !capabilities.has(Capabilities::DEPRECATE_EOF) {
        bytes.extend(eof(status));
    }
    bytes
}

/// A result set up to its rows.
pub(crate) fn head(capabilities: Capabilities, columns: u8, status: u16) -> Vec<u8> {
    [message(&[columns]), definitions(capabilities, u16::from(columns), status)].concat()
}

/// Rows with different first bytes: a text, NULL, the empty text, a binary row, a long text.
pub(crate) fn rows() -> Vec<u8> {
    let long = [&[0xfc, 0x2c, 1][..], &[b'x'; 300]].concat();
    [message(b"\x011\x012"), message(b"\xfb\xfb"), message(b"\0"), message(b"\0\0\x01\0\0\0"), message(&long)].concat()
}

pub(crate) fn result_set(capabilities: Capabilities, columns: u8, status: u16) -> Vec<u8> {
    [head(capabilities, columns, status & !8), rows(), end(capabilities, status)].concat()
}

pub(crate) fn prepared(capabilities: Capabilities, statement: u32, columns: u16, parameters: u16) -> Vec<u8> {
    let mut payload = vec![0];
    payload.extend(statement.to_le_bytes());
    payload.extend(columns.to_le_bytes());
    payload.extend(parameters.to_le_bytes());
    payload.extend([0, 0, 0]);
    [
        message(&payload),
        definitions(capabilities, parameters, AUTOCOMMIT),
        definitions(capabilities, columns, AUTOCOMMIT),
    ]
    .concat()
}
