//! A node's answer to COM_PING. TiDB answers with error 1053 from the moment at which it is told to stop, and serves all
//! else for a while (pingcap/tidb `pkg/server/conn.go`, `graceful-wait-before-shutdown`). A client would take that for
//! the end of its connection; it is the moment to move.

use wire::error;
use wire::packet::{HEADER, Header};

/// Server shutdown in progress.
const STOPPING: u16 = 1053;
/// The flags that belong to a session. Others tell of its last statement, and a COM_PING has nothing to do with that: in
/// a transaction, autocommit, backslashes do not escape, the transaction reads only.
const OF_SESSION: u16 = 0x0001 | 0x0002 | 0x0200 | 0x2000;

/// What became of bytes of the node.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// More are needed.
    Part,
    /// The answer, for the client.
    Whole(Vec<u8>),
    /// The node stops; this is for the client, who need not know.
    Stopping(Vec<u8>),
}

/// One answer, as it comes.
#[derive(Debug, Default)]
pub struct Pong(Vec<u8>);

impl Pong {
    /// Takes bytes of the node, not more than belong to the answer; how many that were. `status`: what the session's
    /// last answer said of it, for one of our own.
    pub fn take(&mut self, bytes: &[u8], status: u16) -> (usize, Answer) {
        let mut taken = 0;
        for wanted in [HEADER, usize::MAX] {
            let whole = if wanted == HEADER { HEADER } else { self.length() };
            let piece = whole.saturating_sub(self.0.len()).min(bytes.len() - taken);
            self.0.extend_from_slice(&bytes[taken..taken + piece]);
            taken += piece;
            if self.0.len() < whole {
                return (taken, Answer::Part);
            }
        }
        let packet = std::mem::take(&mut self.0);
        if error::code(&packet[HEADER..]) != Some(STOPPING) {
            return (taken, Answer::Whole(packet));
        }
        let [low, high] = (status & OF_SESSION).to_le_bytes();
        let payload = [0, 0, 0, low, high, 0, 0];
        let header = Header { length: payload.len(), sequence: packet[HEADER - 1] };
        (taken, Answer::Stopping([&header.bytes()[..], &payload].concat()))
    }

    /// Of the whole packet, once its header is there.
    fn length(&self) -> usize {
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

    #[test]
    fn a_node_that_stops_says_so_to_nobody_else() {
        let mut pong = Pong::default();
        assert_eq!(pong.take(&error(1053), AUTOCOMMIT), (error(1053).len(), Answer::Stopping(ok())));
        assert_eq!(pong.take(&ok(), AUTOCOMMIT), (ok().len(), Answer::Whole(ok())));
        assert_eq!(pong.take(&error(1290), AUTOCOMMIT), (error(1290).len(), Answer::Whole(error(1290))));
    }

    #[test]
    fn our_answer_says_nothing_of_the_last_statement() {
        const NO_INDEX_USED: u16 = 0x20;
        let answer = Pong::default().take(&error(1053), AUTOCOMMIT | NO_INDEX_USED).1;
        assert_eq!(answer, Answer::Stopping(ok()));
    }

    #[test]
    fn it_comes_in_pieces_and_takes_nothing_of_what_follows() {
        let bytes = [error(1053), ok()].concat();
        for size in 1..bytes.len() {
            let mut pong = Pong::default();
            let mut rest = &bytes[..];
            let mut answers = Vec::new();
            while !rest.is_empty() {
                let (taken, answer) = pong.take(&rest[..size.min(rest.len())], AUTOCOMMIT);
                rest = &rest[taken..];
                if answer != Answer::Part {
                    answers.push(answer);
                }
            }
            assert_eq!(answers, [Answer::Stopping(ok()), Answer::Whole(ok())], "{size}");
        }
    }
}
