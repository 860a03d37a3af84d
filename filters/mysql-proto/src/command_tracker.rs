//! Tracks commands and their responses, message by message, for [`crate::tracker`].

use crate::capability::Capabilities;
use crate::command::Command;
use crate::command_observer::{CommandObserver, CommandOutcome, PinReason, ResultSize};
use crate::pipeline_queue::PipelineQueue;
use crate::query::{self, LAST_PREPARED};
use crate::reply;
use crate::statements::{CURSOR, LONG_DATA, Statements};
use crate::status;

/// What the response to a command looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResponseShape {
    /// No response.
    Silent,
    /// One OK, EOF or ERR packet.
    Single,
    /// One packet of text, or ERR.
    Text,
    /// Any number of OK packets, result sets and requests for a file.
    Results,
    /// Rows or definitions without a column count in front, then an end packet.
    Rows,
    /// The prepared statement and its definitions.
    Prepared,
    /// Authentication, then OK or ERR.
    Authentication,
    /// Any number of packets, which are not tracked.
    Stream,
}

const fn response_shape(command: Command) -> ResponseShape {
    match command {
        Command::Quit | Command::SendLongData | Command::CloseStatement => ResponseShape::Silent,
        Command::Statistics => ResponseShape::Text,
        Command::Query | Command::Execute | Command::BulkExecute | Command::ProcessInfo => ResponseShape::Results,
        Command::FieldList | Command::Fetch => ResponseShape::Rows,
        Command::Prepare => ResponseShape::Prepared,
        Command::ChangeUser => ResponseShape::Authentication,
        Command::BinlogDump | Command::BinlogDumpGtid | Command::TableDump | Command::RegisterSlave => {
            ResponseShape::Stream
        }
        Command::InitDb
        | Command::Refresh
        | Command::Shutdown
        | Command::ProcessKill
        | Command::Debug
        | Command::Ping
        | Command::ResetStatement
        | Command::SetOption
        | Command::ResetConnection
        | Command::Other => ResponseShape::Single,
    }
}

/// How far the response to the oldest outstanding command has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResponsePhase {
    /// The first packet of a result.
    First,
    /// Definitions of columns or parameters.
    Definitions,
    /// The EOF packet after definitions.
    DefinitionsEnd,
    Rows,
}

/// The message that the client is sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientMessage {
    None,
    /// The newest command. The node may already have answered it with an error.
    Command,
    Authentication,
    /// A part of a file.
    File,
}

/// The command state of one session. Works on messages, not on bytes.
#[derive(Debug)]
pub(crate) struct CommandTracker {
    outstanding: PipelineQueue,
    statements: Statements,
    /// What the node has sent for the present result.
    result: ResultSize,
    /// Id of the statement that was prepared last.
    last_prepared: u32,
    /// COM_STMT_SEND_LONG_DATA commands that may have failed, because no later response shows that they succeeded: the
    /// statement of the last such command, and their number.
    ///
    /// MySQL never responds to this command, but TiDB sends an ERR packet if it fails (pingcap/tidb
    /// `pkg/server/conn_stmt.go`, `handleStmtSendLongData`).
    unconfirmed_data: (u32, u8),
    /// An ERR packet was taken as the response to a command, but may answer unconfirmed data sent before that command.
    /// In that case the command's own response is still to come.
    is_error_ambiguous: bool,
    /// The status flags that the node has sent last.
    status: u16,
    /// Definitions still to come in the current block.
    definitions: u16,
    /// Definitions in the next block: the columns, while the current block has the parameters.
    columns: u16,
    phase: ResponsePhase,
    sending: ClientMessage,
    /// The node asked for a file. The client's messages are parts of the file until an empty message.
    is_uploading: bool,
    /// The node has asked for authentication data. Also set by `01 03`, which asks for none.
    is_auth_data_awaited: bool,
    deprecate_eof: bool,
    optional_metadata: bool,
    is_opaque: bool,
    /// Whether the node's last message ended a response.
    has_answered: bool,
}

impl CommandTracker {
    pub(crate) const fn new(capabilities: Capabilities) -> Self {
        let compressed = capabilities.has(Capabilities::COMPRESS) || capabilities.has(Capabilities::ZSTD_COMPRESSION);
        Self {
            outstanding: PipelineQueue::new(),
            statements: Statements::new(),
            result: ResultSize { rows: 0, bytes: 0 },
            last_prepared: 0,
            unconfirmed_data: (0, 0),
            is_error_ambiguous: false,
            status: status::AUTOCOMMIT,
            definitions: 0,
            columns: 0,
            phase: ResponsePhase::First,
            sending: ClientMessage::None,
            is_uploading: false,
            is_auth_data_awaited: false,
            deprecate_eof: capabilities.has(Capabilities::DEPRECATE_EOF),
            optional_metadata: capabilities.has(Capabilities::OPTIONAL_RESULTSET_METADATA),
            is_opaque: compressed || !capabilities.has(Capabilities::PROTOCOL_41),
            has_answered: false,
        }
    }

