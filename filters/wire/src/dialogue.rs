//! Commands and their responses, message by message: the decisions of [`crate::tracker`].

use crate::capability::Capabilities;
use crate::command::Command;
use crate::events::{Listener, Outcome, Pinned};
use crate::reply;
use crate::ring::Ring;
use crate::statements::{CURSOR, LONG_DATA, Statements};
use crate::status;

/// MariaDB: stands for the statement that was prepared last.
const LAST_PREPARED: u32 = u32::MAX;

/// What the response to a command looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// None.
    Silent,
    /// One OK, EOF or ERR packet.
    Single,
    /// One packet of text, or ERR.
    Text,
    /// Any number of OK packets, result sets and requests for a file.
    Results,
    /// Rows or definitions without the number of columns, then their end.
    Rows,
    /// A statement and its definitions.
    Prepared,
    /// Authentication, then OK or ERR.
    Authentication,
    /// Not followed.
    Stream,
}

const fn shape(command: Command) -> Shape {
    match command {
        Command::Quit | Command::SendLongData | Command::CloseStatement => Shape::Silent,
        Command::Statistics => Shape::Text,
        Command::Query | Command::Execute | Command::BulkExecute | Command::ProcessInfo => Shape::Results,
        Command::FieldList | Command::Fetch => Shape::Rows,
        Command::Prepare => Shape::Prepared,
        Command::ChangeUser => Shape::Authentication,
        Command::BinlogDump | Command::BinlogDumpGtid | Command::TableDump | Command::RegisterSlave => Shape::Stream,
        Command::InitDb
        | Command::Refresh
        | Command::Shutdown
        | Command::ProcessKill
        | Command::Debug
        | Command::Ping
        | Command::ResetStatement
        | Command::SetOption
        | Command::ResetConnection
        | Command::Other => Shape::Single,
    }
}

/// How far the response to the front command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first packet of a result.
    First,
    /// Definitions of columns or parameters.
    Definitions,
    /// The EOF packet behind definitions.
    DefinitionsEnd,
    Rows,
}

/// The message that the client is in the middle of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sending {
    Nothing,
    /// The last outstanding command, unless an error has answered it already.
    Command,
    Authentication,
    /// A piece of a file.
    File,
}

/// One session between messages.
#[derive(Debug)]
pub(crate) struct Dialogue {
    outstanding: Ring,
    statements: Statements,
    /// The statement that was prepared last.
    prepared: u32,
    /// What the node said last.
    status: u16,
    /// Definitions that are to come in this block.
    definitions: u16,
    /// Definitions of the block behind it: the columns, while it is the parameters.
    columns: u16,
    phase: Phase,
    sending: Sending,
    /// Until an empty one, the client's messages are a file that the node asked for.
    uploading: bool,
    /// The node waits for authentication data, or says that it goes on (`01 03`).
    asked: bool,
    deprecate_eof: bool,
    optional_metadata: bool,
    opaque: bool,
    /// Whether the node's last message ended a response.
    answered: bool,
}

impl Dialogue {
    pub(crate) const fn new(capabilities: Capabilities) -> Self {
        let compressed = capabilities.has(Capabilities::COMPRESS) || capabilities.has(Capabilities::ZSTD_COMPRESSION);
        Self {
            outstanding: Ring::new(),
            statements: Statements::new(),
            prepared: 0,
            status: status::AUTOCOMMIT,
            definitions: 0,
            columns: 0,
            phase: Phase::First,
            sending: Sending::Nothing,
            uploading: false,
            asked: false,
            deprecate_eof: capabilities.has(Capabilities::DEPRECATE_EOF),
            optional_metadata: capabilities.has(Capabilities::OPTIONAL_RESULTSET_METADATA),
            opaque: compressed || !capabilities.has(Capabilities::PROTOCOL_41),
            answered: false,
        }
    }

    pub(crate) const fn is_opaque(&self) -> bool {
        self.opaque
    }

    pub(crate) const fn give_up(&mut self) {
        self.opaque = true;
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || self.uploading || self.sending != Sending::Nothing
    }

    pub(crate) const fn in_transaction(&self) -> bool {
        self.status & status::IN_TRANSACTION != 0
    }

    pub(crate) fn pinned(&self) -> Option<Pinned> {
        if self.opaque {
            Some(Pinned::Opaque)
        } else if self.in_transaction() {
            Some(Pinned::Transaction)
        } else if self.statements.any(CURSOR) {
            Some(Pinned::Cursor)
        } else if self.statements.any(LONG_DATA) {
            Some(Pinned::LongData)
        } else {
            None
        }
    }

