//! What a node says to `SHOW SESSION_STATES`: one row of two columns of JSON, the states of the session and a token
//! with which it may log in elsewhere.
//!
//! Sources: TiDB's `pkg/executor/show.go` (the columns), `pkg/sessionctx/sessionstates` (what is in them), and
//! `pkg/session/session.go` (what makes it refuse, with error 8146).

use wire::error;
use wire::lenenc;
use wire::packet::MAX_PAYLOAD;

use crate::messages::{Inbox, TooLong, query};

/// Bytes that the row may have. Real ones have some KiB; prepared statements and variables make them longer. A node takes no
/// statement that is longer than this (`max_allowed_packet`), by default.
pub const MOST: usize = 64 << 20;

/// The statement, as it goes to the node.
#[must_use]
pub fn command() -> Vec<u8> {
    query(b"SHOW SESSION_STATES")
}

/// What a session takes along.
#[derive(Clone, PartialEq, Eq)]
pub struct States {
    /// A JSON object; it may contain whatever the client has put into variables.
    pub json: Vec<u8>,
    /// Logs in as the session's user, anywhere, for a minute.
    pub token: Vec<u8>,
}

/// Neither of them belongs into a log.
impl std::fmt::Debug for States {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "States({} bytes, token of {} bytes)", self.json.len(), self.token.len())
    }
}

/// How an export ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exported {
    States(States),
    /// Done; only a statement without a result is answered so.
    Ok,
    /// These states, without a token: the node has no certificate to sign one with.
    NoToken(Vec<u8>),
    /// There are more of them than anybody would take.
    TooMany,
    /// The node's error code. The session goes on as if it had not been asked.
    Refused(u16),
    /// That was no answer to it. Nobody knows what the next bytes of the node belong to.
    Nonsense,
}

#[derive(Debug)]
enum Phase {
    /// OK or ERR, and nothing else.
    Ok,
    Columns,
    /// So many definitions are to come.
    Definitions(u64),
    /// The EOF packet behind them.
    DefinitionsEnd,
    Row,
    End(Exported),
}

/// Reads the answer.
#[derive(Debug)]
pub struct Export {
    inbox: Inbox,
    phase: Phase,
    deprecate_eof: bool,
}

impl Export {
    /// `deprecate_eof`: whether the session leaves EOF packets out.
    #[must_use]
    pub const fn new(deprecate_eof: bool) -> Self {
        Self { inbox: Inbox::skipping(MOST), phase: Phase::Columns, deprecate_eof }
    }

    /// For the answer to a statement without a result.
    #[must_use]
    pub const fn of_ok() -> Self {
        Self { inbox: Inbox::new(MOST), phase: Phase::Ok, deprecate_eof: false }
    }

    /// Takes bytes of the node; what came of it once the answer is complete.
    pub fn take(&mut self, bytes: &[u8]) -> Option<Exported> {
        self.inbox.push(bytes);
        loop {
            let message = match self.inbox.next() {
                Ok(Some(message)) => message,
                Ok(None) => return None,
                Err(TooLong) if matches!(self.phase, Phase::Row) => {
                    self.phase = Phase::End(Exported::TooMany);
                    continue;
                }
                Err(TooLong) => return Some(Exported::Nonsense),
            };
            if let Some(ended) = self.step(&message.payload) {
                return Some(ended);
            }
        }
    }

    /// Whether more has come than the answer. Nobody has asked for that: it is how a node says that it closes.
    #[must_use]
    pub fn says_more(&self) -> bool {
        !self.inbox.is_empty()
    }

    fn step(&mut self, payload: &[u8]) -> Option<Exported> {
        const END: u8 = 0xfe;
        if let Some(code) = error::code(payload) {
            return Some(Exported::Refused(code));
        }
        let ends = payload.first() == Some(&END) && payload.len() < MAX_PAYLOAD;
        let next = match &mut self.phase {
            Phase::Ok if payload.first() == Some(&0) => return Some(Exported::Ok),
            Phase::Ok => return Some(Exported::Nonsense),
            Phase::Columns => match columns(payload) {
                Some(true) => Phase::Definitions(2),
                Some(false) if self.deprecate_eof => Phase::Row,
                Some(false) => Phase::DefinitionsEnd,
                None => return Some(Exported::Nonsense),
            },
            Phase::Definitions(_) if ends => return Some(Exported::Nonsense),
            Phase::Definitions(2..) => Phase::Definitions(1),
            Phase::Definitions(_) if self.deprecate_eof => Phase::Row,
            Phase::Definitions(_) => Phase::DefinitionsEnd,
            Phase::DefinitionsEnd if ends => Phase::Row,
            Phase::Row if !ends => match row(payload) {
                Some(found) => Phase::End(found),
                None => return Some(Exported::Nonsense),
            },
            Phase::End(found) if ends => return Some(std::mem::replace(found, Exported::Nonsense)),
            Phase::DefinitionsEnd | Phase::Row | Phase::End(_) => return Some(Exported::Nonsense),
        };
        self.phase = next;
        None
    }
}

/// Whether definitions follow the number of columns, which must be two. The byte behind the number is there with
/// CLIENT_OPTIONAL_RESULTSET_METADATA only.
fn columns(payload: &[u8]) -> Option<bool> {
    match payload {
        [2] | [2, 1] => Some(true),
        [2, 0] => Some(false),
        _ => None,
    }
}

fn row(payload: &[u8]) -> Option<Exported> {
    const NULL: u8 = 0xfb;
    let (json, rest) = text(payload)?;
    if rest == [NULL] {
        return Some(Exported::NoToken(json.to_vec()));
    }
    let (token, rest) = text(rest)?;
    if json.is_empty() || !rest.is_empty() {
        return None;
    }
    Some(if token.is_empty() {
        Exported::NoToken(json.to_vec())
    } else {
        Exported::States(States { json: json.to_vec(), token: token.to_vec() })
    })
}