    pub(crate) const fn is_opaque(&self) -> bool {
        self.is_opaque
    }

    pub(crate) const fn stop_tracking(&mut self) {
        self.is_opaque = true;
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.outstanding.is_empty() || self.is_uploading || self.sending != ClientMessage::None
    }

    pub(crate) const fn is_in_transaction(&self) -> bool {
        self.status & status::IN_TRANSACTION != 0
    }

    pub(crate) fn pin_reason(&self) -> Option<PinReason> {
        if self.is_opaque {
            Some(PinReason::Opaque)
        } else if self.is_in_transaction() {
            Some(PinReason::Transaction)
        } else if self.statements.any(CURSOR) {
            Some(PinReason::Cursor)
        } else if self.statements.any(LONG_DATA) || self.is_error_ambiguous || self.may_reject_data() {
            Some(PinReason::LongData)
        } else {
            None
        }
    }

    /// Whether the node owes a response.
    pub(crate) fn awaits_reply(&self) -> bool {
        self.outstanding.front().is_some_and(|(command, _)| response_shape(command) != ResponseShape::Silent)
    }

    /// Whether an ERR packet may come that answers COM_STMT_SEND_LONG_DATA.
    pub(crate) const fn may_reject_data(&self) -> bool {
        self.unconfirmed_data.1 > 0
    }

    /// The node has rejected unconfirmed data; `is_unknown`: because it does not know the statement.
    pub(crate) fn on_data_rejected(&mut self, is_unknown: bool) {
        let (statement, count) = self.unconfirmed_data;
        if is_unknown {
            self.statements.remove(statement, LONG_DATA);
        }
        self.unconfirmed_data = (statement, count.saturating_sub(1));
        self.is_error_ambiguous &= count > 1;
    }

    /// Whether the next response answers a COM_PING.
    pub(crate) fn owes_ping_reply(&self) -> bool {
        self.outstanding.front().is_some_and(|(command, _)| command == Command::Ping)
    }

    pub(crate) const fn status(&self) -> u16 {
        self.status
    }

    /// Whether the client is sending a file.
    pub(crate) const fn is_uploading(&self) -> bool {
        self.is_uploading
    }

    /// Whether the client's next message is a command, and not authentication data or a part of a file.
    pub(crate) fn expects_command(&self) -> bool {
        !self.is_uploading && self.outstanding.back() != Some(Command::ChangeUser)
    }

    /// Whether the next packet of the node is a row or the end of rows.
    pub(crate) fn is_in_rows(&self) -> bool {
        self.phase == ResponsePhase::Rows
    }

    /// Like [`Self::is_in_rows`], but also before the first row of a response that consists of rows only.
    pub(crate) fn expects_rows(&self) -> bool {
        let shape = || self.outstanding.front().map(|(command, _)| response_shape(command));
        self.is_in_rows() || self.phase == ResponsePhase::First && shape() == Some(ResponseShape::Rows)
    }

    /// A message of the client begins; `prefix`: the first bytes of its payload.
    pub(crate) fn begin_client_message(&mut self, prefix: &[u8], observer: &mut impl CommandObserver) {
        if self.is_uploading {
            self.sending = ClientMessage::File;
            return;
        }
        if self.outstanding.back() == Some(Command::ChangeUser) {
            // The message may be a command sent ahead, or authentication data that the node did not ask for.
            if !self.is_auth_data_awaited {
                return self.stop_tracking();
            }
            self.is_auth_data_awaited = false;
            self.sending = ClientMessage::Authentication;
            return;
        }
        // A server answers an empty message as it answers an unknown command.
        let command = prefix.first().map_or(Command::Other, |byte| Command::from(*byte));
        let statement = if command.names_statement() { query::statement_id(prefix).unwrap_or(0) } else { 0 };
        self.sending = ClientMessage::Command;
        observer.on_command_started(command);
        if response_shape(command) == ResponseShape::Stream || !self.outstanding.push(command, statement) {
            self.stop_tracking();
        }
    }

    /// The client's message is complete; `length`: payload bytes of its first packet.
    pub(crate) fn end_client_message(&mut self, length: usize, observer: &mut impl CommandObserver) {
        match std::mem::replace(&mut self.sending, ClientMessage::None) {
            ClientMessage::File if length == 0 => self.is_uploading = false,
            ClientMessage::Command => self.finish_silent_commands(observer),
            ClientMessage::File | ClientMessage::Authentication | ClientMessage::None => {}
        }
    }