    /// Whether the node owes a response.
    pub(crate) fn awaits_reply(&self) -> bool {
        self.outstanding.front().is_some_and(|(command, _)| shape(command) != Shape::Silent)
    }

    /// Whether the next response is that to a COM_PING.
    pub(crate) fn owes_pong(&self) -> bool {
        self.outstanding.front().is_some_and(|(command, _)| command == Command::Ping)
    }

    pub(crate) const fn status(&self) -> u16 {
        self.status
    }

    /// Whether the client sends a file, and the node waits for its end.
    pub(crate) const fn is_uploading(&self) -> bool {
        self.uploading
    }

    /// Whether the next packet of the node is a row, or what ends rows.
    pub(crate) fn in_rows(&self) -> bool {
        self.phase == Phase::Rows
    }

    /// A message of the client begins with `prefix`.
    pub(crate) fn begin(&mut self, prefix: &[u8], listener: &mut impl Listener) {
        if self.uploading {
            self.sending = Sending::File;
            return;
        }
        if self.outstanding.back() == Some(Command::ChangeUser) {
            // Whether a command is sent ahead, or authentication data that nobody asked for, cannot be told.
            if !self.asked {
                return self.give_up();
            }
            self.asked = false;
            self.sending = Sending::Authentication;
            return;
        }
        // A server answers an empty message as it answers an unknown command.
        let command = prefix.first().map_or(Command::Other, |byte| Command::from(*byte));
        let statement = match command {
            Command::Execute
            | Command::BulkExecute
            | Command::SendLongData
            | Command::CloseStatement
            | Command::ResetStatement
            | Command::Fetch => prefix.get(1..).and_then(<[u8]>::first_chunk).map_or(0, |id| u32::from_le_bytes(*id)),
            _ => 0,
        };
        self.sending = Sending::Command;
        listener.started(command);
        if shape(command) == Shape::Stream || !self.outstanding.push(command, statement) {
            self.give_up();
        }
    }

    /// The message of the client ends, whose first packet had `length` bytes of payload.
    pub(crate) fn end(&mut self, length: usize, listener: &mut impl Listener) {
        match std::mem::replace(&mut self.sending, Sending::Nothing) {
            Sending::File if length == 0 => self.uploading = false,
            Sending::Command => self.end_silent(listener),
            Sending::File | Sending::Authentication | Sending::Nothing => {}
        }
    }

    /// Whether exactly one command is outstanding.
    pub(crate) fn is_single(&self) -> bool {
        self.outstanding.is_single()
    }

    /// A message of the node, while [`Self::awaits_reply`]: its first bytes, and the length of its first packet.
    /// Returns whether it ends the response.
    pub(crate) fn reply(&mut self, payload: &[u8], length: usize, listener: &mut impl Listener) -> bool {
        self.answered = false;
        if self.understand(payload, length, listener).is_none() {
            self.give_up();
        }
        self.answered
    }