/// The text at the front, and what stands behind it.
fn text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, width) = lenenc::read(bytes)?;
    bytes[width..].split_at_checked(usize::try_from(length).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::packets;

    const EOF: &[u8] = &[0xfe, 0, 0, 2, 0];
    const OK_END: &[u8] = &[0xfe, 0, 0, 2, 0, 0, 0];
    const DEFINITION: &[u8] = b"\x03def\0\0\0\x0eSession_states\0\x0c\x2e\0\0\0\0\0\xf5\0\0\0\0\0";

    fn answer(payloads: &[&[u8]]) -> Vec<u8> {
        payloads.iter().zip(1..).flat_map(|(payload, sequence)| packets(payload, sequence)).collect()
    }

    fn a_row(json: &[u8], token: Option<&[u8]>) -> Vec<u8> {
        let mut payload = Vec::new();
        lenenc::write(&mut payload, json.len() as u64);
        payload.extend(json);
        match token {
            Some(token) => {
                lenenc::write(&mut payload, token.len() as u64);
                payload.extend(token);
            }
            None => payload.push(0xfb),
        }
        payload
    }

    fn result(deprecate_eof: bool, row: &[u8]) -> Vec<u8> {
        if deprecate_eof {
            answer(&[&[2], DEFINITION, DEFINITION, row, OK_END])
        } else {
            answer(&[&[2], DEFINITION, DEFINITION, EOF, row, EOF])
        }
    }

    fn taken(deprecate_eof: bool, bytes: &[u8], size: usize) -> Option<Exported> {
        let mut export = Export::new(deprecate_eof);
        let mut pieces = bytes.chunks(size);
        let ended = pieces.find_map(|piece| export.take(piece));
        assert!(ended.is_none() || pieces.next().is_none(), "it ended early");
        ended
    }

    #[test]
    fn the_statement_is_one_packet() {
        assert_eq!(command(), b"\x14\0\0\0\x03SHOW SESSION_STATES");
    }

    #[test]
    fn states_and_token_are_read_however_they_are_cut() {
        let (json, token) = (vec![b'{'; 5000], vec![b't'; 500]);
        for deprecate_eof in [false, true] {
            let bytes = result(deprecate_eof, &a_row(&json, Some(&token)));
            for size in [1, 3, 100, bytes.len()] {
                let states = States { json: json.clone(), token: token.clone() };
                assert_eq!(taken(deprecate_eof, &bytes, size), Some(Exported::States(states)));
            }
        }
    }

    #[test]
    fn a_row_may_be_longer_than_a_packet() {
        let json = vec![b'x'; MAX_PAYLOAD + 10];
        let bytes = result(true, &a_row(&json, Some(b"t")));
        let Some(Exported::States(states)) = taken(true, &bytes, 1 << 20) else { panic!("no states") };
        assert!(states.json == json);
    }

    #[test]
    fn a_node_without_certificate_gives_no_token() {
        for token in [None, Some(&b""[..])] {
            assert_eq!(taken(true, &result(true, &a_row(b"{}", token)), 7), Some(Exported::NoToken(b"{}".to_vec())));
        }
    }

    #[test]
    fn a_refusal_has_its_code() {
        let refusal =
            answer(&[b"\xff\xd2\x1f#HY000cannot migrate the current session: session has active transaction"]);
        assert_eq!(taken(false, &refusal, 4), Some(Exported::Refused(8146)));
        let late = answer(&[&[2], DEFINITION, b"\xff\x25\x05#70100interrupted"]);
        assert_eq!(taken(false, &late, 4), Some(Exported::Refused(1317)));
    }

    #[test]
    fn definitions_may_be_left_out() {
        let row = a_row(b"{}", Some(b"t"));
        assert!(matches!(taken(true, &answer(&[&[2, 0], &row, OK_END]), 5), Some(Exported::States(_))));
        assert!(matches!(taken(false, &answer(&[&[2, 0], EOF, &row, EOF]), 5), Some(Exported::States(_))));
    }

    #[test]
    fn what_is_no_answer_is_known() {
        let row = a_row(b"{}", Some(b"t"));
        for payloads in [
            &[&[3_u8][..]][..],
            &[b"\0\0\0\x02\0\0\0"],
            &[&[2], DEFINITION, EOF],
            &[&[2], DEFINITION, DEFINITION, &row],
            &[&[2], DEFINITION, DEFINITION, EOF, EOF],
            &[&[2], DEFINITION, DEFINITION, EOF, &row, &row],
            &[&[2], DEFINITION, DEFINITION, EOF, b"\x05{}"],
            &[&[2], DEFINITION, DEFINITION, EOF, b"\x02{}\x01tt"],
        ] {
            assert_eq!(taken(false, &answer(payloads), 1 << 10), Some(Exported::Nonsense), "{payloads:?}");
        }
    }

    #[test]
    fn what_comes_behind_the_answer_is_told_apart() {
        let alone = result(false, &a_row(b"{}", Some(b"t")));
        let behind = [&alone[..], b"\xff"].concat();
        for (bytes, more) in [(alone, false), (behind, true)] {
            let mut export = Export::new(false);
            assert!(matches!(export.take(&bytes), Some(Exported::States(_))));
            assert_eq!(export.says_more(), more);
        }
    }

    #[test]
    fn states_are_not_shown() {
        let shown = format!("{:?}", States { json: b"secret".to_vec(), token: b"secret".to_vec() });
        assert!(!shown.contains("secret"));
    }
}
