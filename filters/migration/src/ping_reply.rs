//! Answers to COM_PING. A TiDB server that is shutting down answers with error 1053, but serves all other commands for
//! a while (pingcap/tidb `pkg/server/conn.go`, `graceful-wait-before-shutdown`). A client would take the error for the
//! end of its connection; the module takes it as the signal to migrate.

use mysql_proto::error;
use mysql_proto::packet::{HEADER, Header};

/// ER_SERVER_SHUTDOWN: server shutdown in progress.
const SERVER_SHUTDOWN: u16 = 1053;
/// The status flags of the session: in a transaction, autocommit, no backslash escapes, read-only transaction. The
/// other flags describe the last statement, so an answer to COM_PING must not have them.
const SESSION_FLAGS: u16 = 0x0001 | 0x0002 | 0x0200 | 0x2000;

/// The result of [`PingReply::receive`].
#[derive(Debug, PartialEq, Eq)]
pub enum PingOutcome {
    /// More bytes are needed.
    Incomplete,
    /// The node's answer, for the client.
    Complete(Vec<u8>),
    /// The node is shutting down. A client whose session migrates gets the OK packet `ok` instead of the node's
    /// `error`.
    ShuttingDown { ok: Vec<u8>, error: Vec<u8> },
}

/// Collects one answer.
#[derive(Debug, Default)]
pub struct PingReply(Vec<u8>);

impl PingReply {
    /// Takes bytes of the node, but none after the answer. Returns how many were taken, and the result. `status`: the
    /// session's current status flags, for an answer that replaces the node's.
    pub fn receive(&mut self, bytes: &[u8], status: u16) -> (usize, PingOutcome) {
        let header = self.take(bytes, HEADER);
        let taken = header + self.take(&bytes[header..], self.packet_length());
        if self.0.len() < self.packet_length() {
            return (taken, PingOutcome::Incomplete);
        }
        let packet = std::mem::take(&mut self.0);
        if error::code(&packet[HEADER..]) != Some(SERVER_SHUTDOWN) {
            return (taken, PingOutcome::Complete(packet));
        }
        let [low, high] = (status & SESSION_FLAGS).to_le_bytes();
        let payload = [0, 0, 0, low, high, 0, 0];
        let header = Header { length: payload.len(), sequence: packet[HEADER - 1] };
        (taken, PingOutcome::ShuttingDown { ok: [&header.bytes()[..], &payload].concat(), error: packet })
    }

    /// Takes bytes until `length` bytes of the packet are there. Returns how many were taken.
    fn take(&mut self, bytes: &[u8], length: usize) -> usize {
        let taken = length.saturating_sub(self.0.len()).min(bytes.len());
        self.0.extend_from_slice(&bytes[..taken]);
        taken
    }

    /// The length of the packet with its header. While the header is incomplete, only that of the header.
    fn packet_length(&self) -> usize {
        HEADER + Header::parse(&self.0).map_or(0, |header| header.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::packets;

    const AUTOCOMMIT: u16 = 2;

    fn error(code: u16) -> Vec<u8> {
        let [low, high] = code.to_le_bytes();
        packets(&[&[0xff, low, high][..], b"#08S01Server shutdown in progress"].concat(), 1)
    }

    fn ok() -> Vec<u8> {
        packets(&[0, 0, 0, 2, 0, 0, 0], 1)
    }

    fn shutting_down() -> PingOutcome {
        PingOutcome::ShuttingDown { ok: ok(), error: error(1053) }
    }

    #[test]
    fn only_the_shutdown_error_is_replaced() {
        let mut reply = PingReply::default();
        assert_eq!(reply.receive(&error(1053), AUTOCOMMIT), (error(1053).len(), shutting_down()));
        assert_eq!(reply.receive(&ok(), AUTOCOMMIT), (ok().len(), PingOutcome::Complete(ok())));
        assert_eq!(reply.receive(&error(1290), AUTOCOMMIT), (error(1290).len(), PingOutcome::Complete(error(1290))));
    }

    #[test]
    fn ok_packet_has_only_flags_of_the_session() {
        const NO_INDEX_USED: u16 = 0x20;
        let answer = PingReply::default().receive(&error(1053), AUTOCOMMIT | NO_INDEX_USED).1;
        assert_eq!(answer, shutting_down());
    }

    #[test]
    fn answer_is_read_in_pieces_without_the_bytes_after_it() {
        let bytes = [error(1053), ok()].concat();
        for size in 1..bytes.len() {
            let mut reply = PingReply::default();
            let mut rest = &bytes[..];
            let mut answers = Vec::new();
            while !rest.is_empty() {
                let (taken, answer) = reply.receive(&rest[..size.min(rest.len())], AUTOCOMMIT);
                rest = &rest[taken..];
                if answer != PingOutcome::Incomplete {
                    answers.push(answer);
                }
            }
            assert_eq!(answers, [shutting_down(), PingOutcome::Complete(ok())], "{size}");
        }
    }
}
