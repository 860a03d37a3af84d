//! What a node says to `SHOW SESSION_STATES`: one row of two columns of JSON, the states of the session and a token
//! with which it may log in elsewhere.
//!
//! The row is not stored. While it arrives, its JSON is scanned and becomes the statement that restores it elsewhere. If it is
//! too long for that, it is only scanned.
//!
//! Sources: TiDB's `pkg/executor/show.go` (the columns), `pkg/sessionctx/sessionstates` (what is in them), and
//! `pkg/session/session.go` (what makes it refuse, with error 8146).

mod row;

use std::rc::Rc;

use wire::error;
use wire::packet::{HEADER, Header, MAX_PAYLOAD};

use crate::budget::MemoryLimits;
use crate::messages::query;
use crate::restore::RestoreStatement;
use crate::states::{Summary, Unusable};
use row::Row;

/// The most bytes of a message other than the row. Errors are the longest.
const MAX_MESSAGE: usize = 64 * 1024;

/// The statement, as it goes to the node.
#[must_use]
pub fn command() -> Vec<u8> {
    query(b"SHOW SESSION_STATES")
}

/// What a session takes along.
#[derive(Clone, PartialEq, Eq)]
pub struct States {
    /// Restores them at another node. It contains whatever the client has put into variables.
    pub statement: Rc<RestoreStatement>,
    /// Logs in as the session's user, anywhere, for a minute.
    pub token: Vec<u8>,
    pub summary: Summary,
}

/// Neither of them belongs into a log.
impl std::fmt::Debug for States {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "States({:?}, token of {} bytes)", self.statement, self.token.len())
    }
}

/// How an export ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Exported {
    States(States),
    /// Done; only a statement without a result is answered so.
    Ok,
    /// There are states without a token: the node has no certificate to sign one with.
    NoToken(Summary),
    /// There are states that cannot be carried over.
    Unusable(Unusable, Summary),
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
    /// The answer is complete.
    Over,
}

/// Reads the answer.
#[derive(Debug)]
pub struct Export {
    phase: Phase,
    deprecate_eof: bool,
    limits: MemoryLimits,
    /// The header of the packet, as far as it was received.
    header: Vec<u8>,
    /// Payload bytes of the packet that are still to come.
    to_come: usize,
    /// Another packet continues this one.
    continues: bool,
    message: Message,
    has_more: bool,
}

/// A message that is not complete yet.
#[derive(Debug)]
enum Message {
    None,
    /// A short one, which is read when it is complete.
    Short(Vec<u8>),
    Row(Box<Row>),
}

impl Export {
    /// `deprecate_eof`: whether the session leaves EOF packets out.
    #[must_use]
    pub fn new(deprecate_eof: bool, limits: MemoryLimits) -> Self {
        Self::at(Phase::Columns, deprecate_eof, limits)
    }

    /// For the answer to a statement without a result.
    #[must_use]
    pub fn of_ok() -> Self {
        Self::at(Phase::Ok, false, MemoryLimits::default())
    }

    fn at(phase: Phase, deprecate_eof: bool, limits: MemoryLimits) -> Self {
        let (header, message) = (Vec::new(), Message::None);
        Self { phase, deprecate_eof, limits, header, to_come: 0, continues: false, message, has_more: false }
    }

    /// Takes bytes of the node; what came of it once the answer is complete.
    pub fn take(&mut self, bytes: &[u8]) -> Option<Exported> {
        let mut rest = bytes;
        loop {
            if self.header.len() < HEADER {
                let taken = rest.len().min(HEADER - self.header.len());
                self.header.extend_from_slice(&rest[..taken]);
                rest = &rest[taken..];
                let header = Header::parse(&self.header)?;
                self.to_come = header.length;
                self.continues = header.length == MAX_PAYLOAD;
            }
            let taken = rest.len().min(self.to_come);
            if !self.push(&rest[..taken]) {
                return Some(Exported::Nonsense);
            }
            self.to_come -= taken;
            rest = &rest[taken..];
            if self.to_come > 0 {
                return None;
            }
            self.header.clear();
            if !self.continues
                && let Some(ended) = self.end_message()
            {
                self.phase = Phase::Over;
                self.has_more = !rest.is_empty();
                return Some(ended);
            }
        }
    }

    /// Whether more has come than the answer. Nobody has asked for that: it is how a node says that it closes.
    #[must_use]
    pub const fn says_more(&self) -> bool {
        self.has_more
    }

    /// Payload bytes of a message. False: the message is invalid.
    fn push(&mut self, bytes: &[u8]) -> bool {
        if let (Message::None, Some(&first)) = (&self.message, bytes.first()) {
            // No row begins so (`wire::lenenc`), unless it takes several packets.
            let is_short = !matches!(self.phase, Phase::Row) || first == 0xff || self.is_end(first);
            self.message = if is_short { Message::Short(Vec::new()) } else { Message::Row(Row::new(&self.limits)) };
        }
        match &mut self.message {
            Message::None => true,
            Message::Short(message) => {
                message.extend_from_slice(bytes);
                message.len() <= MAX_MESSAGE
            }
            Message::Row(row) => row.push(bytes),
        }
    }

    /// Whether a message that begins so is an EOF packet, or the OK packet that replaces it.
    const fn is_end(&self, first: u8) -> bool {
        const END: u8 = 0xfe;
        first == END && !self.continues
    }

    /// A message is complete.
    fn end_message(&mut self) -> Option<Exported> {
        match std::mem::replace(&mut self.message, Message::None) {
            Message::None => self.step(&[]),
            Message::Short(payload) => self.step(&payload),
            Message::Row(row) => match row.finish() {
                Some(found) => {
                    self.phase = Phase::End(found);
                    None
                }
                None => Some(Exported::Nonsense),
            },
        }
    }

    fn step(&mut self, payload: &[u8]) -> Option<Exported> {
        if let Some(code) = error::code(payload) {
            return Some(Exported::Refused(code));
        }
        let ends = payload.first().is_some_and(|&first| self.is_end(first));
        let next = match &mut self.phase {
            Phase::Ok if payload.first() == Some(&0) => return Some(Exported::Ok),
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
            Phase::End(found) if ends => return Some(std::mem::replace(found, Exported::Nonsense)),
            Phase::Ok | Phase::DefinitionsEnd | Phase::Row | Phase::End(_) | Phase::Over => {
                return Some(Exported::Nonsense);
            }
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

#[cfg(test)]
mod tests;
