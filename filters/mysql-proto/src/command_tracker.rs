//! Commands and their responses, message by message: the decisions of [`crate::tracker`].

use crate::capability::Capabilities;
use crate::command::Command;
use crate::command_observer::{CommandObserver, CommandOutcome, PinReason};
use crate::pipeline_queue::PipelineQueue;
use crate::reply;
use crate::statements::{CURSOR, LONG_DATA, Statements};
use crate::status;

/// MariaDB: stands for the statement that was prepared last.
const LAST_PREPARED: u32 = u32::MAX;

/// What the response to a command looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResponseShape {
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

/// How far the response to the front command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResponsePhase {
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
enum ClientMessage {
    None,
    /// The last outstanding command, unless an error has answered it already.
    Command,
    Authentication,
    /// A piece of a file.
    File,
}

/// One session between messages.
#[derive(Debug)]
pub(crate) struct CommandTracker {
    outstanding: PipelineQueue,
    statements: Statements,
    /// The statement that was prepared last.
    prepared: u32,
    /// COM_STMT_SEND_LONG_DATA that may have failed: no response has come since that shows the contrary. Its statement, if
    /// there are several that of the last one, and their number.
    ///
    /// MySQL never responds to that command, but TiDB sends an ERR packet if it fails (pingcap/tidb
    /// `pkg/server/conn_stmt.go`, `handleStmtSendLongData`).
    unconfirmed_data: (u32, u8),
    /// An ERR packet may be the response to unconfirmed data instead of that to the command behind, as which it has counted.
    /// Then the response to that command still comes.
    is_error_ambiguous: bool,
    /// The status flags that the node has sent last.
    status: u16,
    /// Definitions that are to come in this block.
    definitions: u16,
    /// Definitions of the block behind it: the columns, while it is the parameters.
    columns: u16,
    phase: ResponsePhase,
    sending: ClientMessage,
    /// Until an empty one, the client's messages are a file that the node asked for.
    is_uploading: bool,
    /// The node waits for authentication data, or says that it goes on (`01 03`).
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
            prepared: 0,
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
        } else if self.statements.any(LONG_DATA) || self.is_error_ambiguous {
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

    /// The node has rejected unconfirmed data, perhaps because it has no such statement.
    pub(crate) fn on_data_rejected(&mut self, is_unknown: bool) {
        let (statement, count) = self.unconfirmed_data;
        if is_unknown {
            self.statements.remove(statement, LONG_DATA);
        }
        self.unconfirmed_data = (statement, count.saturating_sub(1));
        self.is_error_ambiguous &= count > 1;
    }

    /// Whether the next response is that to a COM_PING.
    pub(crate) fn owes_ping_reply(&self) -> bool {
        self.outstanding.front().is_some_and(|(command, _)| command == Command::Ping)
    }

    pub(crate) const fn status(&self) -> u16 {
        self.status
    }

    /// Whether the client sends a file, and the node waits for its end.
    pub(crate) const fn is_uploading(&self) -> bool {
        self.is_uploading
    }

    /// Whether the next packet of the node is a row, or what ends rows.
    pub(crate) fn is_in_rows(&self) -> bool {
        self.phase == ResponsePhase::Rows
    }

    /// A message of the client begins with `prefix`.
    pub(crate) fn begin_client_message(&mut self, prefix: &[u8], observer: &mut impl CommandObserver) {
        if self.is_uploading {
            self.sending = ClientMessage::File;
            return;
        }
        if self.outstanding.back() == Some(Command::ChangeUser) {
            // Whether a command is sent ahead, or authentication data without a request, is unknown.
            if !self.is_auth_data_awaited {
                return self.stop_tracking();
            }
            self.is_auth_data_awaited = false;
            self.sending = ClientMessage::Authentication;
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
        self.sending = ClientMessage::Command;
        observer.on_command_started(command);
        if response_shape(command) == ResponseShape::Stream || !self.outstanding.push(command, statement) {
            self.stop_tracking();
        }
    }

    /// The message of the client ends, whose first packet had `length` bytes of payload.
    pub(crate) fn end_client_message(&mut self, length: usize, observer: &mut impl CommandObserver) {
        match std::mem::replace(&mut self.sending, ClientMessage::None) {
            ClientMessage::File if length == 0 => self.is_uploading = false,
            ClientMessage::Command => self.finish_silent_commands(observer),
            ClientMessage::File | ClientMessage::Authentication | ClientMessage::None => {}
        }
    }

    /// Whether exactly one command is outstanding.
    pub(crate) fn has_one_command(&self) -> bool {
        self.outstanding.has_one_command()
    }

    /// A message of the node, while [`Self::awaits_reply`]: its first bytes, and the length of its first packet.
    /// Returns whether it ends the response.
    pub(crate) fn receive_reply(&mut self, payload: &[u8], length: usize, observer: &mut impl CommandObserver) -> bool {
        self.has_answered = false;
        if self.understand(payload, length, observer).is_none() {
            self.stop_tracking();
        }
        self.has_answered
    }

    /// None: not understood.
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
        // A node answers in order. So no data was rejected that was sent before this command.
        self.unconfirmed_data = (0, 0);
        self.is_error_ambiguous = false;
        // Only an error may come before the request is complete.
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
                self.prepared = prepared.statement;
                // Whether EOF packets stand in for definitions that are left out is written nowhere.
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
                // A command that was sent ahead would be taken for the file.
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
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn parse_ok_status(payload: &[u8]) -> Option<u16> {
        if *payload.first()? == reply::OK { reply::ok_status(payload) } else { None }
    }

    /// A block of definitions is complete, or had none.
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

    /// A result is complete.
    fn finish_result(&mut self, status: u16, observer: &mut impl CommandObserver) {
        self.status = status;
        let follows = status & status::MORE_RESULTS != 0;
        match self.outstanding.front() {
            Some((command, _)) if follows && response_shape(command) == ResponseShape::Results => {
                self.phase = ResponsePhase::First;
            }
            _ => self.finish_response(CommandOutcome::Ok, observer),
        }
    }

    /// The response to the front command is complete.
    fn finish_response(&mut self, outcome: CommandOutcome, observer: &mut impl CommandObserver) {
        let Some((command, statement)) = self.outstanding.front() else { return };
        self.outstanding.pop();
        self.has_answered = true;
        self.phase = ResponsePhase::First;
        self.is_auth_data_awaited = false;
        if outcome == CommandOutcome::Ok {
            self.apply_command(command, statement);
        }
        observer.on_command_ended(command, outcome);
        if command == Command::Shutdown && outcome == CommandOutcome::Ok {
            // TiDB may send a second OK, which could be mistaken for the response to the next command.
            return self.stop_tracking();
        }
        self.finish_silent_commands(observer);
    }

    /// Ends the commands at the front that have no response, unless they are still being sent.
    fn finish_silent_commands(&mut self, observer: &mut impl CommandObserver) {
        while let Some((command, statement)) = self.outstanding.front() {
            let partial = self.sending == ClientMessage::Command && self.outstanding.has_one_command();
            if response_shape(command) != ResponseShape::Silent || partial {
                break;
            }
            self.outstanding.pop();
            self.apply_command(command, statement);
            observer.on_command_ended(command, CommandOutcome::Silent);
        }
    }

    /// What a command that did not fail leaves behind.
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

    /// What a command that has failed removes. Source: pingcap/tidb `pkg/server/conn_stmt.go`.
    fn apply_failed_command(&mut self, command: Command, statement: u32, is_unknown: bool) {
        let id = self.statement_id(statement);
        match command {
            Command::Execute | Command::BulkExecute | Command::Fetch | Command::ResetStatement if is_unknown => {
                self.statements.remove(id, CURSOR | LONG_DATA);
            }
            // The parameters are used up before the execution. A cursor that was open before may still be (`handleStmtExecute`).
            Command::Execute | Command::BulkExecute => self.statements.remove(id, LONG_DATA),
            // The statement is reset, if it had a cursor at all (`handleStmtFetch`).
            Command::Fetch => self.statements.remove(id, CURSOR),
            _ => {}
        }
    }

    const fn statement_id(&self, statement: u32) -> u32 {
        if statement == LAST_PREPARED { self.prepared } else { statement }
    }
}