    /// None: not understood.
    fn understand(&mut self, payload: &[u8], length: usize, listener: &mut impl Listener) -> Option<()> {
        let (command, _) = self.outstanding.front()?;
        if payload.first() == Some(&reply::ERROR) {
            let code = reply::error_code(payload)?;
            if code != reply::PROGRESS {
                self.close(Outcome::Error(code), listener);
            }
            return Some(());
        }
        // Only an error may come before the request is complete.
        if self.outstanding.is_single() && (self.uploading || self.sending != Sending::Nothing) {
            return None;
        }
        let shape = shape(command);
        if shape == Shape::Text {
            self.close(Outcome::Ok, listener);
            return Some(());
        }
        let first = *payload.first()?;
        let end = || reply::end_status(payload, length, self.deprecate_eof);
        match (self.phase, shape) {
            (Phase::First, Shape::Single) => {
                let status = if first == reply::END { end() } else { Self::ok(payload) };
                self.finish(status?, listener);
            }
            (Phase::First, Shape::Authentication) => match first {
                reply::END | reply::AUTH_MORE | reply::AUTH_NEXT_FACTOR => {
                    self.asked = true;
                    if reply::asks_for_clear_text(payload) {
                        listener.asked_for_clear_text();
                    }
                }
                _ => self.finish(Self::ok(payload)?, listener),
            },
            (Phase::First, Shape::Prepared) => {
                let prepared = reply::prepared(payload, self.optional_metadata)?;
                self.prepared = prepared.statement;
                // Whether EOF packets stand in for definitions that are left out is written nowhere.
                if !prepared.defined && prepared.columns | prepared.parameters != 0 {
                    return None;
                }
                self.definitions = prepared.parameters;
                self.columns = prepared.columns;
                if self.definitions > 0 {
                    self.phase = Phase::Definitions;
                } else {
                    self.defined(listener);
                }
            }
            (Phase::First, Shape::Results) => match first {
                reply::OK => self.finish(Self::ok(payload)?, listener),
                reply::END => self.finish(end()?, listener),
                // A command that was sent ahead would be taken for the file.
                reply::LOCAL_INFILE if self.outstanding.is_single() => self.uploading = true,
                reply::LOCAL_INFILE => return None,
                _ => {
                    let columns = reply::columns(payload, length)?;
                    self.columns = 0;
                    self.definitions = columns.count;
                    self.phase = match (columns.defined, self.deprecate_eof) {
                        (true, _) => Phase::Definitions,
                        (false, false) => Phase::DefinitionsEnd,
                        (false, true) => Phase::Rows,
                    };
                }
            },
            (Phase::Definitions, _) if first != reply::END => {
                self.definitions = self.definitions.checked_sub(1)?;
                if self.definitions == 0 {
                    if self.deprecate_eof {
                        self.defined(listener);
                    } else {
                        self.phase = Phase::DefinitionsEnd;
                    }
                }
            }
            (Phase::DefinitionsEnd, _) if first == reply::END => {
                let status = end()?;
                if shape == Shape::Prepared {
                    self.defined(listener);
                } else if command == Command::Execute && status & status::CURSOR_EXISTS != 0 {
                    self.finish(status, listener);
                } else {
                    self.status = status;
                    self.phase = Phase::Rows;
                }
            }
            (Phase::Rows, _) | (Phase::First, Shape::Rows) => {
                if reply::is_end(first, length) {
                    self.finish(end()?, listener);
                } else {
                    self.phase = Phase::Rows;
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn ok(payload: &[u8]) -> Option<u16> {
        if *payload.first()? == reply::OK { reply::ok_status(payload) } else { None }
    }

    /// A block of definitions is complete, or had none.
    fn defined(&mut self, listener: &mut impl Listener) {
        self.definitions = std::mem::take(&mut self.columns);
        if self.definitions > 0 {
            self.phase = Phase::Definitions;
        } else if self.outstanding.front().is_some_and(|(command, _)| command == Command::Prepare) {
            self.close(Outcome::Ok, listener);
        } else {
            self.phase = Phase::Rows;
        }
    }

    /// A result is complete.
    fn finish(&mut self, status: u16, listener: &mut impl Listener) {
        self.status = status;
        let follows = status & status::MORE_RESULTS != 0;
        match self.outstanding.front() {
            Some((command, _)) if follows && shape(command) == Shape::Results => self.phase = Phase::First,
            _ => self.close(Outcome::Ok, listener),
        }
    }

    /// The response to the front command is complete.
    fn close(&mut self, outcome: Outcome, listener: &mut impl Listener) {
        let Some((command, statement)) = self.outstanding.front() else { return };
        self.outstanding.pop();
        self.answered = true;
        self.phase = Phase::First;
        self.asked = false;
        if outcome == Outcome::Ok {
            self.take_effect(command, statement);
        }
        listener.ended(command, outcome);
        if command == Command::Shutdown && outcome == Outcome::Ok {
            // TiDB may send a second OK, which could be mistaken for the response to the next command.
            return self.give_up();
        }
        self.end_silent(listener);
    }

    /// Ends the commands at the front that have no response, unless they are still being sent.
    fn end_silent(&mut self, listener: &mut impl Listener) {
        while let Some((command, statement)) = self.outstanding.front() {
            let partial = self.sending == Sending::Command && self.outstanding.is_single();
            if shape(command) != Shape::Silent || partial {
                break;
            }
            self.outstanding.pop();
            self.take_effect(command, statement);
            listener.ended(command, Outcome::Silent);
        }
    }

    /// What a command that did not fail leaves behind. After an error all stays as it was: a failed execution or
    /// fetch pins the session until the statement is executed, reset or closed.
    fn take_effect(&mut self, command: Command, statement: u32) {
        let id = if statement == LAST_PREPARED { self.prepared } else { statement };
        match command {
            Command::SendLongData => self.statements.add(id, LONG_DATA),
            Command::Execute if self.status & status::CURSOR_EXISTS != 0 => {
                self.statements.remove(id, LONG_DATA);
                self.statements.add(id, CURSOR);
            }
            Command::Fetch if self.status & status::LAST_ROW_SENT != 0 => self.statements.remove(id, CURSOR),
            Command::Fetch => self.statements.add(id, CURSOR),
            Command::Execute | Command::BulkExecute | Command::ResetStatement | Command::CloseStatement => {
                self.statements.remove(id, CURSOR | LONG_DATA);
            }
            Command::ResetConnection | Command::ChangeUser => self.statements.clear(),
            _ => {}
        }
    }
}