    /// Counts bytes of the node that belong to a response.
    pub(crate) const fn add_bytes(&mut self, bytes: usize) {
        self.result.bytes += bytes as u64;
    }

    /// Counts rows that were skipped.
    pub(crate) const fn add_rows(&mut self, rows: u64) {
        self.result.rows += rows;
    }

    /// Whether exactly one command is outstanding.
    pub(crate) fn has_one_command(&self) -> bool {
        self.outstanding.has_one_command()
    }

    /// Takes a message of the node. Must be called only while [`Self::awaits_reply`]. `length`: payload bytes of the
    /// message's first packet. Returns whether the message ends the response.
    pub(crate) fn receive_reply(&mut self, payload: &[u8], length: usize, observer: &mut impl CommandObserver) -> bool {
        self.has_answered = false;
        if self.understand(payload, length, observer).is_none() {
            self.stop_tracking();
        }
        self.has_answered
    }

    /// Returns None if the message is not understood.
    fn understand(&mut self, payload: &[u8], length: usize, observer: &mut impl CommandObserver) -> Option<()> {
        let (command, statement) = self.outstanding.front()?;
        if payload.first() == Some(&reply::ERROR) {
            let code = reply::error_code(payload)?;
            if code != reply::PROGRESS {
                self.is_error_ambiguous = self.may_reject_data();
                self.apply_failed_command(command, statement, reply::is_unknown_statement(payload));
                self.finish_response(CommandOutcome::Error(code), observer);
            }
            return Some(());
        }
        // The node answers in order, so it accepted all data that was sent before this command.
        self.unconfirmed_data = (0, 0);
        self.is_error_ambiguous = false;
        // Until the request is complete, the node may only send an error.
        if self.outstanding.has_one_command() && (self.is_uploading || self.sending != ClientMessage::None) {
            return None;
        }
        let shape = response_shape(command);
        if shape == ResponseShape::Text {
            self.finish_response(CommandOutcome::Ok, observer);
            return Some(());
        }
        let first = *payload.first()?;
        let end = || reply::end_status(payload, length, self.deprecate_eof);
        match (self.phase, shape) {
            (ResponsePhase::First, ResponseShape::Single) => {
                let status = if first == reply::END { end() } else { Self::parse_ok_status(payload) };
                self.finish_result(status?, observer);
            }
            (ResponsePhase::First, ResponseShape::Authentication) => match first {
                reply::END | reply::AUTH_MORE | reply::AUTH_NEXT_FACTOR => {
                    self.is_auth_data_awaited = true;
                    if let Some(request) = reply::password_request(payload) {
                        observer.on_password_request(request);
                    }
                }
                _ => self.finish_result(Self::parse_ok_status(payload)?, observer),
            },
            (ResponsePhase::First, ResponseShape::Prepared) => {
                let prepared = reply::prepared(payload, self.optional_metadata)?;
                self.last_prepared = prepared.statement;
                observer.on_prepared(prepared.statement);
                // It is not documented whether the EOF packets of definitions that are left out are left out, too.
                if !prepared.defined && prepared.columns | prepared.parameters != 0 {
                    return None;
                }
                self.definitions = prepared.parameters;
                self.columns = prepared.columns;
                if self.definitions > 0 {
                    self.phase = ResponsePhase::Definitions;
                } else {
                    self.finish_definitions(observer);
                }
            }
            (ResponsePhase::First, ResponseShape::Results) => match first {
                reply::OK => self.finish_result(Self::parse_ok_status(payload)?, observer),
                reply::END => self.finish_result(end()?, observer),
                // A command that was sent ahead would be mistaken for the file.
                reply::LOCAL_INFILE if self.outstanding.has_one_command() => self.is_uploading = true,
                reply::LOCAL_INFILE => return None,
                _ => {
                    let columns = reply::columns(payload, length)?;
                    self.columns = 0;
                    self.definitions = columns.count;
                    self.phase = match (columns.defined, self.deprecate_eof) {
                        (true, _) => ResponsePhase::Definitions,
                        (false, false) => ResponsePhase::DefinitionsEnd,
                        (false, true) => ResponsePhase::Rows,
                    };
                }
            },
            (ResponsePhase::Definitions, _) if first != reply::END => {
                self.definitions = self.definitions.checked_sub(1)?;
                if self.definitions == 0 {
                    if self.deprecate_eof {
                        self.finish_definitions(observer);
                    } else {
                        self.phase = ResponsePhase::DefinitionsEnd;
                    }
                }
            }
            (ResponsePhase::DefinitionsEnd, _) if first == reply::END => {
                let status = end()?;
                if shape == ResponseShape::Prepared {
                    self.finish_definitions(observer);
                } else if command == Command::Execute && status & status::CURSOR_EXISTS != 0 {
                    self.finish_result(status, observer);
                } else {
                    self.status = status;
                    self.phase = ResponsePhase::Rows;
                }
            }
            (ResponsePhase::Rows, _) | (ResponsePhase::First, ResponseShape::Rows) => {
                if reply::is_end(first, length) {
                    self.finish_result(end()?, observer);
                } else {
                    self.phase = ResponsePhase::Rows;
                    self.result.rows += 1;
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn parse_ok_status(payload: &[u8]) -> Option<u16> {
        if *payload.first()? == reply::OK { reply::ok_status(payload) } else { None }
    }

    /// A block of definitions is complete or empty.
    fn finish_definitions(&mut self, observer: &mut impl CommandObserver) {
        self.definitions = std::mem::take(&mut self.columns);
        if self.definitions > 0 {
            self.phase = ResponsePhase::Definitions;
        } else if self.outstanding.front().is_some_and(|(command, _)| command == Command::Prepare) {
            self.finish_response(CommandOutcome::Ok, observer);
        } else {
            self.phase = ResponsePhase::Rows;
        }
    }

    /// A result is complete; more results may follow.
    fn finish_result(&mut self, status: u16, observer: &mut impl CommandObserver) {
        self.status = status;
        let follows = status & status::MORE_RESULTS != 0;
        match self.outstanding.front() {
            Some((command, _)) if follows && response_shape(command) == ResponseShape::Results => {
                self.phase = ResponsePhase::First;
                observer.on_result_ended(
                    CommandOutcome::Ok,
                    std::mem::take(&mut self.result),
                    self.is_in_transaction(),
                );
            }
            _ => self.finish_response(CommandOutcome::Ok, observer),
        }
    }

    fn finish_response(&mut self, outcome: CommandOutcome, observer: &mut impl CommandObserver) {
        let Some((command, statement)) = self.outstanding.front() else { return };
        self.outstanding.pop();
        self.has_answered = true;
        self.phase = ResponsePhase::First;
        self.is_auth_data_awaited = false;
        if outcome == CommandOutcome::Ok {
            self.apply_command(command, statement);
        }
        observer.on_result_ended(outcome, std::mem::take(&mut self.result), self.is_in_transaction());
        observer.on_command_ended(command, outcome);
        if command == Command::Shutdown && outcome == CommandOutcome::Ok {
            // TiDB may send a second OK, which could be mistaken for the response to the next command.
            return self.stop_tracking();
        }
        self.finish_silent_commands(observer);
    }

    /// Ends the commands at the front of the queue that have no response, except one that is still being sent.
    fn finish_silent_commands(&mut self, observer: &mut impl CommandObserver) {
        while let Some((command, statement)) = self.outstanding.front() {
            let is_partial = self.sending == ClientMessage::Command && self.outstanding.has_one_command();
            if response_shape(command) != ResponseShape::Silent || is_partial {
                break;
            }
            self.outstanding.pop();
            self.apply_command(command, statement);
            observer.on_command_ended(command, CommandOutcome::Silent);
        }
    }

    /// Records what a command leaves at the node, unless it failed.
    fn apply_command(&mut self, command: Command, statement: u32) {
        let id = self.statement_id(statement);
        match command {
            Command::SendLongData => {
                self.statements.add(id, LONG_DATA);
                self.unconfirmed_data = (id, self.unconfirmed_data.1.saturating_add(1));
            }
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

    /// Records what a failed command removes at the node (pingcap/tidb `pkg/server/conn_stmt.go`).
    fn apply_failed_command(&mut self, command: Command, statement: u32, is_unknown: bool) {
        let id = self.statement_id(statement);
        match command {
            Command::Execute | Command::BulkExecute | Command::Fetch | Command::ResetStatement if is_unknown => {
                self.statements.remove(id, CURSOR | LONG_DATA);
            }
            // TiDB uses up the parameters before the execution. A cursor may still be open (`handleStmtExecute`).
            Command::Execute | Command::BulkExecute => self.statements.remove(id, LONG_DATA),
            // TiDB resets the statement, if it has a cursor (`handleStmtFetch`).
            Command::Fetch => self.statements.remove(id, CURSOR),
            _ => {}
        }
    }

    const fn statement_id(&self, statement: u32) -> u32 {
        if statement == LAST_PREPARED { self.last_prepared } else { statement }
    }
}
