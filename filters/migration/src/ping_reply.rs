//! A node's answer to COM_PING. TiDB answers with error 1053 from the moment at which it is told to stop, and serves all
//! else for a while (pingcap/tidb `pkg/server/conn.go`, `graceful-wait-before-shutdown`). A client would take that for
//! the end of its connection; for the module it is the signal to migrate.

use mysql_proto::error;
use mysql_proto::packet::{HEADER, Header};

/// Server shutdown in progress.
const SERVER_SHUTDOWN: u16 = 1053;
/// The flags that belong to a session. Others tell of its last statement, and a COM_PING has nothing to do with that: in
/// a transaction, autocommit, backslashes do not escape, the transaction reads only.
const SESSION_FLAGS: u16 = 0x0001 | 0x0002 | 0x0200 | 0x2000;

/// What became of bytes of the node.
#[derive(Debug, PartialEq, Eq)]
pub enum PingOutcome {
    /// More are needed.
    Incomplete,
    /// The answer, for the client.
    Complete(Vec<u8>),
    /// The node stops. A client whose session migrates need not know, and gets `hidden` instead of `original`.
    ShuttingDown { hidden: Vec<u8>, original: Vec<u8> },
}

/// One answer, as it comes.
#[derive(Debug, Default)]
pub struct PingReply(Vec<u8>);

impl PingReply {
    /// Takes bytes of the node, not more than belong to the answer; how many that were. `status`: what the session's
    /// last answer said of it, for one of our own.
    pub fn receive(&mut self, bytes: &[u8], status: u16) -> (usize, PingOutcome) {
        let mut taken = 0;
        for wanted in [HEADER, usize::MAX] {
            let whole = if wanted == HEADER { HEADER } else { self.packet_length() };
            let piece = whole.saturating_sub(self.0.len()).min(bytes.len() - taken);
            self.0.extend_from_slice(&bytes[taken..taken + piece]);
            taken += piece;
            if self.0.len() < whole {
                return (taken, PingOutcome::Incomplete);
            }
        }
        let packet = std::mem::take(&mut self.0);
        if error::code(&packet[HEADER..]) != Some(SERVER_SHUTDOWN) {
            return (taken, PingOutcome::Complete(packet));
        }
        let [low, high] = (status & SESSION_FLAGS).to_le_bytes();
        let payload = [0, 0, 0, low, high, 0, 0];
        let header = Header { length: payload.len(), sequence: packet[HEADER - 1] };
        (taken, PingOutcome::ShuttingDown { hidden: [&header.bytes()[..], &payload].concat(), original: packet })
    }

    /// Of the whole packet, once its header is there.
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
        PingOutcome::ShuttingDown { hidden: ok(), original: error(1053) }
    }

    #[test]
    fn a_node_that_stops_says_so_to_nobody_else() {
        let mut reply = PingReply::default();
        assert_eq!(reply.receive(&error(1053), AUTOCOMMIT), (error(1053).len(), shutting_down()));
        assert_eq!(reply.receive(&ok(), AUTOCOMMIT), (ok().len(), PingOutcome::Complete(ok())));
        assert_eq!(reply.receive(&error(1290), AUTOCOMMIT), (error(1290).len(), PingOutcome::Complete(error(1290))));
    }

    #[test]
    fn our_answer_says_nothing_of_the_last_statement() {
        const NO_INDEX_USED: u16 = 0x20;
        let answer = PingReply::default().receive(&error(1053), AUTOCOMMIT | NO_INDEX_USED).1;
        assert_eq!(answer, shutting_down());
    }

    #[test]
    fn it_comes_in_pieces_and_takes_nothing_of_what_follows() {
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
